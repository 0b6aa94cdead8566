"""Where training and evaluation rows come from: one interface over tensors, datasets and loaders."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from . import seeds
from .errors import DataError
from .inputs import Batch, Place, checked_batch, take


class Source(ABC):
    """Rows of data, in batches of checked tensors at one place.

    Attributes:
        num_data: the number of rows, or None where only reading tells.
        batch_size: the user's own batch size, or None where there is none.
    """

    num_data: int | None
    batch_size: int | None = None
    #: Whether `batches` follows a given order; a loader with a sampler of its own keeps its own.
    ordered: bool = True
    #: Brings targets into the likelihood's form or refuses them; set by `check_targets`.
    _check: Callable[[Tensor], Tensor] | None = None

    @abstractmethod
    def batches(self, batch_size: int, order: Tensor | None = None) -> Iterator[Batch]:
        """All rows once, `batch_size` at a time, in the given order of row numbers."""

    def check_targets(self, check: Callable[[Tensor], Tensor]) -> None:
        """Pass all targets through `check`: at once where they are in memory, else batch by batch."""
        self._check = check

    def _checked(self, raw: Any, place: Place, first_row: int) -> Batch:
        batch = checked_batch(raw, place, first_row)
        return Batch(batch.inputs, self._check(batch.targets)) if self._check else batch

    def example(self, rows: int = 8) -> Batch:
        """The first rows, to learn shapes from."""
        batch = next(self.batches(rows), None)
        if batch is None:
            raise DataError("data must hold at least one row, got none")
        return Batch(take(batch.inputs, slice(rows)), batch.targets[:rows])


class TensorSource(Source):
    """Rows held whole as tensors; checked once, up front."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.num_data = len(batch.targets)

    def check_targets(self, check: Callable[[Tensor], Tensor]) -> None:
        self.batch = Batch(self.batch.inputs, check(self.batch.targets))

    def batches(self, batch_size: int, order: Tensor | None = None) -> Iterator[Batch]:
        inputs, targets = self.batch
        if order is not None:
            order = order.to(targets.device)
        for rows in split(len(targets) if order is None else len(order), batch_size):
            index = rows if order is None else order[rows]
            yield Batch(take(inputs, index), targets[index])


class DatasetSource(Source):
    """A map-style dataset, read by our order through a loader; checked batch by batch."""

    def __init__(self, dataset: Dataset, place: Place, loader: DataLoader | None = None) -> None:
        self.dataset, self.place = dataset, place
        self.num_data = len(dataset)  # pyright: ignore[reportArgumentType]
        self.batch_size = loader.batch_size if loader else None
        self.drop_last = loader.drop_last if loader else False
        self.options: dict[str, Any] = {}
        if loader:
            names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn")
            self.options = {name: getattr(loader, name) for name in names}
            self.options["multiprocessing_context"] = loader.multiprocessing_context
        if self.num_data == 0:
            raise DataError("data must hold at least one row, got an empty dataset")

    def batches(self, batch_size: int, order: Tensor | None = None) -> Iterator[Batch]:
        rows = len(self.dataset)  # pyright: ignore[reportArgumentType]
        numbers = torch.arange(rows) if order is None else order
        groups = [numbers[rows].tolist() for rows in split(len(numbers), batch_size)]
        if order is not None and self.drop_last and len(groups) > 1 and len(groups[-1]) < batch_size:
            groups.pop()
        # The loader's own generator only seeds its workers; without one it would draw from the global state.
        generator = seeds.generator(int(numbers[0]), "workers", rows)
        loader = DataLoader(self.dataset, batch_sampler=groups, generator=generator, **self.options)
        first_row = 0
        for raw in loader:
            batch = self._checked(raw, self.place, first_row)
            first_row += len(batch.targets)
            yield batch


class LoaderSource(Source):
    """A loader whose order is its own (a sampler of the user's, an iterable dataset), read as it is."""

    ordered = False

    def __init__(self, loader: DataLoader, place: Place) -> None:
        self.loader, self.place = loader, place
        self.batch_size = loader.batch_size
        self.num_data = None
        if not isinstance(loader.dataset, IterableDataset):
            sampler = loader.batch_sampler if loader.batch_size is None else loader.sampler
            self.num_data = len(sampler) if loader.batch_size is not None else None  # pyright: ignore

    def batches(self, batch_size: int, order: Tensor | None = None) -> Iterator[Batch]:
        first_row = 0
        for raw in self.loader:
            batch = self._checked(raw, self.place, first_row)
            first_row += len(batch.targets)
            yield batch
        if first_row == 0:
            raise DataError("data must hold at least one row, got a loader without batches")


def split(rows: int, batch_size: int) -> Sequence[slice]:
    """Slices of `batch_size` rows; a single row left over joins the batch before it.

    Batch norm cannot train on one row, and a lone last row would end a long run for nothing.
    """
    starts = list(range(0, rows, batch_size))
    if len(starts) > 1 and rows - starts[-1] == 1 and batch_size > 1:
        starts.pop()
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], rows], strict=True)]


def as_source(data: Any, place: Place, name: str = "data") -> Source:
    """The source for a pair (inputs, targets), a `Dataset` or a `DataLoader`."""
    if isinstance(data, DataLoader):
        plain = isinstance(data.sampler, RandomSampler | SequentialSampler)
        plain = plain and type(data.batch_sampler) is BatchSampler
        replacing = isinstance(data.sampler, RandomSampler) and data.sampler.replacement
        if plain and not replacing and not isinstance(data.dataset, IterableDataset):
            return DatasetSource(data.dataset, place, data)
        return LoaderSource(data, place)
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = tuple(data.tensors)
    if isinstance(data, tuple | list):
        if len(data) != 2:
            raise DataError(
                f"{name} must be a pair (inputs, targets), got {len(data)} values; "
                "several inputs go into one tuple or dict: ((a, b), targets)"
            )
        return TensorSource(checked_batch(data, place))
    if isinstance(data, IterableDataset):
        return LoaderSource(DataLoader(data, batch_size=128), place)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, dict | Tensor):
        return DatasetSource(data, place)
    raise DataError(
        f"{name} must be a pair (inputs, targets), a Dataset or a DataLoader, got {type(data).__name__}"
    )
