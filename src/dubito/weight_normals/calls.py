"""Which use of a parameter a call is, where its rows lie, and which call of a pass runs again."""

from math import inf

import torch
from torch import Tensor

from ..errors import NetworkError
from ..layers.context import Context
from ..layers.form import Form
from ..layers.kinds import NoRule, Standin
from ..layers.layout import Layout
from ..layers.uses import Use
from .placement import Key, Placement
from .streams import RowStreams

#: Numbers of an input that tell its call again in a recomputation.
SAMPLE = 64


class OutputNoise(Context):
    """Finds, for every use of a parameter, where its rows lie and which of its calls this is.

    Parts of a network that are checkpointed run again in the backward pass: such a call is the same call as before,
    and sees the same noise.

    Args:
        placement: the uses whose outputs carry noise.
        streams: of the noise.
    """

    def __init__(self, placement: Placement, streams: RowStreams) -> None:
        self.placement, self.streams = placement, streams
        self._task = torch._C._current_graph_task_id()  # of the backward pass that runs now; -1 for none
        self._counts: dict[str, int] = {}
        self._calls: dict[Key, list[tuple[int, Tensor | None]]] = {}

    def find(self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Use, str, int] | None:
        """The use, the name of its stream of noise, and the number of the call there; None without noise."""
        name, part = (weight.parameter, weight.part) if isinstance(weight, Standin) else (None, 0)
        bias_name, bias_part = (bias.parameter, bias.part) if isinstance(bias, Standin) else (None, 0)
        if name is None and bias_name is None:
            return None
        if isinstance(x, Standin):
            raise NoRule("another parameter is its input")
        key = (name, bias_name, part, bias_part)
        calls = self.placement.by_key.get(key)
        if calls is None:
            raise _changed(key, form)
        before = self._calls.get(key)
        if before is None:
            before = self._calls[key] = []
        if before and torch._C._current_graph_task_id() != self._task:
            index = _same_call(before, x, calls.stream)
        else:
            index, number = len(before), self._counts.get(calls.stream, 0)
            self._counts[calls.stream] = number + 1
            before.append((number, _sample(x) if calls.several else None))
        use = calls.uses[0] if len(calls.uses) == 1 else calls.uses[index] if index < len(calls.uses) else None
        if use is None or (use.form != form and use.form.signature != form.signature):
            raise _changed(key, form)
        return use, calls.stream, before[index][0]


def _sample(x: Tensor) -> Tensor:
    """A few of an input's numbers."""
    flat = x.detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLE)].clone()


def _same_call(calls: list[tuple[int, Tensor | None]], x: Tensor, stream: str) -> int:
    """Which of the calls of a pass runs again: that whose input is nearest."""
    if len(calls) == 1:
        return 0
    sample, nearest = _sample(x), []
    for _, before in calls:
        same = before is not None and before.shape == sample.shape
        nearest.append(float((before - sample).abs().sum()) if same else inf)  # pyright: ignore
    least = min(nearest)
    if nearest.count(least) > 1:
        raise NetworkError(
            f"which of several calls of {stream!r} a checkpointed part runs again cannot be told from its inputs; use "
            "Reparameterised(), or leave the layer out of `layers`"
        )
    return nearest.index(least)


def _changed(key: Key, form: Form) -> NetworkError:
    return NetworkError(
        f"the network must use {key[0] or key[1]!r} as it did on the rows it was surveyed with, but "
        f"{type(form).__name__} now uses it in another way; use Reparameterised()"
    )


def check_rows(use: Use, stream: str, shape: torch.Size, rows: int) -> None:
    """Refuse values that do not hold the rows where the survey saw them."""
    fits = {Layout.ROWS: shape[0] == rows, Layout.SECOND: shape[1:2] == (rows,)}
    if not fits.get(use.layout, shape[0] % rows == 0):
        raise NetworkError(
            f"layer {stream!r} sees {tuple(shape)} for {rows} rows, not {use.layout.value} as in the first rows; use "
            "Reparameterised() for networks that arrange rows differently from batch to batch"
        )
