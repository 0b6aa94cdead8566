"""Half precision: autocast around passes through a network, and full precision within."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

Precision = Literal["full", "bf16", "fp16"]

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class HalfPasses(NamedTuple):
    """Passes through a network in less than full precision.

    Attributes:
        precision: of the passes.
        dtype: of the network, in which its outputs come back.
        device: of the network.
    """

    precision: Precision
    dtype: torch.dtype
    device: torch.device


#: Of this thread alone, and while `passes_in` is open.
_passes: ContextVar[HalfPasses | None] = ContextVar("passes", default=None)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """While open, products run in this precision."""
    if precision == "full":
        return nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST[precision])


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """While open, autocast is off: standard deviations, their squares and logarithms need all their digits."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


@contextmanager
def passes_in(precision: Precision, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """While open, networks that are called by `inputs.call` run in this precision, and nothing else does."""
    token = _passes.set(None if precision == "full" else HalfPasses(precision, dtype, device))
    try:
        yield
    finally:
        _passes.reset(token)


def half_passes() -> HalfPasses | None:
    """What `passes_in` was told; None for full precision."""
    return None if is_dynamo_compiling() else _passes.get()
