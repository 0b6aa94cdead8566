"""Predictions of data sets, loaders and arrays on a disk are those of their rows."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import dubito
from dubito import Categorical, ConfigError, DataError, Gaussian, Laplace, MeanField, NetworkError, Training

QUICK = Training(iterations=3, batch_size=10)


def rows(count: int = 23) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def posterior():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return MeanField().fit(net, (rows(), torch.zeros(23).long()), Categorical(), training=QUICK)


class Rows(Dataset):
    """Rows one by one, with targets or without."""

    def __init__(self, *, targets: bool) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return len(rows())

    def __getitem__(self, index: int):
        return (rows()[index], index) if self.targets else rows()[index]


class Numbered:
    """Rows by number, as other libraries have them."""

    def __len__(self) -> int:
        return len(rows())

    def __getitem__(self, index: int) -> Tensor:
        return rows()[index]


class Stream(IterableDataset):
    """Rows one after the other, counted when they are read."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[Tensor]:
        for row in rows():
            self.read += 1
            yield row


def loader(data, **options) -> DataLoader:
    return DataLoader(data, batch_size=5, **options)


DATA = {
    "data set": lambda: Rows(targets=False),
    "data set with targets": lambda: Rows(targets=True),
    "tensors": lambda: TensorDataset(rows()),
    "tensors with targets": lambda: TensorDataset(rows(), torch.arange(23)),
    "numbered rows": Numbered,
    "stream": Stream,
    "loader": lambda: loader(Rows(targets=False)),
    "loader with targets": lambda: loader(Rows(targets=True)),
    "shuffled loader": lambda: loader(TensorDataset(rows(), torch.arange(23)), shuffle=True),
    "loader of a stream": lambda: loader(Stream()),
}


@pytest.mark.parametrize("name", DATA)
def test_rows_of_data_are_predicted_in_the_order_of_the_data(posterior, name: str):
    expected = posterior.predict(rows(), 6, seed=4)
    state = torch.get_rng_state()
    prediction = posterior.predict(DATA[name](), 6, seed=4, max_rows=8)
    assert torch.get_rng_state().equal(state)
    torch.testing.assert_close(prediction.probs, expected.probs)
    torch.testing.assert_close(prediction.aleatoric, expected.aleatoric)
    parts = list(posterior.predict_batches(DATA[name](), 6, seed=4, max_rows=8))
    assert sum(map(len, parts)) == 23 and (len(parts) > 2 or name == "stream")  # 128 rows of a stream at a time
    torch.testing.assert_close(torch.cat([part.probs for part in parts]), expected.probs)


@pytest.mark.parametrize("inputs", [rows(), rows().numpy(), rows().double().numpy()])
def test_arrays_come_in_pieces(posterior, inputs):
    parts = list(posterior.predict_batches(inputs, 6, max_rows=10))
    assert [len(part) for part in parts] == [10, 10, 3]
    expected = posterior.predict(rows(), 6).probs
    torch.testing.assert_close(torch.cat([part.probs for part in parts]), expected)
    whole = list(posterior.predict_batches(inputs, 6))
    assert len(whole) == 1 and len(whole[0]) == 23


@pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")
def test_reals_of_a_loader():
    net = nn.Linear(4, 2)
    posterior = Laplace().fit(net, (rows(), rows()[:, :2]), Gaussian())
    for linearised in (True, False):
        expected = posterior.predict(rows(), 5, linearised=linearised)
        prediction = posterior.predict(loader(Rows(targets=True)), 5, linearised=linearised)
        torch.testing.assert_close(prediction.mean, expected.mean)
        torch.testing.assert_close(prediction.std, expected.std)


def test_rows_are_read_when_they_are_predicted(posterior):
    stream = Stream()
    predictions = posterior.predict_batches(loader(stream), 2)
    assert stream.read == 0
    assert len(next(predictions)) == 5 and stream.read == 5


def test_an_array_on_a_disk_is_read_piece_by_piece(posterior, tmp_path, monkeypatch):
    array = np.lib.format.open_memmap(tmp_path / "rows.npy", "w+", np.float32, (23, 4))
    array[:] = rows().numpy()
    array.flush()
    sizes = []
    real = torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda a: (sizes.append(len(a)), real(a))[1])
    inputs = np.load(tmp_path / "rows.npy", mmap_mode="r")
    probs = torch.cat([part.probs for part in posterior.predict_batches(inputs, 6, max_rows=10)])
    assert sizes == [10, 10, 3]
    torch.testing.assert_close(probs, posterior.predict(rows(), 6).probs)


