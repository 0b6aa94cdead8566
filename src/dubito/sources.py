"""Where training and evaluation rows come from: one interface over tensors, datasets and loaders."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

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
    default_collate,
)

from . import seeds, storage
from .devices import moved
from .errors import DataError
from .fingerprints import UNKNOWN, described
from .hints import Checked
from .inputs import Batch, Inputs, RowNumbers, TargetCheck, TensorOptions, checked_batch, map_tensors, named_tensors

#: Rows that are read at once for a digest, and rows that are read twice to see which tensors are drawn anew.
DIGEST_ROWS, TWICE = 128, 64
#: Names of the targets in batches that are mappings, where no other is given: those of Transformers and its data.
TARGETS = "labels", "label"
#: From targets to where they say something; None where all of them do.
Observed: TypeAlias = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True, eq=False)
class Labelled(Checked):
    """Data whose batches or rows are mappings, with the name of their targets, wherever data are taken.

    Args:
        data: a mapping of tensors, a `Dataset` or a `DataLoader`.
        target: the entry that holds the targets; all others are what the network reads.
    """

    data: Any
    target: str

    def __post_init__(self) -> None:
        if not (isinstance(self.data, Mapping | tuple | Source | IterableDataset) or holds_rows(self.data)):
            raise DataError(f"data must be a mapping, a Dataset or a DataLoader, got {type(self.data).__name__}")


def named_target(target: str | None, *data: Any) -> list[Any]:
    """Data with the name of their targets, where one is given."""
    return [some if target is None or some is None else Labelled(some, target) for some in data]


#: From targets and a dtype to weights of their rows, or None.
TargetWeights: TypeAlias = Callable[[Tensor, torch.dtype], Tensor | None]


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
    #: The name of the targets in batches that are mappings.
    target: str | None = None
    #: Brings targets into the likelihood's form or refuses them; set by `check_targets`.
    _check: TargetCheck | None = None
    _digest: str | None = None
    #: Sum and mean of the rows' weights once `weighed`, where they have any: those of batches then have mean 1.
    total_weight: float | None = None
    mean_weight: float = 1.0

    @abstractmethod
    def batches(self, batch_size: int) -> Iterator[Batch]:
        """All rows once, in the source's own order."""

    def digest(self) -> str:
        """A fingerprint of all rows, which are read once more for it; it says what of them cannot be compared."""
        if self._digest is None:
            self._digest = self._rows_digest()
        return self._digest

    @abstractmethod
    def _rows_digest(self) -> str:
        """See `digest`."""

    def check_targets(self, check: TargetCheck) -> None:
        """Pass all targets through `check`: at once where they are in memory, else batch by batch."""
        self._check = check

    def with_labels(self, observed: Observed) -> "Source":
        """The same without rows that hold no label at all, which are no observations."""
        return self

    def _checked(self, raw: Any, like: TensorOptions, rows: RowNumbers) -> Batch:
        raw = parted(raw, self.target) if self.labelled else unlabelled(raw, self.target)
        return without_graph(checked_batch(raw, like, rows, check=self._check))

    def example(self, rows: int = 8) -> Batch:
        """The first rows, to learn shapes from."""
        batch = next(self.batches(rows), None)
        if batch is None:
            raise DataError("data must hold at least one row, got none")
        return batch.rows(slice(rows))


class OrderedSource(Source):
    """A source whose rows can be read by number, in any order."""

    num_data: int  # pyright: ignore[reportIncompatibleVariableOverride]
    #: Of all rows, as they were given, on the host.
    raw_weights: Tensor | None = None

    def weigh(self, raw: Tensor) -> Tensor:
        """Take weights of all rows, and give them with mean 1."""
        self.raw_weights, self.total_weight = raw, float(raw.double().sum())
        self.mean_weight = self.total_weight / self.num_data
        return (raw.double() / self.mean_weight).to(raw.dtype)

    def with_labels(self, observed: Observed) -> Source:
        parts = [_some_label(batch.targets, observed).cpu() for batch in self.batches(1024)]
        labelled = torch.cat(parts).nonzero().flatten()
        if not len(labelled):
            raise DataError("data must hold at least one label that is not ignored, got none")
        return self if len(labelled) == self.num_data else self.only(labelled)

    def only(self, rows: Tensor) -> "OrderedSource":
        """Some rows, by their numbers."""
        return RowsSource(self, rows)

    @abstractmethod
    def read(self, groups: Sequence[Tensor]) -> Iterator[Batch | None]:
        """One batch for each group of row numbers; None for an empty group."""


