"""No step and no prediction waits for a device: reads do not grow with a fit's steps, and predictions have none."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from unittest import mock

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
    DataError,
    DubitoWarning,
    Gaussian,
    Implicit,
    KTied,
    Laplace,
    MCDropout,
    MeanField,
    Rank1,
    Training,
    seeds,
)
from dubito.devices import HostCopy
from dubito.likelihoods import Likelihood
from dubito.method import Method
from dubito.posterior import Posterior
from dubito.training import EarlyStopping, GradientStepper
from dubito.weight_normals import Flipout, LocalReparameterised
from tests.contract.cases import make

from .simulated import Reads, hosted, on_host, simulated

FORMS = ("sampled", "linearised", "marginal", "per_example")


@pytest.fixture(autouse=True)
def no_cudnn() -> Iterator[None]:
    """Builds for CUDA send recurrent layers of the made-up device to kernels that it has not."""
    with torch.backends.cudnn.flags(enabled=False):
        yield


class Case(NamedTuple):
    """A method and what it is fitted with."""

    method: Method
    likelihood: Likelihood = Categorical()
    loader: Literal["host", "device"] | None = None
    settings: Mapping[str, Any] = MappingProxyType({})
    network: str | None = None


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
    "own-dropout": Case(MCDropout(rate=None)),
    "rank1-loop": Case(Rank1(arrangement="loop")),
    "rank1-beside": Case(Rank1(beside=MeanField(max_std=1.0, subset=lambda name, _: name.endswith("bias")))),
    "batch-ensemble-loop": Case(BatchEnsemble(arrangement="loop")),
    "implicit-loop": Case(Implicit(arrangement="loop")),
    "reals": Case(MeanField(), Gaussian()),
    "reals-covariance": Case(Rank1(), Gaussian(covariance=((1.0, 0.2, 0.0), (0.2, 1.0, 0.0), (0.0, 0.0, 1.0)))),
    "reals-laplace": Case(Laplace(batch_size=8), Gaussian()),
    "yes-or-no": Case(MeanField(), Bernoulli()),
    "loader": Case(MeanField(), loader="host"),
    "loader-reals": Case(Rank1(), Gaussian(), loader="host"),
    "loader-yes-or-no": Case(MeanField(), Bernoulli(), loader="host"),
    "loader-laplace": Case(Laplace(), loader="host"),
    "loader-device": Case(MeanField(), loader="device"),
    "clipped": Case(MeanField(), settings={"clip_norm": 1.0}),
    "watched": Case(MeanField(), settings={"early_stopping": EarlyStopping(patience=9)}),
}
OTHERS = [("convolutional", "vogn"), ("convolutional", "laplace-kfac"), ("lstm", "vogn"), ("lstm", "laplace-efb"),
          ("lstm", "implicit"), ("attention", "rank1"), ("dict", "mean-field")]  # fmt: skip
CASES |= {f"{name}-{method}": CASES[method]._replace(network=name) for name, method in OTHERS}
every_case = pytest.mark.parametrize("case", CASES)
#: What still reads, by test and case or form, with the reason.
PENDING = {("linearised", "laplace-inf"): "one number at the end tells whether a variance was lost to rounding"}


def pending(request: pytest.FixtureRequest, *key: str) -> None:
    """Expect a failure where one is known."""
    if key in PENDING:
        request.applymarker(pytest.mark.xfail(strict=True, reason=PENDING[key]))


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


def inputs_for(case: Case, count: int) -> Any:
    return make(case.network, count).inputs if case.network else rows(count, case.likelihood)[0]


def data_for(case: Case, count: int) -> Any:
    inputs, targets = inputs_for(case, count), rows(count, case.likelihood)[1]
    if case.loader is None:
        return hosted((inputs, targets))

    def collated(items: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(items)
        return hosted(batch) if case.loader == "host" else [tensor.clone() for tensor in batch]

    return DataLoader(TensorDataset(inputs, targets), batch_size=8, collate_fn=collated)


def fit(case: Case, count: int) -> tuple[Posterior, Reads]:
    options: dict[str, Any] = {}
    if not isinstance(case.method, Laplace | HMC):
        options["training"] = Training(epochs=2, batch_size=8, **case.settings)
    if "early_stopping" in case.settings:
        options["validation"] = hosted(rows(16, case.likelihood))
    net = make(case.network).net if case.network else network()
    with simulated() as reads:
        warnings.simplefilter("ignore", DubitoWarning)
        posterior = case.method.fit(net, data_for(case, count), case.likelihood, **options)
    return posterior, reads


@cache
def fitted(name: str) -> Posterior:
    return fit(CASES[name], 32)[0]


@every_case
def test_steps_read_nothing(case: str, request: pytest.FixtureRequest):
    pending(request, "steps", case)
    # Twice the batches and all else alike: what is read for a whole fit or epoch is read as often.
    few, many = (fit(CASES[case], count)[1].ours() for count in (32, 64))
    assert not many - few, f"read in every step: {dict(many - few)}"


@every_case
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
def test_predictions_read_nothing(case: str, form: str, host: bool, request: pytest.FixtureRequest):
    pending(request, form, case)
    posterior = fitted(case)
    if not posterior.has_form(form):
        pytest.skip("no such form")
    options = {} if form == "sampled" else {form: True}
    if form == "sampled" and posterior.has_form("linearised"):
        options = {"linearised": False}
    inputs = inputs_for(CASES[case], 6)
    with simulated() as reads:
        posterior.predict(inputs, 4, seed=1, **options)  # what is stored for all predictions is made once
        reads.clear()
        prediction = posterior.predict(hosted(inputs) if host else inputs, 4, seed=2, **options)
        assert not any(map(on_host, (prediction.mean,) if hasattr(prediction, "mean") else (prediction.probs,)))
    assert not reads, f"read in a prediction: {dict(reads)}"


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian()], ids=lambda kind: type(kind).__name__)
@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
def test_densities_of_targets_read_nothing(likelihood: Likelihood, host: bool):
    posterior, _ = fit(Case(MeanField(), likelihood), 16)
    inputs, targets = rows(6, likelihood)
    expected = posterior.predict(inputs, 4).log_prob(targets)
    with simulated() as reads:
        prediction = posterior.predict(inputs, 4)
        reads.clear()
        densities = prediction.log_prob(hosted(targets) if host else targets)
        assert not on_host(densities)
    assert not reads
    assert torch.equal(densities, expected)


@pytest.mark.parametrize("case", ["loader", "loader-yes-or-no"])
def test_evaluations_read_as_often_however_many_batches(case: str):
    reads = []
    for count in (16, 32):
        with simulated() as noted:
            fitted(case).evaluate(data_for(CASES[case], count), num_samples=2)
        reads.append(noted.ours())
    few, many = reads
    assert not many - few


@every_case
def test_draws_made_once_read_nothing(case: str):
    fixed, inputs = fitted(case).sampled(4, seed=1), inputs_for(CASES[case], 6)
    with simulated() as reads:
        fixed.predict(inputs)  # the first rows tell in which form the draws answer together
        function = fixed.function(1)
        reads.clear()
        fixed.predict(inputs)
        function(inputs)
    assert not reads, f"read in a prediction: {dict(reads)}"


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if isinstance(case.method, Laplace)])
def test_joint_predictions_read_nothing(case: str):
    posterior, inputs = fitted(case), inputs_for(CASES[case], 6)
    with simulated() as reads:
        posterior.joint(inputs)
        reads.clear()
        posterior.joint(inputs)
    assert not reads, f"read in a prediction: {dict(reads)}"


def test_a_loop_of_ones_own_reads_nothing():
    objective = MeanField().build(network(), Categorical(), num_data=32)
    optimizer = torch.optim.Adam(objective.parameters(), fused=True)
    inputs, targets = rows(8, Categorical())
    with simulated() as reads:
        for step in range(4):
            optimizer.zero_grad()
            objective.loss(inputs, targets, generator=torch.Generator("cuda").manual_seed(step)).total.backward()
            optimizer.step()
            reads.clear() if step == 0 else None  # the first batch tells what the layers are
    assert not reads


def test_rows_of_a_device_that_are_not_finite_are_answered_by_nan():
    inputs, targets = rows(6, Categorical())
    bounded = nn.Sequential(nn.Tanh(), nn.Linear(4, 3))  # infinite inputs would have finite outputs
    posterior = dubito.MAP().fit(bounded, (inputs, targets), Categorical(), training=Training(epochs=1))
    whole = posterior.predict(inputs).probs
    inputs[2, 1], inputs[4, 0] = torch.nan, torch.inf
    with simulated():
        probs = posterior.predict(inputs).probs
        with pytest.raises(DataError, match=r"inputs must be finite, got nan at row 2, position \(1,\)"):
            posterior.predict(hosted(inputs.clone()))
    broken = [2, 4]
    assert probs[broken].isnan().all()
    assert torch.equal(probs[[0, 1, 3, 5]], whole[[0, 1, 3, 5]])


def test_data_of_a_device_are_looked_at_once_before_a_fit():
    inputs, targets = rows(16, Categorical())
    inputs[3, 2] = torch.nan
    with simulated(), pytest.raises(DataError, match="inputs must be finite, got nan at row 3"):
        dubito.MAP().fit(network(), (inputs, targets), Categorical())
    inputs, targets = rows(16, Categorical())
    targets[5] = 7
    with simulated(), pytest.raises(DataError, match="got 7 at row 5"):
        dubito.MAP().fit(network(), (inputs, targets), Categorical())


def test_labels_of_a_device_that_are_none_have_no_density():
    posterior, (inputs, targets) = fitted("map"), rows(6, Categorical())
    whole = posterior.predict(inputs).log_prob(targets)
    targets[1], targets[4] = -1, 3
    with simulated():
        densities = posterior.predict(inputs).log_prob(targets)
    assert densities.isnan().tolist() == [False, True, False, False, True, False]
    assert torch.equal(densities[[0, 2, 3, 5]], whole[[0, 2, 3, 5]])


def test_terms_of_a_step_are_read_after_the_next():
    events: list[str] = []
    read, step = HostCopy.read, GradientStepper.step

    def noted_step(self: Any, number: int, *args: Any) -> Any:
        events.append(f"step {number}")
        return step(self, number, *args)

    def noted_read(self: HostCopy) -> list[float]:
        events.append("read")
        return read(self)

    with mock.patch.object(GradientStepper, "step", noted_step), mock.patch.object(HostCopy, "read", noted_read):
        dubito.MAP().fit(network(), rows(12, Categorical()), Categorical(), training=Training(epochs=2, batch_size=4))
    # Step 0 gives its norm too; the last step of an epoch is read when the epoch is recorded.
    first = ["step 0", "step 1", "read", "read", "step 2", "read", "read"]
    assert events == [*first, "step 3", "step 4", "read", "step 5", "read", "read"]


@pytest.mark.parametrize("on", ["cuda", "cpu"])
def test_seeds_of_generators_differ_from_call_to_call(on: str):
    with simulated() as reads:
        stream = torch.Generator(on).manual_seed(3)
        first = [seeds.drawn(stream, 31) for _ in range(50)]
        again = torch.Generator(on).manual_seed(3)
        assert [seeds.drawn(again, 31) for _ in range(50)] == first
    assert not reads and len(set(first)) == 50 and all(0 <= seed < 2**31 for seed in first)
