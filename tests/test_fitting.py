"""One way in: whatever reads data of the user's checks them alike and says the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import dubito
from dubito import MAP, BatchEnsemble, Categorical, ConfigError, DataError, Gaussian, Laplace, NetworkError
from dubito.calibration import temperature_scaled
from dubito.fitting import Prepared, Run, Start, checked_rows, prepare, prepare_more, prepare_start, read
from dubito.inference.swag import SWAGPosterior
from dubito.networks import duplicate
from dubito.posterior import Posterior
from dubito.training import Training

QUICK = Training(epochs=1, batch_size=8)
pytestmark = pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def net(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


X, Y = normal(16, 4), normal(16, 3, seed=1).argmax(1)


class Stream(IterableDataset):
    """Rows whose number nobody tells."""

    def __iter__(self):
        return zip(X, Y, strict=True)


@pytest.fixture(scope="module")
def laplace() -> Any:
    return Laplace().fit(net(), (X, Y), Categorical())


#: All that read data with targets.
READERS: dict[str, Callable[[Any, Any], Any]] = {
    "fit": lambda posterior, data: MAP().fit(net(), data, Categorical(), training=QUICK),
    "validation": lambda posterior, data: MAP().fit(net(), (X, Y), Categorical(), training=QUICK, validation=data),
    "update": lambda posterior, data: posterior.update(data),
    "evaluate": lambda posterior, data: posterior.evaluate(data),
    "temperature": lambda posterior, data: temperature_scaled(posterior, data),
    "tuned": lambda posterior, data: posterior.tuned(validation=data),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y * 0 + 3), r"labels must lie in 0\.\.2 .*, got 3 at row 0"),
        ((X, Y.float() + 0.5), "Categorical targets must be whole numbers"),
        ((X[:, :3], Y), r"the network cannot read inputs of shape \{'inputs': \(\d+, 3\)\}"),
        ((X, Y[:5]), "inputs and targets must have the same length, got 16 and 5"),
        ((X.new_full((2, 4), torch.nan), Y[:2]), "inputs must be finite, got nan at row 0"),
        ((X, Y, Y, Y), r"must be a pair \(inputs, targets\), got 4 values"),
        (5, r"must be a pair \(inputs, targets\), a Dataset or a DataLoader, got int"),
    ],
)
def test_the_same_data_are_refused_in_the_same_words(laplace, reader: str, data: Any, message: str):
    with pytest.raises(DataError, match=message):
        READERS[reader](laplace, data)


@pytest.mark.parametrize("reader", ["fit", "update"])
def test_rows_that_must_be_counted(laplace, reader: str):
    message = "the number of rows must be known, but these data do not tell it; pass num_data="
    with pytest.raises(DataError, match=message):
        READERS[reader](laplace, Stream())


def test_read_says_what_was_wrong():
    assert torch.equal(read(lambda x: x + 1, X), X + 1)
    with pytest.raises(NetworkError, match=r"answer 16 rows with 16 rows of outputs on the first axis, got .*\(4,"):
        read(lambda x: x.T, X)
    with pytest.raises(NetworkError, match=r"got shape \(\)"):
        read(lambda x: x.sum(), X)
    with pytest.raises(DataError, match=r"cannot read inputs of shape \{'inputs': \(16, 4\)\}: no"):
        read(raising(ValueError("no")), X)
    for error in (NetworkError("ours"), torch.OutOfMemoryError("memory"), KeyError("a fault of the network's")):
        with pytest.raises(type(error)) as caught:
            read(raising(error), X)
        assert caught.value is error


def raising(error: Exception) -> Callable[[Any], Tensor]:
    def function(_: Any) -> Tensor:
        raise error

    return function


def test_a_network_that_answers_without_end_is_refused_before_work():
    broken = net()
    broken.append(Overflow())
    with pytest.raises(NetworkError, match="outputs on the first rows hold NaN or infinity"):
        prepare(broken, (X, Y), Categorical())


class Overflow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.zeros_like(x)


def test_prepared_is_a_start_with_data():
    given = net(1).train()
    given[0].eval()
    column = Y.double().reshape(-1, 1)
    prepared = prepare(given, (X, column), Gaussian(), seed=7, num_data=40, validation=(X[:3], column[:3]))
    assert isinstance(prepared, Prepared) and isinstance(prepared, Start) and prepared.seed == 7
    assert prepared.num_data == 40 and prepared.modes == {"0": False} and given.training
    assert prepared.network is not given and not prepared.network.training
    assert prepared.run.validation is not None and prepared.run.validation.num_data == 3


def test_the_example_has_targets_in_the_likelihoods_form():
    prepared = prepare(net(1), DataLoader(Pairs(), batch_size=4), Gaussian())
    assert prepared.example.targets.shape == (8, 1) and prepared.example.inputs.shape == (8, 4)
    assert next(prepared.source.batches(4)).targets.shape == (4, 1)


class Pairs(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, float]:
        return X[index], float(Y[index])


def test_more_data_keep_network_and_likelihood(laplace):
    more = prepare_more(laplace.network, (X[:5], Y[:5]), laplace.likelihood)
    assert more.network is laplace.network and more.likelihood is laplace.likelihood and more.num_data == 5
    with pytest.raises(ConfigError, match="num_data must be a whole number"):
        prepare_more(laplace.network, (X, Y), laplace.likelihood, num_data=0)


def test_a_start_without_data():
    begun = prepare_start(net(), Categorical(), 16, 3)
    assert begun.seed == 3 and begun.run == Run(seed=3) and begun.num_data == 16
    for arguments, message in (((0, 3), "num_data"), ((16, "3"), "seed")):
        with pytest.raises(ConfigError, match=message):
            prepare_start(net(), Categorical(), *arguments)  # pyright: ignore


@pytest.mark.parametrize("whole", [True, False])
def test_checked_rows_are_all_rows(laplace, whole: bool):
    options = {"seed": 0, "max_rows": 5, "whole": whole}
    batches = list(checked_rows(laplace.network, laplace.likelihood, (X, Y), **options))
    assert [len(batch.targets) for batch in batches] == ([16] if whole else [5, 5, 6])
    assert torch.equal(torch.cat([batch.inputs for batch in batches]), X)
    assert torch.equal(torch.cat([batch.targets for batch in batches]), Y)
    with pytest.raises(DataError, match=r"got 9 at row 12"):
        wrong = torch.where(torch.arange(16) == 12, 9, Y)
        list(checked_rows(laplace.network, laplace.likelihood, (X, wrong), **options))


# -- which parameters the user had frozen -------------------------------------------------------------------


class Still(Posterior):
    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return self.weights()


def test_a_network_at_rest_does_not_tell_what_was_frozen():
    given = net()
    given[0].requires_grad_(False)
    likelihood = Categorical().build(None)
    first = Still(duplicate(given), likelihood, method=MAP()).finished()
    assert first.trainable == {"2.weight", "2.bias"}
    with pytest.raises(NetworkError, match=r"no parameter of this network requires gradients.* pass trainable="):
        Still(first.network, likelihood, method=MAP())
    again = Still(first.network, likelihood, method=MAP(), trainable=first.trainable).finished()
    assert [p.requires_grad for p in again.fold().parameters()] == [False, False, True, True]


def test_flags_go_along_with_what_is_made_of_a_posterior(tmp_path):
    given = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    given[0].requires_grad_(False)
    flags = [p.requires_grad for p in given.parameters()]

    def fit(method: Any) -> Any:
        return method.fit(given, (X, Y), Categorical(), training=QUICK)

    swag = fit(dubito.SWAG(rank=2))
    made = {
        "refreshed": swag.refreshed((X, Y), num_samples=2),
        "tied": fit(dubito.MeanField()).tied(1),
        "component": fit(BatchEnsemble(components=2)).component(1),
        "ensemble": fit(dubito.DeepEnsemble(members=2)),
        "laplace": fit(Laplace()),
        "tuned": fit(Laplace()).tuned(),
    }
    assert isinstance(made["refreshed"], SWAGPosterior) and made["refreshed"].num_atoms == 2
    for name, posterior in made.items():
        assert [p.requires_grad for p in posterior.fold().parameters()] == flags, name
    swag.save(tmp_path / "p")
    frozen = duplicate(given).requires_grad_(False)
    assert not any(p.requires_grad for p in dubito.load(tmp_path / "p", frozen).fold().parameters())