class TensorSource(OrderedSource):
    """Rows held whole as tensors; checked once, up front."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.raw = batch, batch.targets
        self.num_data = len(batch.targets)

    def check_targets(self, check: TargetCheck) -> None:
        inputs, targets = self.batch.inputs, self.raw  # a second check starts from what the user gave
        self.batch = self.batch._replace(targets=check(inputs, targets.cpu(), 0).to(targets.device))

    def only(self, rows: Tensor) -> "TensorSource":
        rows = rows.to(self.batch.targets.device)
        part = TensorSource(self.batch.rows(rows))
        part.raw = self.raw[rows]
        return part

    def batches(self, batch_size: int) -> Iterator[Batch]:
        for rows in split(self.num_data, batch_size):
            yield self.batch.rows(rows)

    def read(self, groups: Sequence[Tensor]) -> Iterator[Batch | None]:
        inputs, targets, weights = self.batch.inputs, self.batch.targets, self.batch.weights
        sizes = [len(group) for group in groups]
        if not sizes:
            return
        # All row numbers move to the data's device at once, not batch by batch.
        for size, index in zip(sizes, torch.cat([*groups]).to(targets.device).split(sizes), strict=True):
            rows = map_tensors(lambda tensor, index=index: tensor.index_select(0, index), inputs)
            batch = Batch(rows, targets.index_select(0, index))
            if weights is not None:
                batch = batch._replace(weights=weights.index_select(0, index))
            yield batch if size else None

    def _rows_digest(self) -> str:
        return rows_digest([self.batch])


class DatasetSource(OrderedSource):
    """A map-style dataset, read by our order through a loader; checked batch by batch."""

    def __init__(self, dataset: Dataset, like: TensorOptions, loader: DataLoader | None = None) -> None:
        padded = loader is not None and loader.collate_fn is not default_collate
        self.dataset, self.like = dataset if padded else with_tensors(dataset), like
        self.num_data = len(dataset)  # pyright: ignore[reportArgumentType]
        self.options: dict[str, Any] = {}
        if loader:
            assert isinstance(loader.batch_sampler, BatchSampler)  # see `reads_all_rows`
            self.batch_size, self.drop_last = loader.batch_sampler.batch_size, loader.batch_sampler.drop_last
            self.options = reading_options(loader)
        if self.num_data == 0:
            raise DataError("data must hold at least one row, got an empty dataset")

    def batches(self, batch_size: int) -> Iterator[Batch]:
        numbers = torch.arange(self.num_data)
        for batch in self.read([numbers[rows] for rows in split(self.num_data, batch_size)]):
            assert batch is not None
            yield batch

    def example(self, rows: int = 8) -> Batch:
        (batch,) = self.read([torch.arange(min(rows, self.num_data))])  # the loader prepares no more than these
        assert batch is not None
        return batch

    def read(self, groups: Sequence[Tensor]) -> Iterator[Batch | None]:
        numbers = [group.tolist() for group in groups]
        filled = [group for group in numbers if group]
        # The loader's own generator only seeds its workers; without one it would draw from the global state.
        generator = seeds.generator(filled[0][0] if filled else 0, "workers", self.num_data)
        loader = iter(DataLoader(self.dataset, batch_sampler=filled, generator=generator, **self.options))
        for group in numbers:
            yield self._checked(stacked_rows(loader), self.like, group) if group else None

    def _rows_digest(self) -> str:
        return read_again(lambda: self.example(TWICE), lambda: self.batches(DIGEST_ROWS))


class RowsSource(OrderedSource):
    """Some rows of a source, by their numbers.

    Args:
        source: of the rows.
        rows: their numbers.
        raw_weights: of these rows, in place of the source's own.
    """

    def __init__(self, source: OrderedSource, rows: Tensor, raw_weights: Tensor | None = None) -> None:
        self.source, self.rows, self.num_data = source, rows, len(rows)
        self.options = getattr(source, "options", {})
        self.batch_size, self.drop_last = source.batch_size, source.drop_last
        if raw_weights is None and source.raw_weights is not None:
            raw_weights = source.raw_weights[rows]
        self.weights = None if raw_weights is None else self.weigh(raw_weights)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        for batch in self.read([torch.arange(self.num_data)[part] for part in split(self.num_data, batch_size)]):
            assert batch is not None
            yield batch

    def read(self, groups: Sequence[Tensor]) -> Iterator[Batch | None]:
        batches = self.source.read([self.rows[group] for group in groups])
        if self.weights is None:
            return batches
        return (
            batch and batch._replace(weights=moved(self.weights[group], batch.targets.device))
            for batch, group in zip(batches, groups, strict=True)
        )

    def _rows_digest(self) -> str:
        return f"rows {storage.checksum({'rows': self.rows})[:16]} of {self.source.digest()}"


class LoaderSource(Source):
    """A loader whose order is its own (a sampler of the user's, an iterable dataset), read as it is."""

    def __init__(self, loader: DataLoader, like: TensorOptions) -> None:
        self.loader, self.like = loader, like
        self.batch_size = loader.batch_size
        self.num_data = None
        #: From targets to weights that belong to them.
        self.of_targets: TargetWeights | None = None
        #: Where targets say something, and whether `num_data` counts rows whether they do or not.
        self.observed: Observed | None = None
        self.counts_all = False
        if loader.batch_size is not None and hasattr(loader.sampler, "__len__"):
            self.num_data = len(loader.sampler)  # pyright: ignore[reportArgumentType]

    def batches(self, batch_size: int) -> Iterator[Batch]:
        first_row = 0
        for raw in self.loader:
            batch = self._checked(raw, self.like, first_row)
            first_row += len(batch.targets)
            if self.observed is not None:
                rows = len(batch.targets)
                batch = labelled_rows(batch, self.observed)
                if self.counts_all and len(batch.targets) < rows:
                    raise DataError(
                        "some rows of this loader hold no label, and its sampler counts them too; pass num_data=, the "
                        "number of rows with a label"
                    )
            if self.total_weight is not None:
                weights = raw_weights(batch, self.like.dtype, self.of_targets) / self.mean_weight
                batch = batch._replace(weights=weights)
            if len(batch.targets):
                yield batch
        if first_row == 0:
            raise DataError("data must hold at least one row, got a loader without batches")

    def with_labels(self, observed: Observed) -> Source:
        self.observed = observed
        return self

    def _rows_digest(self) -> str:
        loader, dataset = self.loader, self.loader.dataset
        if isinstance(dataset, IterableDataset):
            return f"{self.num_data} rows of a stream ({UNKNOWN}: it cannot be read twice)"
        whole = loader.batch_sampler is None  # items are batches already
        sampler = loader.sampler if whole else loader.batch_sampler
        order = described(sampler, above=(id(dataset),))
        try:  # all rows by number: the sampler may draw, and is left alone
            numbers = range(len(dataset))  # pyright: ignore[reportArgumentType]
            groups = numbers if whole else [list(numbers[part]) for part in split(len(numbers), DIGEST_ROWS)]
            options: dict[str, Any] = {"batch_size": None, "sampler": groups} if whole else {"batch_sampler": groups}
            options |= {"generator": seeds.generator(0, "workers"), **reading_options(loader)}
            rows = LoaderSource(DataLoader(dataset, **options), self.like)
            rows.labelled, rows.target = self.labelled, self.target
            return f"{read_again(rows.example, lambda: rows.batches(0))}; order {order}"
        except Exception as error:  # whatever stands in rows that the sampler leaves out
            reason = f"its rows cannot be read by number, {type(error).__name__}"
            return f"{self.num_data} rows ({UNKNOWN}: {reason}); order {order}"


def reading_options(loader: DataLoader) -> dict[str, Any]:
    """How a loader reads: all its options but those of its order."""
    names = "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"
    return {name: getattr(loader, name) for name in names}


def rows_digest(batches: Iterable[Batch], drawn: Collection[str] = ()) -> str:
    """A checksum of each tensor over all rows, in words; tensors that are `drawn` anew have none."""
    hashes: dict[str, Any] = {}
    forms: dict[str, str] = {}
    rows = 0
    for batch in batches:
        rows += len(batch.targets)
        for name, tensor in _tensors(batch):
            if name in drawn:
                continue
            running = hashes.setdefault(name, hashlib.sha256())
            form = f"{tensor.dtype} {tuple(tensor.shape[1:])}"
            if forms.get(name) != form:
                forms[name] = form
                running.update(form.encode())
            if tensor.numel():
                running.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    parts = [f"{name} {running.hexdigest()[:16]}" for name, running in hashes.items()]
    parts += [f"{name} ({UNKNOWN}: drawn anew at each reading)" for name in drawn]
    return f"{rows} rows: {', '.join(parts)}"


def read_again(first: Callable[[], Batch], every: Callable[[], Iterator[Batch]]) -> str:
    """The digest of rows that can be read again; `first` reads some of them, twice under two seeds.

    What differs between the two is drawn, as random crops are, and no sign of other data.
    """
    once, again = ({}, {})
    for seed, seen in enumerate((once, again)):
        with seeds.forked(seed, "digest"):
            seen |= {name: storage.checksum({"": tensor}) for name, tensor in _tensors(first())}
    drawn = [name for name in once if once[name] != again.get(name)]
    with seeds.forked(0, "digest"):
        return rows_digest(every(), drawn)


def _tensors(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    yield from named_tensors(batch.inputs)
    yield "targets", batch.targets
    if batch.weights is not None:
        yield "weights", batch.weights


def _some_label(targets: Tensor, observed: Observed) -> Tensor:
    """Which rows have a label that says something, [B]."""
    seen = observed(targets)
    whole = targets.new_ones(len(targets), dtype=torch.bool)
    return whole if seen is None else seen.reshape(len(seen), -1).any(1)


def labelled_rows(batch: Batch, observed: Observed) -> Batch:
    """The rows of a batch that have a label."""
    rows = _some_label(batch.targets, observed)
    if bool(rows.all()):
        return batch
    return batch.rows(rows)


def with_tensors(dataset: Any) -> Any:
    """A data set of Hugging Face with rows of tensors in place of lists, and without its text; others as they are."""
    form = getattr(dataset, "format", None)
    if not (isinstance(form, Mapping) and form.get("type") is None and hasattr(dataset, "with_format")):
        return dataset
    text = [name for name, feature in dataset.features.items() if "string" in str(feature)]
    return dataset.remove_columns(text).with_format("torch")


def stacked_rows(batches: Iterator[Any]) -> Any:
    """The next batch; where its rows are of different lengths, an error that says what pads them."""
    try:
        return next(batches)
    except RuntimeError as error:
        if "equal size" not in str(error):
            raise
        raise DataError(
            "rows of different lengths must be padded to be a batch: give a DataLoader whose collate_fn does so, such "
            f"as Transformers' DataCollatorWithPadding(tokenizer); {error}"
        ) from error


def parted(raw: Any, target: str | None) -> Any:
    """A batch that is a mapping as a pair of inputs and targets; others as they are.

    Args:
        raw: what a user's loader gives.
        target: the name of the targets; None looks for those of `TARGETS`.
    """
    if not isinstance(raw, Mapping):
        if target is not None:
            raise DataError(
                f"target={target!r} names an entry of batches that are mappings, got {type(raw).__name__}; leave it out"
            )
        return raw
    name = target or next((name for name in TARGETS if name in raw), TARGETS[0])
    if name not in raw:
        raise DataError(f"a mapping must hold its targets as {name!r}, got {list(raw)}; name them by target=")
    return {key: value for key, value in raw.items() if key != name}, raw[name]


def unlabelled(raw: Any, target: str | None = None) -> tuple[Inputs, Tensor]:
    """A batch of inputs, with or without targets, as a pair whose targets say nothing."""
    if isinstance(raw, Mapping):
        raw = {key: value for key, value in raw.items() if key not in ((target,) if target else TARGETS)}
    if isinstance(raw, tuple | list):
        if len(raw) not in (1, 2, 3):
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
    if isinstance(data, Labelled):
        return holds_rows(data.data)
    if isinstance(data, DataLoader | Dataset):
        return True
    if isinstance(data, list) and data and all(isinstance(row, Mapping) for row in data):
        return True
    numbered = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return numbered and not (hasattr(data, "__array__") or isinstance(data, Mapping | tuple | list | str | bytes))


def reading(
    source: Source, seed: int, *path: int | str, device: torch.device | str = "cpu"
) -> AbstractContextManager[None]:
    """Around reading: datasets and loaders, which may draw from the global state, find it under a derived seed."""
    if isinstance(source, TensorSource):
        return nullcontext()
    return seeds.forked(seed, *path, device=device)


def without_graph(batch: Batch) -> Batch:
    """The rows apart from any graph they come from, so that training leaves no gradients on a user's tensors."""
    inputs, targets, weights = map_tensors(Tensor.detach, (batch.inputs, batch.targets, batch.weights))
    return Batch(inputs, targets, weights=weights)


def raw_weights(batch: Batch, dtype: torch.dtype, of_targets: TargetWeights | None) -> Tensor:
    """The weights of a batch's rows, times those of their targets."""
    others = None if of_targets is None else of_targets(batch.targets, dtype)
    if others is None:
        others = torch.ones(len(batch.targets), dtype=dtype, device=batch.targets.device)
    return batch.weighted(others)


def weighed(source: Source, example: Batch, like: TensorOptions, of_targets: TargetWeights | None = None) -> Source:
    """The source with weights of mean 1 and without rows that weigh nothing; as it is where nothing weighs its rows.

    Rows that are not in memory are read once for it, so that the sum of the weights is known before work starts.

    Args:
        source: whose targets are checked.
        example: some of its rows.
        like: dtype and device of the weights.
        of_targets: gives weights that belong to targets, or None.
    """
    told = of_targets is not None and of_targets(example.targets[:1], like.dtype) is not None
    if source.total_weight is not None or (example.weights is None and not told):
        return source
    held = isinstance(source, TensorSource)
    batches = [source.batch] if held else source.batches(DIGEST_ROWS)
    raw = torch.cat([raw_weights(batch, like.dtype, of_targets).cpu() for batch in batches])
    total = float(raw.double().sum())
    if not (0 < total < math.inf and raw.min() >= 0):
        raise DataError(f"weights must be at least 0, with a sum above it, got a sum of {total:g} over {len(raw)} rows")
    rows = raw.nonzero().flatten()
    if held:
        result = source.only(rows)
        result.batch = result.batch._replace(weights=moved(result.weigh(raw[rows]), like.device))
        return result
    if isinstance(source, OrderedSource):
        return RowsSource(source, rows, raw[rows])
    assert isinstance(source, LoaderSource)
    source.of_targets, source.total_weight, source.mean_weight = of_targets, total, total / len(raw)
    return source


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
    if type(data) is TensorDataset and len(data.tensors) in (1, 2, 3):
        data = unlabelled(list(data.tensors))
    source = as_source(data, like)
    source.labelled = False
    return source


def as_source(data: Any, like: TensorOptions, name: str = "data") -> Source:
    """The source for (inputs, targets), with weights or not, a mapping, a `Dataset` or a `DataLoader`, or a source."""
    target = None
    if isinstance(data, Labelled):
        data, target = data.data, data.target
    source = _source(parted(data, target) if isinstance(data, Mapping | tuple | TensorDataset) else data, like, name)
    source.target = source.target or target
    return source


def _source(data: Any, like: TensorOptions, name: str) -> Source:
    if isinstance(data, Source):
        return data
    if isinstance(data, DataLoader):
        return DatasetSource(data.dataset, like, data) if reads_all_rows(data) else LoaderSource(data, like)
    if type(data) is TensorDataset and len(data.tensors) in (2, 3):  # a subclass may change what an item is
        data = tuple(data.tensors)
    if isinstance(data, tuple | list) and not (data and all(isinstance(row, Mapping) for row in data)):
        if len(data) not in (2, 3):
            raise DataError(
                f"{name} must be a pair (inputs, targets), got {len(data)} values; weights of rows come third, "
                "several inputs go into one tuple or dict: ((a, b), targets)"
            )
        return TensorSource(without_graph(checked_batch(data, like, anywhere=True)))
    if isinstance(data, IterableDataset):
        return LoaderSource(DataLoader(data, batch_size=128), like)
    known = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if known and not isinstance(data, Mapping | Tensor | np.ndarray | str | bytes):
        return DatasetSource(data, like)  # pyright: ignore[reportArgumentType]
    raise DataError(f"{name} must be a pair (inputs, targets), a Dataset or a DataLoader, got {type(data).__name__}")
