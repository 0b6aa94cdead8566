"""Where training and evaluation rows come from: one interface over tensors, datasets and loaders."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from . import seeds, storage
from .errors import DataError
from .inputs import (
    Batch,
    Inputs,
    RowNumbers,
    TargetCheck,
    TensorOptions,
    checked_batch,
    map_tensors,
    named_tensors,
    take,
)


class Source(ABC):
    """Rows of data, in batches of checked tensors of one dtype and device.

    Attributes:
        num_data: the number of rows, or None where only reading tells.
        batch_size: the user's own batch size, or None where there is none.
        drop_last: whether the user's loader leaves out a short last batch.
    """

    num_data: int | None
    batch_size: int | None = None
    drop_last: bool = False
    #: Whether batches are pairs with targets; if not, targets that come along are not looked at.
    labelled: bool = True
    #: Brings targets into the likelihood's form or refuses them; set by `check_targets`.
    _check: TargetCheck | None = None

    @abstractmethod
    def batches(self, batch_size: int) -> Iterator[Batch]:
        """All rows once, in the source's own order."""

    @abstractmethod
    def digest(self) -> str:
        """A fingerprint of the rows, as far as it can be had without reading all of them from disk."""

    def check_targets(self, check: TargetCheck) -> None:
        """Pass all targets through `check`: at once where they are in memory, else batch by batch."""
        self._check = check

    def _checked(self, raw: Any, like: TensorOptions, rows: RowNumbers) -> Batch:
        raw = raw if self.labelled else unlabelled(raw)
        return without_graph(checked_batch(raw, like, rows, check=self._check))

    def example(self, rows: int = 8) -> Batch:
        """The first rows, to learn shapes from."""
        batch = next(self.batches(rows), None)
        if batch is None:
            raise DataError("data must hold at least one row, got none")
        return Batch(take(batch.inputs, slice(rows)), batch.targets[:rows])


class OrderedSource(Source):
    """A source whose rows can be read by number, in any order."""

    num_data: int  # pyright: ignore[reportIncompatibleVariableOverride]

    @abstractmethod
    def read(self, groups: Sequence[Tensor]) -> Iterator[Batch | None]:
        """One batch for each group of row numbers; None for an empty group."""


