"""Inputs and data of every accepted form, brought to one: rows of inputs with their targets.

Inputs are a tensor (`net(x)`), a tuple (`net(*inputs)`) or a dict (`net(**inputs)`), nested as deep as the
network likes; leaves that are neither tensors nor arrays are handed to the network unchanged. Data are a pair
of such inputs with targets, a triple with weights of rows too, a `Dataset`, or a `DataLoader`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .devices import moved, on_host
from .errors import DataError, NetworkError
from .hints import require_dense
from .precision import autocast, half_passes

#: What to do with inputs that have no axis of rows.
SHARED = (
    "what belongs to all rows, such as the edges of a graph, is kept in the network as a buffer, and rows are the "
    "numbers of nodes: see the page Graphs"
)

Inputs: TypeAlias = Any  # a tensor, or a tuple, list or dict of inputs


class Batch(NamedTuple):
    """Some rows: what the network reads and what it should answer.

    Attributes:
        inputs: what the network reads.
        targets: what it should answer.
        first: the number of the first row where these are part of a larger batch, whose noise they share.
        total: the number of rows of that batch; None where these are all.
        weights: how often each row counts, [B]; None for once. While a network is fitted their mean over all rows is 1.
    """

    inputs: Inputs
    targets: Tensor
    first: int = 0
    total: int | None = None
    weights: Tensor | None = None

    def rows(self, index: Any) -> "Batch":
        """Some of the rows."""
        weights = None if self.weights is None else self.weights[index]
        return Batch(take(self.inputs, index), self.targets[index], weights=weights)

    def weighted(self, values: Tensor) -> Tensor:
        """Values [B, ...] of the rows times their weights."""
        return weighted(values, self.weights)

    def total_weight(self) -> float:
        """How often the rows count together."""
        return len(self.targets) if self.weights is None else float(self.weights.sum())


class TensorOptions(NamedTuple):
    """Dtype and device of the tensors that meet a network: floats take its dtype, everything its device."""

    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, module: nn.Module) -> "TensorOptions":
        """Those of a module's first floating-point tensor."""
        tensors = (t for t in chain(module.parameters(), module.buffers()) if t.is_floating_point())
        first = next(tensors, None)
        if first is None:
            return cls(torch.get_default_dtype(), torch.device("cpu"))
        return cls(first.dtype, first.device)


def weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    """Values [B, ...] of rows times weights [B]; None weighs nothing."""
    if weights is None:
        return values
    return values * weights.to(values).reshape(-1, *[1] * (values.ndim - 1))


def call(net: Callable[..., Any], inputs: Inputs) -> Tensor:
    """The network's outputs: `net(x)`, `net(*inputs)` or `net(**inputs)`; an output's `.logits` is taken."""
    half = half_passes()
    if half is None:
        return _called(net, inputs)
    with autocast(half.precision, half.device):
        return _called(net, inputs).to(half.dtype)


def _called(net: Callable[..., Any], inputs: Inputs) -> Tensor:
    if isinstance(inputs, Mapping):
        outputs = net(**inputs)
    elif isinstance(inputs, tuple | list):
        outputs = net(*inputs)
    else:
        outputs = net(inputs)
    if not isinstance(outputs, Tensor):
        outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor):
        raise NetworkError(
            f"the network must return a tensor (or an object with .logits), got {type(outputs).__name__}; "
            "wrap it in a module whose forward returns the outputs to be judged"
        )
    return outputs


