"""Watching layers from an optimiser: what each row says, for the parameters it was given and nothing else."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ..curvature.products import ProductSums
from ..curvature.sums import DiagonalSums, Wanted
from ..layers.ports import is_opened, specs, tappable
from ..layers.taps import Call, Link, Port, Tap
from ..layers.trace import Layout
from ..layers.uses import Product, Use


class Watch:
    """Records what layers see, while open, and sums it over rows.

    Layers are found as they are called, by the parameters they hold. A row is what stands at one place of the
    first axis of a layer's inputs. The loss is a mean over B rows, so that gradients are each row's own over B.

    Args:
        parameters: those of interest.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = {id(parameter): parameter for parameter in parameters}
        self.calls: dict[int, list[tuple[Call, Use]]] = {}
        #: The bias of a weight, where one layer holds both and both are of interest.
        self.biases: dict[int, Tensor] = {}
        self.rows = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """While open, forward and backward passes are watched."""
        handle = register_module_forward_hook(self._seen, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _seen(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        own = [id(p) for p in module._parameters.values() if p is not None]
        if not any(each in self.parameters for each in own) or not tappable(module) or is_opened(module):
            return
        inputs = args[0] if args else kwargs.get("input")
        found = specs(module)
        if isinstance(found, str) or not isinstance(inputs, Tensor) or not output.requires_grad:
            return
        (spec,) = found
        call = Call(inputs.detach(), Layout.ROWS)

        def caught(gradient: Tensor) -> None:
            call.gradient = gradient

        output.register_hook(caught)
        self.rows = len(inputs)
        for role in (spec.weight, spec.bias):
            if role is not None and id(role.tensor) in self.parameters:
                self.calls.setdefault(id(role.tensor), []).append((call, role.use))
        if spec.weight is not None and spec.bias is not None:
            self.biases[id(spec.weight.tensor)] = spec.bias.tensor

    def clear(self) -> None:
        """Forget what was seen."""
        self.calls.clear()

    @torch.no_grad()
    def squares(self, parameter: Tensor) -> Tensor | None:
        """Σ_i (g_i / B)^∘2 over the rows' gradients, in the parameter's shape; None where no layer tells them.

        Rows are taken a block at a time: never more than a layer's share of them is formed.
        """
        seen = self.calls.get(id(parameter))
        if not seen:
            return None
        tap, rows, like = _tap(seen), len(seen[0][0].inputs), seen[0][0].gradient
        assert like is not None
        if tap.product is not None:
            sums = ProductSums(tap, Wanted(diagonal=True), like)
        else:
            sums = DiagonalSums(tap, tuple(parameter.shape), like)
        sums.add(rows, 1.0, True, True)
        sums.flush()
        sums.finish()
        assert sums.diagonal is not None
        return sums.diagonal.reshape(parameter.shape)

    @torch.no_grad()
    def factors(self, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """Σ a aᵀ [G, n, n] with the bias column, and Σ 1/T Σ_t g gᵀ / B² [G, m, m]; None where not a product."""
        seen = self.calls.get(id(weight))
        if not seen or not isinstance(seen[0][1], Product):
            return None
        bias = self.biases.get(id(weight))
        biased = bias is not None and id(bias) in self.parameters
        tap, rows, like = _tap(seen, biased), len(seen[0][0].inputs), seen[0][0].gradient
        if tap.product is None or like is None:
            return None
        sums = ProductSums(tap, Wanted(factors=True), like)
        sums.add(rows, 1.0, True, True)
        sums.flush()
        sums.finish()
        assert sums.inputs is not None and sums.gradients is not None
        return sums.inputs, sums.gradients


def _tap(seen: list[tuple[Call, Use]], biased: bool = False) -> Tap:
    """One parameter's calls as a tap."""
    links = []
    for call, use in seen:
        port = Port("", "", Layout.ROWS)
        port.calls.append(call)
        links.append(Link(port, use, biased))
    return Tap("", "bias" if biased else None, tuple(links))
