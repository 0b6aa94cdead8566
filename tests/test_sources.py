"""Sources: pairs, datasets and loaders give the same rows, and say which row is wrong."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import dubito
from dubito.errors import DataError
from dubito.inputs import RowNumbers, TensorOptions, row_number
from dubito.sources import DatasetSource, LoaderSource, OrderedSource, TensorSource, as_source, split

SINGLE = TensorOptions(torch.float32, torch.device("cpu"))
X = torch.arange(22.0).reshape(11, 2)
Y = torch.arange(11)
PAIRS = TensorDataset(X, Y)


class Items(Dataset):
    """A dataset of its own making, with dict inputs and plain Python targets."""

    def __init__(self, x: Tensor = X, y: Tensor = Y) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return {"x": self.x[index].numpy()}, self.y[index].item()


class Stream(IterableDataset):
    def __init__(self, count: int = 11) -> None:
        self.count = count

    def __iter__(self):
        return iter([(X[i], Y[i]) for i in range(self.count)])


class Thrice(Sampler):
    """A sampler that does not tell its length."""

    def __iter__(self):
        return iter([3, 3, 3])


def rows_read(source, size: int = 4) -> list[int]:
    """The row numbers a source delivers, after checking that inputs and targets belong together."""
    numbers = []
    for batch in source.batches(size):
        inputs = batch.inputs["x"] if isinstance(batch.inputs, dict) else batch.inputs
        assert torch.equal(inputs, X[batch.targets])
        numbers += batch.targets.tolist()
    return numbers


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ((X, Y), TensorSource),
        ([X.numpy(), Y.tolist()], TensorSource),
        (PAIRS, TensorSource),
        (Subset(PAIRS, range(11)), DatasetSource),
        (Items(), DatasetSource),
        (DataLoader(PAIRS, batch_size=3), DatasetSource),
        (DataLoader(PAIRS, batch_size=3, shuffle=True), DatasetSource),
        (DataLoader(PAIRS, batch_sampler=BatchSampler(RandomSampler(PAIRS), 3, True)), DatasetSource),
        (Stream(), LoaderSource),
        (DataLoader(Stream(), batch_size=3), LoaderSource),
    ],
)
def test_every_form_gives_all_rows_in_order(data, kind):
    state = torch.get_rng_state()
    source = as_source(data, SINGLE)
    assert type(source) is kind
    assert rows_read(source) == list(range(11))
    assert rows_read(source) == list(range(11))  # and again
    assert source.num_data == (11 if issubclass(kind, OrderedSource) else None)
    example = source.example(2)
    assert example.targets.tolist() == [0, 1]
    if kind is not LoaderSource:  # a loader of the user's own draws from the global state; callers fork it
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("data", [(X, Y), Items(), DataLoader(Subset(PAIRS, range(11)), batch_size=2, shuffle=True)])
def test_rows_are_read_by_number(data):
    source = as_source(data, SINGLE)
    assert isinstance(source, OrderedSource)
    groups = [torch.tensor([5, 0, 5]), torch.tensor([], dtype=torch.long), torch.tensor([10])]
    batches = list(source.read(groups))
    assert batches[1] is None
    assert [batch.targets.tolist() for batch in batches if batch] == [[5, 0, 5], [10]]


@pytest.mark.parametrize(
    ("loader", "rows", "num_data"),
    [
        (DataLoader(PAIRS, sampler=[7, 2, 9], batch_size=2), [7, 2, 9], 3),
        (DataLoader(PAIRS, sampler=Thrice(), batch_size=2), [3, 3, 3], None),
        (DataLoader(PAIRS, batch_sampler=[[1, 2], [8]]), [1, 2, 8], None),
        (DataLoader(PAIRS, batch_sampler=BatchSampler([4, 6, 1], 2, False)), [4, 6, 1], None),
        (DataLoader(PAIRS, sampler=SequentialSampler(range(3)), batch_size=2), [0, 1, 2], 3),
    ],
)
def test_a_loaders_own_choice_of_rows_is_kept(loader: DataLoader, rows: list[int], num_data: int | None):
    source = as_source(loader, SINGLE)
    assert isinstance(source, LoaderSource)
    assert rows_read(source) == rows
    assert source.num_data == num_data


@pytest.mark.parametrize(
    "sampler",
    [
        SubsetRandomSampler([1, 5, 6]),
        RandomSampler(PAIRS, replacement=True),
        RandomSampler(PAIRS, num_samples=5),
        WeightedRandomSampler(torch.eye(11)[3], 4),
    ],
)
def test_random_choices_of_rows_are_kept_too(sampler: Sampler):
    for loader in (
        DataLoader(PAIRS, sampler=sampler, batch_size=2),
        DataLoader(PAIRS, batch_sampler=BatchSampler(sampler, 2, False)),
    ):
        source = as_source(loader, SINGLE)
        assert isinstance(source, LoaderSource)
        numbers = rows_read(source)
        assert len(numbers) == len(sampler)
        if isinstance(sampler, SubsetRandomSampler):
            assert sorted(numbers) == [1, 5, 6]


def test_a_loaders_settings_are_taken_over():
    def swapped(items):
        return {"x": torch.stack([x for x, _ in items])}, torch.stack([y for _, y in items])

    source = as_source(DataLoader(PAIRS, batch_size=3, drop_last=True, collate_fn=swapped), SINGLE)
    assert (source.batch_size, source.drop_last) == (3, True)
    assert set(source.example().inputs) == {"x"}
    given_sampler = DataLoader(PAIRS, batch_sampler=BatchSampler(SequentialSampler(PAIRS), 5, True))
    source = as_source(given_sampler, SINGLE)
    assert (source.batch_size, source.drop_last) == (5, True)
    assert as_source((X, Y), SINGLE).batch_size is None


def test_a_dataset_that_changes_its_items_is_asked_for_them():
    class Negated(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return -x, y

    example = as_source(Negated(X, Y), SINGLE).example()
    assert torch.equal(example.inputs, -X[:8])


def test_an_example_reads_no_more_rows_than_it_shows():
    class Counted(Items):
        read = 0

        def __getitem__(self, index: int):
            self.read += 1
            return super().__getitem__(index)

    dataset = Counted()
    for rows in (3, 8, 100):
        dataset.read = 0
        assert as_source(dataset, SINGLE).example(rows).targets.tolist() == list(range(min(rows, 11)))
        assert dataset.read == min(rows, 11)


def test_rows_take_the_places_dtype():
    like = TensorOptions(torch.float64, torch.device("cpu"))
    for data in ((X.numpy(), Y), Items(), Stream()):
        example = as_source(data, like).example()
        inputs = example.inputs["x"] if isinstance(example.inputs, dict) else example.inputs
        assert inputs.dtype == torch.float64 and example.targets.dtype == torch.int64
        assert torch.equal(inputs, X[: len(inputs)].double()) and len(inputs) > 1


BROKEN = X.clone()
BROKEN[7, 1] = float("nan")


@pytest.mark.parametrize("data", [TensorDataset(BROKEN, Y), Items(BROKEN)])
def test_what_is_not_finite_is_found_by_its_row(data):
    message = r"must be finite, got nan at row 7, position \(1,\)"
    with pytest.raises(DataError, match=message):
        rows_read(as_source(data, SINGLE))
    with pytest.raises(DataError, match=message):
        list(as_source(Items(BROKEN), SINGLE).read([torch.tensor([2, 9]), torch.tensor([10, 7])]))


def test_a_loaders_rows_are_counted_as_they_come():
    loader = DataLoader(TensorDataset(BROKEN, Y), sampler=[7, 2, 7, 0], batch_size=2)
    with pytest.raises(DataError, match="at row 0, position"):
        list(as_source(loader, SINGLE).batches(2))
    late = DataLoader(TensorDataset(BROKEN, Y), sampler=[1, 2, 0, 7], batch_size=2)
    with pytest.raises(DataError, match="at row 3, position"):
        list(as_source(late, SINGLE).batches(2))


def small(inputs: Tensor, targets: Tensor, rows: RowNumbers) -> Tensor:
    """Refuses targets of 9 and more, doubles the others."""
    for index, value in enumerate(targets.tolist()):
        if value >= 9:
            raise DataError(f"too large at row {row_number(index, rows)}")
    return targets * 2


def test_targets_in_memory_are_checked_at_once():
    with pytest.raises(DataError, match="too large at row 9"):
        as_source((X, Y), SINGLE).check_targets(small)
    source = as_source((X[:9], Y[:9]), SINGLE)
    source.check_targets(small)
    assert source.example(3).targets.tolist() == [0, 2, 4]


@pytest.mark.parametrize("data", [Items(), DataLoader(PAIRS, sampler=[0, 4, 8, 2, 9], batch_size=3)])
def test_other_targets_are_checked_as_they_come(data):
    source = as_source(data, SINGLE)
    source.check_targets(small)
    batches = source.batches(3)
    assert next(batches).targets.tolist() in ([0, 2, 4], [0, 8, 16])
    # Row 9 of the dataset, and the fifth row that the sampler gave.
    with pytest.raises(DataError, match=r"too large at row (9|4)$"):
        list(batches)
    if isinstance(source, DatasetSource):
        with pytest.raises(DataError, match="too large at row 10"):
            list(source.read([torch.tensor([1, 10, 9])]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X[:0], Y[:0]), "at least one row"),
        (TensorDataset(X[:0], Y[:0]), "at least one row"),
        (Subset(PAIRS, []), "at least one row"),
        (Stream(0), "at least one row"),
        (DataLoader(Stream(0), batch_size=2), "at least one row"),
        ((X, Y[:5]), "same length, got 11 and 5"),
        ((X, Y, Y, Y), r"must be a pair \(inputs, targets\), got 4 values; weights of rows come third, several inputs"),
        ((X,), "got 1 values"),
        (TensorDataset(X), "must be a pair"),
        (TensorDataset(X, X, Y, Y), "must be a pair"),
        (X, "a pair .*, a Dataset or a DataLoader, got Tensor"),
        (X.numpy(), "got ndarray"),
        ({"x": X}, "must hold its targets as .labels., got"),
        ("digits", "got str"),
        (None, "got NoneType"),
        (iter([(X, Y)]), "got list_iterator"),
        (5, "got int"),
    ],
)
def test_other_data_are_refused(data, message: str):
    with pytest.raises(DataError, match=message):
        as_source(data, SINGLE).example()


def test_errors_name_the_argument():
    with pytest.raises(DataError, match="validation must be"):
        as_source(5, SINGLE, "validation")


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 60))
def test_split_takes_every_row_once_and_leaves_none_alone(rows: int, batch_size: int):
    slices = split(rows, batch_size)
    assert np.concatenate([np.arange(rows)[part] for part in slices]).tolist() == list(range(rows))
    sizes = [part.stop - part.start for part in slices]
    assert all(size == batch_size for size in sizes[:-1])
    if batch_size > 1 and rows > 1:
        assert 2 <= sizes[-1] <= batch_size + 1


def test_fingerprints_tell_data_apart():
    assert as_source((X, Y), SINGLE).digest() == as_source(PAIRS, SINGLE).digest()
    assert as_source((X, Y), SINGLE).digest() != as_source((BROKEN.nan_to_num(), Y), SINGLE).digest()
    assert as_source(Items(), SINGLE).digest() != as_source(Items(X + 1, Y), SINGLE).digest()
    assert as_source((X.clone().requires_grad_(), Y), SINGLE).digest() == as_source((X, Y), SINGLE).digest()


def test_training_leaves_no_gradient_on_the_users_tensors():
    inputs = torch.randn(8, 3, requires_grad=True)
    net = torch.nn.Linear(3, 2)
    dubito.MAP().fit(net, (inputs, torch.arange(8) % 2), dubito.Categorical(), training=dubito.Training(epochs=1))
    assert inputs.grad is None and inputs.requires_grad