class TensorSource(OrderedSource):
    """Rows held whole as tensors; checked once, up front."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.num_data = len(batch.targets)

    def check_targets(self, check: TargetCheck) -> None:
        inputs, targets = self.batch.inputs, self.batch.targets
        self.batch = Batch(inputs, check(inputs, targets.cpu(), 0).to(targets.device))

    def batches(self, batch_size: int) -> Iterator[Batch]:
        for rows in split(self.num_data, batch_size):
            yield Batch(take(self.batch.inputs, rows), self.batch.targets[rows])

    def read(self, groups: Sequence[Tensor]) -> Iterator[Batch | None]:
        inputs, targets = self.batch.inputs, self.batch.targets
        sizes = [len(group) for group in groups]
        if not sizes:
            return
        # All row numbers move to the data's device at once, not batch by batch.
        for size, index in zip(sizes, torch.cat([*groups]).to(targets.device).split(sizes), strict=True):
            rows = map_tensors(lambda tensor, index=index: tensor.index_select(0, index), inputs)
            yield Batch(rows, targets.index_select(0, index)) if size else None

    def digest(self) -> str:
        return storage.checksum(dict(named_tensors((self.batch.inputs, self.batch.targets), "data")))


class DatasetSource(OrderedSource):
    """A map-style dataset, read by our order through a loader; checked batch by batch."""

    def __init__(self, dataset: Dataset, like: TensorOptions, loader: DataLoader | None = None) -> None:
        self.dataset, self.like = dataset, like
        self.num_data = len(dataset)  # pyright: ignore[reportArgumentType]
        self.options: dict[str, Any] = {}
        if loader:
            assert isinstance(loader.batch_sampler, BatchSampler)  # see `reads_all_rows`
            self.batch_size, self.drop_last = loader.batch_sampler.batch_size, loader.batch_sampler.drop_last
            names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn")
            self.options = {name: getattr(loader, name) for name in names}
            self.options["multiprocessing_context"] = loader.multiprocessing_context
        if self.num_data == 0:
            raise DataError("data must hold at least one row, got an empty dataset")

    def batches(self, batch_size: int) -> Iterator[Batch]:
        numbers = torch.arange(self.num_data)
        for batch in self.read([numbers[rows] for rows in split(self.num_data, batch_size)]):
            assert batch is not None
            yield batch

    def example(self, rows: int = 8) -> Batch:
        (batch,) = self.read(
            [torch.arange(min(rows, self.num_data))]
        )  # the loader prepares no more than these
        assert batch is not None
        return batch

    def read(self, groups: Sequence[Tensor]) -> Iterator[Batch | None]:
        numbers = [group.tolist() for group in groups]
        filled = [group for group in numbers if group]
        # The loader's own generator only seeds its workers; without one it would draw from the global state.
        generator = seeds.generator(filled[0][0] if filled else 0, "workers", self.num_data)
        loader = iter(DataLoader(self.dataset, batch_sampler=filled, generator=generator, **self.options))
        for group in numbers:
            yield self._checked(next(loader), self.like, group) if group else None

    def digest(self) -> str:
        once, again = (dict(named_tensors(self.example()[:2], "data")) for _ in range(2))
        first = storage.checksum(once)
        if first != storage.checksum(
            again
        ):  # drawn anew at each reading (augmentation): only the shapes stay
            first = str({name: list(tensor.shape[1:]) for name, tensor in once.items()})
        return f"{self.num_data} rows, first {first}"


class RowsSource(OrderedSource):
    """Some rows of a source, by their numbers."""

    def __init__(self, source: OrderedSource, rows: Tensor) -> None:
        self.source, self.rows, self.num_data = source, rows, len(rows)
        self.batch_size, self.drop_last = source.batch_size, source.drop_last

    def batches(self, batch_size: int) -> Iterator[Batch]:
        for batch in self.source.read([self.rows[part] for part in split(self.num_data, batch_size)]):
            assert batch is not None
            yield batch

    def read(self, groups: Sequence[Tensor]) -> Iterator[Batch | None]:
        return self.source.read([self.rows[group] for group in groups])

    def digest(self) -> str:
        return f"{storage.checksum({'rows': self.rows})} of {self.source.digest()}"


class LoaderSource(Source):
    """A loader whose order is its own (a sampler of the user's, an iterable dataset), read as it is."""

    def __init__(self, loader: DataLoader, like: TensorOptions) -> None:
        self.loader, self.like = loader, like
        self.batch_size = loader.batch_size
        self.num_data = None
        if loader.batch_size is not None and hasattr(loader.sampler, "__len__"):
            self.num_data = len(loader.sampler)  # pyright: ignore[reportArgumentType]

    def batches(self, batch_size: int) -> Iterator[Batch]:
        first_row = 0
        for raw in self.loader:
            batch = self._checked(raw, self.like, first_row)
            first_row += len(batch.targets)
            yield batch
        if first_row == 0:
            raise DataError("data must hold at least one row, got a loader without batches")

    def digest(self) -> str:
        return f"{self.num_data} rows in an order of their own"


def unlabelled(raw: Any) -> tuple[Inputs, Tensor]:
    """A batch of inputs, with or without targets, as a pair whose targets say nothing."""
    if isinstance(raw, tuple | list):
        if len(raw) not in (1, 2):
            raise DataError(
                f"a batch must be inputs or a pair (inputs, targets), got {len(raw)} values; "
                "several inputs go into one tuple or dict: ((a, b), targets)"
            )
        raw = raw[0]
    leaves = (leaf for leaf in tree_leaves(raw) if isinstance(leaf, Tensor | np.ndarray))
    first = next(leaves, None)
    return raw, torch.zeros(len(first) if first is not None and first.ndim else 0)


def holds_rows(data: Any) -> bool:
    """Whether rows are to be read from these data, one after the other, so that they are no inputs themselves."""
    if isinstance(data, DataLoader | Dataset):
        return True
    numbered = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return numbered and not (
        hasattr(data, "__array__") or isinstance(data, Mapping | tuple | list | str | bytes)
    )


def reading(
    source: Source, seed: int, *path: int | str, device: torch.device | str = "cpu"
) -> AbstractContextManager[None]:
    """Around reading: datasets and loaders, which may draw from the global state, find it under a derived seed."""
    if isinstance(source, TensorSource):
        return nullcontext()
    return seeds.forked(seed, *path, device=device)


def without_graph(batch: Batch) -> Batch:
    """The rows apart from any graph they come from, so that training leaves no gradients on a user's tensors."""
    return Batch(map_tensors(lambda tensor: tensor.detach(), batch.inputs), batch.targets.detach())


def split(rows: int, batch_size: int) -> Sequence[slice]:
    """Slices of `batch_size` rows; a single row left over joins the batch before it.

    Batch norm cannot train on one row, and a lone last row would end a long run for nothing.
    """
    starts = list(range(0, rows, batch_size))
    if len(starts) > 1 and rows - starts[-1] == 1 and batch_size > 1:
        starts.pop()
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], rows], strict=True)]


def reads_all_rows(loader: DataLoader) -> bool:
    """Whether the loader reads each row of its dataset once, so that its order may be ours."""
    if isinstance(loader.dataset, IterableDataset) or type(loader.batch_sampler) is not BatchSampler:
        return False
    sampler = loader.batch_sampler.sampler  # not `loader.sampler`, which a given batch sampler leaves unused
    if type(sampler) is RandomSampler:
        return not sampler.replacement and len(sampler) == len(loader.dataset)  # pyright: ignore
    return type(sampler) is SequentialSampler and len(sampler) == len(loader.dataset)  # pyright: ignore


def as_inputs_source(data: Any, like: TensorOptions) -> Source:
    """The source for a `Dataset` or a `DataLoader` whose targets, where there are any, are not looked at."""
    if type(data) is TensorDataset and len(data.tensors) in (1, 2):
        data = unlabelled(list(data.tensors))
    source = as_source(data, like)
    source.labelled = False
    return source


def as_source(data: Any, like: TensorOptions, name: str = "data") -> Source:
    """The source for a pair (inputs, targets), a `Dataset` or a `DataLoader`; a source is one already."""
    if isinstance(data, Source):
        return data
    if isinstance(data, DataLoader):
        return DatasetSource(data.dataset, like, data) if reads_all_rows(data) else LoaderSource(data, like)
    if type(data) is TensorDataset and len(data.tensors) == 2:  # a subclass may change what an item is
        data = tuple(data.tensors)
    if isinstance(data, tuple | list):
        if len(data) != 2:
            raise DataError(
                f"{name} must be a pair (inputs, targets), got {len(data)} values; "
                "several inputs go into one tuple or dict: ((a, b), targets)"
            )
        return TensorSource(without_graph(checked_batch(data, like, anywhere=True)))
    if isinstance(data, IterableDataset):
        return LoaderSource(DataLoader(data, batch_size=128), like)
    known = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if known and not isinstance(data, Mapping | Tensor | np.ndarray | str | bytes):
        return DatasetSource(data, like)
    raise DataError(
        f"{name} must be a pair (inputs, targets), a Dataset or a DataLoader, got {type(data).__name__}"
    )
