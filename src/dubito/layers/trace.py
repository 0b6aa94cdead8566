"""A dry run that tells, for every layer, in which order it is called and which axis holds the rows."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from ..inputs import Inputs, call, count_rows, map_tensors, named_tensors, take
from .shell import leased, seeded


class Layout(Enum):
    """How a layer's input holds the rows of the batch."""

    ROWS = "rows first"  # [B, ...]
    SECOND = "rows second"  # [T, B, ...], time-major sequences
    FLAT = "positions of a row together"  # [B·T, ...], row by row
    FLAT_SECOND = "rows of a position together"  # [T·B, ...], position by position
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Visit:
    """What the dry run saw of one module.

    Attributes:
        layout: where its inputs hold the rows.
        reads_input: whether it reads the network's own inputs, untouched but for views, or what the first
            named module reads (inputs that the network only prepared).
        calls: how often one forward pass calls it.
        size: numbers in its inputs per row, of all calls.
    """

    layout: Layout
    reads_input: bool
    calls: int
    size: float = 0.0


def trace(network: nn.Module, inputs: Inputs, names: Iterable[str]) -> dict[str, Visit]:
    """Visits of the named modules in the order of their first call; modules never called are left out.

    The network runs in evaluation mode on up to three rows and on the first of them alone: in evaluation
    mode rows do not touch each other, so what the single row shows must stand somewhere in the larger run.
    """
    rows = min(3, count_rows(inputs))
    few = take(inputs, slice(rows)) if rows > 1 else map_tensors(lambda t: torch.cat([t, t]), inputs)
    names = list(names)
    many, order, reading = _record(network, few, names)
    one, _, _ = _record(network, take(inputs, slice(1)), names)
    visits = {}
    for name in order:
        pairs = list(zip(many[name], one.get(name, []), strict=False))
        layouts = {_layout(a, b, max(rows, 2)) for a, b in pairs}
        agreed = layouts.pop() if len(layouts) == 1 and len(many[name]) == len(one.get(name, [])) else None
        size = sum(tensor.numel() for tensor in many[name]) / max(rows, 2)
        visits[name] = Visit(agreed or Layout.UNKNOWN, name in reading, len(many[name]), size)
    return visits


@contextmanager
def unnested(network: nn.Module) -> Iterator[None]:
    """While open, encoders keep padded batches as they are.

    In evaluation mode they would turn them into nested tensors, which layers with hooks cannot read.
    """
    encoders = [module for module in network.modules() if isinstance(module, nn.TransformerEncoder)]
    nested = [encoder.use_nested_tensor for encoder in encoders]
    try:
        for encoder in encoders:
            encoder.use_nested_tensor = False
        yield
    finally:
        for encoder, before in zip(encoders, nested, strict=True):
            encoder.use_nested_tensor = before


def _record(
    network: nn.Module, inputs: Inputs, names: list[str]
) -> tuple[dict[str, list[Tensor]], list[str], set[str]]:
    """First tensor argument of every call, the order of first calls, and which modules read the inputs."""
    seen: dict[str, list[Tensor]] = {}
    reading: set[str] = set()
    storages = {tensor.untyped_storage().data_ptr() for _, tensor in named_tensors(inputs)}

    def hook(name: str):
        def record(_: nn.Module, args: tuple, kwargs: dict) -> None:
            tensors = [t for _, t in named_tensors((args, kwargs))]
            if tensors:
                storage = tensors[0].untyped_storage().data_ptr()
                if not seen:  # kept alive in `seen`, so that its storage is not given to a later tensor
                    storages.add(storage)
                seen.setdefault(name, []).append(tensors[0].detach())
                if storage in storages:
                    reading.add(name)

        return record

    with leased(network) as shell, ExitStack() as hooks:
        modules = dict(shell.named_modules(remove_duplicate=False))
        for name in names:
            hooks.enter_context(modules[name].register_forward_pre_hook(hook(name), with_kwargs=True))
        with torch.no_grad(), unnested(shell), seeded(network, 0, "trace"):
            call(shell, inputs)
    return seen, list(seen), reading


def _layout(many: Tensor, one: Tensor, rows: int) -> Layout:
    """Where `one`, the run of the first row, stands in `many`, the run of `rows` rows."""

    def same(part: Tensor) -> bool:
        if part.shape != one.shape or not one.is_floating_point():
            return torch.equal(part, one)
        # Rounding differs a little between batch sizes; other rows differ a lot.
        rtol = max(1e-3, 8 * torch.finfo(one.dtype).eps)
        atol = 0.1 * rtol * float(one.abs().max()) if one.numel() else 0.0
        return torch.allclose(part.float(), one.float(), rtol=rtol, atol=atol)

    if one.ndim and many.ndim == one.ndim:
        if one.shape[0] == 1 and many.shape[0] == rows and same(many[:1]):
            return Layout.ROWS
        if one.ndim > 1 and one.shape[1] == 1 and many.shape[1] == rows and same(many[:, :1]):
            return Layout.SECOND
        if many.shape[0] == rows * one.shape[0]:
            together, apart = same(many[: len(one)]), same(many[::rows])
            if together != apart:  # both hold where all positions are alike: then nothing can be told
                return Layout.FLAT if together else Layout.FLAT_SECOND
    return Layout.UNKNOWN
