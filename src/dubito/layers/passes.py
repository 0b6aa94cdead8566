"""Passes with a context: a private shell in which some parameters ask what to do."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from .context import Context
from .kinds import Standin
from .shell import Lease, take


def asked(
    network: nn.Module,
    context: Context,
    names: Iterable[str],
    tensors: Mapping[str, Tensor] | None = None,
    *,
    detached: bool = False,
    training: Mapping[str, bool] | None = None,
) -> Lease:
    """A lease on a shell whose named parameters ask the context; a training pass keeps it until after backward.

    Args:
        network: whose shell; nothing of it is changed.
        context: what the pass does wherever one of these parameters is used.
        names: of the parameters that ask. The network's forward pass must use them by rules alone, as a survey tells:
            code that is not made of torch functions would read the numbers that the network had.
        tensors: in place of the network's parameters and buffers, by name, those that ask included.
        detached: whether no gradient is to be computed for parameters.
        training: as in `take`.
    """
    lease = take(network, tensors, detached=detached, training=training)
    lease.replace(names, lambda name, value: Standin.of(value.detach() if detached else value, name, context))
    vars(lease.module)["_compiled_call_impl"] = None  # compiled code would not ask
    if training is None:
        lease.enter(unnested(lease.module))
    return lease


@contextmanager
def asking(
    network: nn.Module,
    context: Context,
    names: Iterable[str],
    tensors: Mapping[str, Tensor] | None = None,
    *,
    detached: bool = False,
    training: Mapping[str, bool] | None = None,
) -> Iterator[nn.Module]:
    """The shell of such a lease, while open; the arguments are those of `asked`."""
    lease = asked(network, context, names, tensors, detached=detached, training=training)
    try:
        yield lease.module
        lease.write_back()
    finally:
        lease.release()


def unnest(shell: nn.Module) -> None:
    """As `unnested`, for good."""
    for module in shell.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


@contextmanager
def unnested(shell: nn.Module) -> Iterator[None]:
    """Encoders in evaluation mode would nest padded batches, which rules cannot read; while open, they do not."""
    encoders = [module for module in shell.modules() if isinstance(module, nn.TransformerEncoder)]
    nesting = [encoder.use_nested_tensor for encoder in encoders]
    for encoder in encoders:
        encoder.use_nested_tensor = False
    try:
        yield
    finally:
        for encoder, nested in zip(encoders, nesting, strict=True):
            encoder.use_nested_tensor = nested
