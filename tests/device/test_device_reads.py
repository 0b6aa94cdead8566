"""No step and no prediction waits for a device: its reads do not grow with the steps of a fit, and predictions have none."""

import warnings
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import (
    HMC,
    BatchEnsemble,
    Bernoulli,
    Categorical,
    DubitoWarning,
    Gaussian,
    Implicit,
    KTied,
    Laplace,
    MCDropout,
    MeanField,
    Rank1,
    Training,
)
from dubito.likelihoods import Likelihood
from dubito.method import Method
from dubito.posterior import Posterior
from dubito.training import EarlyStopping
from dubito.weight_normals import Flipout, LocalReparameterised

from .simulated import Reads, hosted, on_host, simulated

FORMS = ("sampled", "linearised", "marginal", "per_example")


class Case(NamedTuple):
    """A method and what it is fitted with."""

    method: Method
    likelihood: Likelihood = Categorical()
    loader: bool = False
    settings: dict[str, Any] = {}


def registered() -> dict[str, Case]:
    """Every method of the registry."""
    methods = dubito.methods()
    small = {name: m for name, m in methods.items() if isinstance(m, Laplace)}
    return {name: Case(replace(small[name], batch_size=8) if name in small else methods[name]) for name in methods}


CASES = {
    **registered(),
    "hmc": Case(HMC(num_samples=4, warmup=4, chains=1, tree_depth=2)),
    "local": Case(MeanField(estimator=LocalReparameterised())),
    "flipout": Case(KTied(estimator=Flipout())),
    "own dropout": Case(MCDropout(rate=None)),
    "rank-1 by itself": Case(Rank1(arrangement="loop")),
    "batch-ensemble by itself": Case(BatchEnsemble(arrangement="loop")),
    "implicit by itself": Case(Implicit(arrangement="loop")),
    "reals": Case(MeanField(), Gaussian()),
    "reals, covariance": Case(Rank1(), Gaussian(covariance=((1.0, 0.2, 0.0), (0.2, 1.0, 0.0), (0.0, 0.0, 1.0)))),
    "reals, Laplace": Case(Laplace(batch_size=8), Gaussian()),
    "yes or no": Case(MeanField(), Bernoulli()),
    "loader": Case(MeanField(), loader=True),
    "loader of reals": Case(Rank1(), Gaussian(), loader=True),
    "loader of yes or no": Case(MeanField(), Bernoulli(), loader=True),
    "loader, Laplace": Case(Laplace(), loader=True),
    "clipped": Case(MeanField(), settings={"clip_norm": 1.0}),
    "watched": Case(MeanField(), settings={"early_stopping": EarlyStopping(patience=9)}),
}
every_case = pytest.mark.parametrize("case", CASES)


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def rows(count: int, likelihood: Likelihood) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 4, generator=stream)
    targets = torch.randint(3, (count,), generator=stream)
    if not isinstance(likelihood, Categorical):
        targets = nn.functional.one_hot(targets, 3).float()
    return inputs, targets


def data_for(case: Case, count: int) -> Any:
    inputs, targets = rows(count, case.likelihood)
    if not case.loader:
        return hosted((inputs, targets))

    def collated(items: list[Any]) -> Any:  # what a loader makes lies on the host
        return hosted(torch.utils.data.default_collate(items))

    return DataLoader(TensorDataset(inputs, targets), batch_size=8, collate_fn=collated)


def fit(case: Case, count: int) -> tuple[Posterior, Reads]:
    options: dict[str, Any] = {}
    if not isinstance(case.method, Laplace | HMC):
        options["training"] = Training(epochs=2, batch_size=8, **case.settings)
    if "early_stopping" in case.settings:
        options["validation"] = hosted(rows(16, case.likelihood))
    with warnings.catch_warnings(), simulated() as reads:
        warnings.simplefilter("ignore", DubitoWarning)
        warnings.filterwarnings("ignore", "User provided device_type of 'cuda'")
        posterior = case.method.fit(network(), data_for(case, count), case.likelihood, **options)
    return posterior, reads


@cache
def fitted(name: str) -> Posterior:
    return fit(CASES[name], 32)[0]


@every_case
def test_steps_read_nothing(case: str):
    # Twice the batches and all else alike: what is read for a whole fit or epoch is read as often.
    few, many = (fit(CASES[case], count)[1].ours() for count in (32, 64))
    assert not many - few, f"read in every step: {dict(many - few)}"


@every_case
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("host", [False, True], ids=["inputs on the device", "inputs on the host"])
def test_predictions_read_nothing(case: str, form: str, host: bool):
    posterior = fitted(case)
    if not posterior.has_form(form):
        pytest.skip("no such form")
    options = {} if form == "sampled" else {form: True}
    if form == "sampled" and posterior.has_form("linearised"):
        options = {"linearised": False}
    inputs, _ = rows(6, Categorical())
    with simulated() as reads:
        posterior.predict(inputs, 4, seed=1, **options)  # what is stored for all predictions is made once
        reads.clear()
        prediction = posterior.predict(hosted(inputs) if host else inputs, 4, seed=2, **options)
        assert not any(map(on_host, (prediction.mean,) if hasattr(prediction, "mean") else (prediction.probs,)))
    assert not reads, f"read in a prediction: {dict(reads)}"
