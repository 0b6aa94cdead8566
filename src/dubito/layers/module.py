"""A pass with a context as a module of its own, which `torch.compile` and `torch.export` can take."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .context import Context
from .kinds import Standin
from .passes import unnest
from .shell import take


class PassModule(nn.Module):
    """Answers what a network answers where a context is asked; its parameters are the network's that ask.

    While dynamo traces, standins are made anew: it ignores, without an error, those that stood on a module before.
    Other tracers (`torch.export` with strict=False) need them before, since a fake tensor cannot be made one.

    Args:
        network: whose shell is taken for good; the network itself is left as it is.
        context: what the pass does wherever one of these parameters is used.
        names: of the parameters that ask.
        tensors: in place of the network's parameters and buffers, by name.
    """

    def __init__(
        self, network: nn.Module, context: Context, names: Iterable[str], tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        shell = take(network, tensors).withdraw()
        self.shell, self.context = shell.module, context
        for module in shell.modules:
            vars(module)["_compiled_call_impl"] = None
        unnest(shell.module)
        self._slots: list[tuple[nn.Module, str, str, str]] = []
        for number, name in enumerate(names):
            for place, key in shell.plan.places[name]:
                module, value = shell.modules[place // 2], shell.slots[place].pop(key)
                self.register_parameter(f"value{number}", nn.Parameter(value.detach(), value.requires_grad))
                self._slots.append((module, key, name, f"value{number}"))
        self._fill()

    def _fill(self) -> None:
        for module, key, name, value in self._slots:
            object.__setattr__(module, key, Standin.of(getattr(self, value), name, self.context))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            self._fill()
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        self.context.begin(first.shape[0])
        return self.shell(*args, **kwargs)