class Two(nn.Module):
    """A network of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.linear(first + 2 * second)


def test_several_inputs():
    first, second = rows(), rows().flip(0)
    pair = {"first": first, "second": second}
    posterior = MeanField().fit(Two(), (pair, torch.zeros(23).long()), Categorical(), training=QUICK)
    expected = posterior.predict((first, second), 4).probs
    named = [{"first": a, "second": b} for a, b in zip(first, second, strict=True)]
    tuples = [((a, b), 0) for a, b in zip(first, second, strict=True)]
    for items in (named, tuples):
        torch.testing.assert_close(posterior.predict(loader(items), 4).probs, expected)  # pyright: ignore
    for inputs in (pair, (first, second)):
        parts = list(posterior.predict_batches(inputs, 4, max_rows=10))
        assert len(parts) == 3
        torch.testing.assert_close(torch.cat([part.probs for part in parts]), expected)


def test_data_that_cannot_be_read_are_refused_in_words(posterior):
    fours = [(row, row, 0, 0) for row in rows()]
    with pytest.raises(DataError, match=r"a pair \(inputs, targets\), got 4 values; several inputs go into one tuple"):
        posterior.predict(loader(fours))
    with pytest.raises(DataError, match="at least one row, got an empty dataset"):
        posterior.predict(loader([]))
    with pytest.raises(DataError, match="at least one tensor or array, got str"):
        posterior.predict("rows.csv")
    with pytest.raises(DataError, match="at least one tensor or array, got str"):
        list(posterior.predict_batches("rows.csv"))
    with pytest.raises(DataError, match="the network cannot read inputs of shape"):
        list(posterior.predict_batches(loader([row[:3] for row in rows()])))
    spoilt = rows()
    spoilt[7, 2] = torch.nan
    with pytest.raises(DataError, match=r"must be finite, got nan at row 7, position \(2,\)"):
        posterior.predict(loader(list(spoilt)))


def test_options_are_refused_before_a_row_is_read(posterior):
    stream = Stream()
    with pytest.raises(ConfigError, match="max_rows must be"):
        posterior.predict_batches(stream, max_rows=0)
    with pytest.raises(ConfigError, match="linearised=True is for posteriors of"):
        posterior.predict_batches(stream, linearised=True)
    assert stream.read == 0


def test_a_sampler_of_the_users_keeps_its_order(posterior):
    sampler = WeightedRandomSampler(torch.ones(23), 40, generator=torch.Generator().manual_seed(3))
    numbers = list(sampler)
    sampler.generator.manual_seed(3)  # pyright: ignore
    prediction = posterior.predict(loader(Rows(targets=True), sampler=sampler), 4)
    torch.testing.assert_close(prediction.probs, posterior.predict(rows()[numbers], 4).probs)


class Lost(nn.Module):
    """Answers rows whose first number is above 10 by NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).where(x[:, :1] <= 10, torch.nan)


@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")  # it is hardly trained
@pytest.mark.parametrize("method", ["map", "mean-field", "laplace-kfac", "rank1", "deep-ensemble"])
def test_rows_without_numbers_are_named_by_their_place_in_the_data(method):
    inputs, labels = rows(), torch.arange(23) % 3
    fitted = dubito.methods()[method].fit(
        Lost(), (inputs, labels), dubito.Categorical(), training=dubito.Training(iterations=1)
    )
    inputs[7, 0], inputs[19, 0] = 20, 30
    named = r"2 of 23 rows are answered by NaN or infinity \(rows 7, 19\)"
    uses = [
        lambda: fitted.predict(inputs, 2),
        lambda: fitted.evaluate((inputs, labels), num_samples=2),
        lambda: fitted.sample_outputs(inputs, 2, linearised=False if method == "laplace-kfac" else None),
        lambda: fitted.sampled(2).predict(inputs),
    ]
    for use in uses:
        with pytest.raises(NetworkError, match=named):
            use()
    with pytest.raises(NetworkError, match=r"1 of 5 rows .* \(rows 7\)"):
        list(fitted.predict_batches(inputs, 2, max_rows=5))