def map_tensors(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """The same tree with `function` applied to every tensor in it."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {key: map_tensors(function, value) for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(map_tensors(function, value) for value in inputs)
    return inputs


def named_tensors(inputs: Inputs, name: str = "inputs") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the tree with a name for messages, such as `inputs['mask']`."""
    if isinstance(inputs, Tensor):
        yield name, inputs
    elif isinstance(inputs, Mapping):
        for key, value in inputs.items():
            yield from named_tensors(value, f"{name}[{key!r}]")
    elif isinstance(inputs, tuple | list):
        for index, value in enumerate(inputs):
            yield from named_tensors(value, f"{name}[{index}]")


def take(inputs: Inputs, index: Any) -> Inputs:
    """The rows `index` of every tensor."""
    return map_tensors(lambda tensor: tensor[index], inputs)


def joined(trees: Sequence[Inputs]) -> Inputs:
    """The rows of several trees of one form, one tree after the other."""
    if isinstance(trees[0], Tensor):
        return torch.cat([tree for tree in trees if isinstance(tree, Tensor)])
    leaves = [iter([tensor for _, tensor in named_tensors(tree)]) for tree in trees]
    return map_tensors(lambda _: torch.cat([next(tensors) for tensors in leaves]), trees[0])


def to_tensors(inputs: Inputs, dtype: torch.dtype, name: str = "inputs") -> Inputs:
    """Arrays become tensors, floats take the dtype; everything stays where it lies."""
    if isinstance(inputs, np.ndarray):
        inputs = from_array(inputs)
    if isinstance(inputs, Tensor):
        require_dense(name, inputs)
        if inputs.dtype in (torch.uint16, torch.uint32, torch.uint64):
            inputs = inputs.long()  # PyTorch can hardly compute with those
        return inputs.to(dtype) if inputs.is_floating_point() else inputs
    if isinstance(inputs, Mapping):
        return {key: to_tensors(value, dtype, name) for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(to_tensors(value, dtype, name) for value in inputs)
    return inputs


def from_array(array: np.ndarray) -> Tensor:
    """The array as a tensor, sharing memory where it can be written to."""
    # Tensors have no reversed strides, no other byte order, and no memory that is read only.
    native = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
    try:
        return torch.from_numpy(native)
    except TypeError as error:
        raise DataError(
            f"arrays must hold numbers, got dtype {array.dtype}; encode text, dates and categories first"
        ) from error


def count_rows(inputs: Inputs) -> int:
    """The number of rows, after checking that all tensors agree on it and that there are some."""
    sizes = {}
    for name, tensor in named_tensors(inputs):
        if tensor.ndim == 0:
            raise DataError(f"{name} must have a leading axis of rows, got a scalar; add one with [None]")
        sizes[name] = len(tensor)
    if not sizes:
        raise DataError(f"inputs must hold at least one tensor or array, got {type(inputs).__name__}")
    if len(set(sizes.values())) > 1:
        raise DataError(f"inputs must have the same number of rows, got {sizes}; {SHARED}")
    rows = next(iter(sizes.values()))
    if rows == 0:
        raise DataError("inputs must hold at least one row, got none")
    return rows


def rows_of(inputs: Inputs) -> int:
    """The number of rows of inputs that were checked before."""
    return len(next(tensor for _, tensor in named_tensors(inputs)))


#: Where a batch's rows stand in the user's data, for messages: the first one's number, or each one's own.
RowNumbers: TypeAlias = int | Sequence[int]


def row_number(row: int, rows: RowNumbers) -> int:
    """The number in the user's data of a batch's row; a batch that `collate_fn` made longer counts its own."""
    if isinstance(rows, int):
        return rows + row
    return rows[row] if row < len(rows) else row


#: From inputs, targets, and where they stand in the user's data, to targets in the likelihood's form.
TargetCheck: TypeAlias = Callable[[Inputs, Tensor, RowNumbers], Tensor]


def check_finite(inputs: Inputs, name: str = "inputs", rows: RowNumbers = 0, *, anywhere: bool = False) -> None:
    """Refuse NaN and infinity, saying where the first one stands.

    Args:
        inputs: what is looked at.
        name: of the inputs, for messages.
        rows: where the rows stand in the user's data.
        anywhere: look at tensors of a device too, which takes long; else at those of the host alone.
    """
    for where, tensor in named_tensors(inputs, name):
        if not (anywhere or on_host(tensor)):
            continue
        if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
            continue
        if tensor.is_floating_point() and math.isfinite(tensor.detach().sum()):
            continue  # one pass without a mask; whatever is not finite shows in the sum
        for start in range(0, len(tensor), 65_536):  # in blocks, so that the mask stays small
            finite = torch.isfinite(tensor[start : start + 65_536])
            if not finite.all():
                row, *rest = (~finite).nonzero()[0].tolist()
                value = tensor[(start + row, *rest)].item()
                column = f", position {tuple(rest)}" if rest else ""
                raise DataError(
                    f"{where} must be finite, got {value} at row {row_number(start + row, rows)}{column}; "
                    "remove or impute such values first"
                )


def finite(tensor: Tensor) -> Tensor:
    """The tensor, where it lies on a device with rows of NaN in place of those that are not finite.

    A device is not asked whether there are such rows: what comes of them is NaN as well.
    """
    if on_host(tensor) or not tensor.is_floating_point():
        return tensor
    rows = tensor.detach().reshape(len(tensor), -1).isfinite().all(1)
    return tensor.where(rows.reshape(-1, *[1] * (tensor.ndim - 1)), math.nan)


def checked_inputs(inputs: Inputs, like: TensorOptions) -> Inputs:
    """Inputs ready for the network: tensors of dtype and device as in `like`, with rows, finite.

    They are looked at on the host, before they are copied; rows that lie on a device and are not finite become NaN.
    """
    inputs = to_tensors(inputs, like.dtype)
    count_rows(inputs)
    check_finite(inputs)
    return map_tensors(lambda tensor: moved(finite(tensor), like.device), inputs)


def checked_batch(
    batch: Any, like: TensorOptions, rows: RowNumbers = 0, *, check: TargetCheck | None = None, anywhere: bool = False
) -> Batch:
    """A pair (inputs, targets), or a triple with weights, as tensors of one length, finite, on device as in `like`.

    Args:
        batch: what a user gave.
        like: dtype and device that the tensors should have.
        rows: where the rows stand in the user's data.
        check: brings targets into the likelihood's form or refuses them, before they are copied.
        anywhere: look at numbers of a device too, as in `check_finite`.
    """
    if not (isinstance(batch, tuple | list) and len(batch) in (2, 3)):
        raise DataError(
            f"a batch must be a pair (inputs, targets), got {type(batch).__name__}"
            + (f" of length {len(batch)}" if isinstance(batch, tuple | list | dict) else "")
            + "; wrap several inputs in a tuple or dict: ((a, b), targets); weights of rows come third"
        )
    inputs, targets = to_tensors(batch[0], like.dtype), to_tensors(batch[1], like.dtype, "targets")
    if not isinstance(targets, Tensor):
        try:
            targets = to_tensors(np.asarray(targets), like.dtype, "targets")
        except ValueError as error:
            raise DataError(f"targets must be a tensor, an array or a list of numbers: {error}") from error
    count = count_rows(inputs)
    if targets.ndim == 0 or len(targets) != count:
        got = "a scalar" if targets.ndim == 0 else len(targets)
        raise DataError(f"inputs and targets must have the same length, got {count} and {got}")
    check_finite(inputs, rows=rows, anywhere=anywhere)
    check_finite(targets, "targets", rows, anywhere=anywhere)
    weights = checked_weights(batch[2], count, like, rows, anywhere) if len(batch) == 3 else None
    inputs = map_tensors(lambda tensor: moved(finite(tensor), like.device), inputs)
    targets = finite(targets) if check is None else check(inputs, finite(targets), rows)
    return Batch(inputs, moved(targets, like.device), weights=weights)


def checked_weights(
    weights: Any, count: int, like: TensorOptions, rows: RowNumbers = 0, anywhere: bool = False
) -> Tensor:
    """Weights of `count` rows, [B]; numbers below 0, NaN and infinity are refused.

    Args:
        weights: what a user gave.
        count: of the rows.
        like: dtype and device that the tensor should have.
        rows: where the rows stand in the user's data.
        anywhere: look at numbers of a device too, as in `check_finite`.
    """
    try:
        values = weights if isinstance(weights, Tensor) else from_array(np.asarray(weights))
    except ValueError as error:
        raise DataError(f"weights must be a tensor, an array or a list of numbers: {error}") from error
    require_dense("weights", values)
    if values.shape != (count,) or values.is_complex():
        raise DataError(
            f"weights must be one real number per row, [{count}], got {values.dtype} {tuple(values.shape)}; several "
            "inputs go into one tuple or dict: ((a, b), targets)"
        )
    values = values.to(like.dtype)
    wrong = ~(values.isfinite() & (values >= 0))
    if (anywhere or on_host(values)) and wrong.any():
        row = int(wrong.nonzero()[0])
        raise DataError(
            f"weights must be finite and at least 0, got {values[row].item()} at row {row_number(row, rows)}"
        )
    return moved(values, like.device)


def plain(raw: Any) -> Any:
    """A mapping of another library, such as Transformers' `BatchEncoding`, as a dict; all else as it is."""
    return {**raw} if isinstance(raw, Mapping) else raw


def cut(inputs: Inputs, max_rows: int) -> Iterator[Inputs]:
    """Inputs as a user gave them, in pieces of at most `max_rows` rows."""
    inputs = plain(inputs)
    leaves, tree = tree_flatten(inputs)
    arrays = [leaf for leaf in leaves if isinstance(leaf, Tensor | np.ndarray)]
    for array in arrays:
        if isinstance(array, Tensor):
            require_dense("inputs", array)
    sizes = {len(array) if array.ndim else 0 for array in arrays}
    if len(sizes) != 1 or max(sizes) <= max_rows:
        yield inputs  # `checked_inputs` says what is wrong
        return
    for start in range(0, sizes.pop(), max_rows):
        rows = slice(start, start + max_rows)
        pieces = [leaf[rows] if isinstance(leaf, Tensor | np.ndarray) else leaf for leaf in leaves]
        yield tree_unflatten(pieces, tree)


def chunks(inputs: Inputs, max_rows: int) -> Iterable[Inputs]:
    """The inputs in pieces of at most `max_rows` rows."""
    rows = count_rows(inputs)
    if rows <= max_rows:
        return [inputs]
    return (take(inputs, slice(start, start + max_rows)) for start in range(0, rows, max_rows))
