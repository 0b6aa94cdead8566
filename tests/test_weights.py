"""Weights of rows and of classes: a row of weight w counts as w copies of it, and one of weight 0 is not there."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import dubito
from contract.cases import make
from dubito import (
    BALI,
    EFB,
    GGN,
    INF,
    KFAC,
    MAP,
    Bernoulli,
    Categorical,
    ConfigError,
    DataError,
    Diagonal,
    Empirical,
    Gaussian,
    Laplace,
    NegativeBinomial,
    NetworkError,
    Poisson,
    StudentT,
    Training,
    load,
)
from dubito.calibration import temperature_scaled
from dubito.curvature import find_blocks, statistics
from dubito.evaluation import weighted_mean
from dubito.fitting import prepare
from dubito.inference.hmc.target import Target
from dubito.inference.laplace import LaplacePosterior
from dubito.inputs import Batch, map_tensors
from dubito.posterior import Posterior
from dubito.posterior.mixture import stacking_weights
from dubito.sources import TensorSource

pytestmark = pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")

ROWS = 12
WEIGHTS = torch.tensor([1, 2, 0, 3, 1, 1, 2, 0, 1, 4, 1, 2], dtype=torch.float64)
COPIES = torch.repeat_interleave(torch.arange(ROWS), WEIGHTS.long())
WHOLE = Training(epochs=4, lr=1e-2)  # all rows in one batch
#: Methods that draw noise for each row, so that copies of a row are not answered alike.
NOISY_ROWS = ("mc-dropout", "rank1", "implicit")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


INPUTS, REALS = normal(ROWS, 4), normal(ROWS, 2, seed=1)
LABELS = torch.randint(3, (ROWS,), generator=torch.Generator().manual_seed(2))
LIKELIHOODS: dict[str, tuple[Any, Tensor, int]] = {
    "classes": (Categorical(), LABELS, 3),
    "reals": (Gaussian(), REALS, 2),
    "standardised": (Gaussian(standardise=True), 5 + 3 * REALS, 2),
    "heavy tails": (StudentT(), REALS**3, 2),
    "counts": (NegativeBinomial(), LABELS[:, None].double(), 1),
    "yes or no": (Bernoulli(), (REALS > 0).double(), 2),
}


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def assert_same(first: Posterior, second: Posterior, tolerance: float = 1e-9) -> None:
    one, other = first.state_dict(), second.state_dict()
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("name", [n for n in dubito.methods() if n not in (*NOISY_ROWS, "bali")])
@pytest.mark.parametrize("kind", ["classes", "reals"])
def test_whole_weights_are_copies_for_every_method(name: str, kind: str) -> None:
    likelihood, targets, outputs = LIKELIHOODS[kind]
    method = dubito.methods()[name]
    weighted = method.fit(network(outputs), (INPUTS, targets, WEIGHTS), likelihood, training=WHOLE)
    copied = method.fit(network(outputs), (INPUTS[COPIES], targets[COPIES]), likelihood, training=WHOLE)
    assert_same(weighted, copied, 1e-8)
    assert [step["nll"] for step in weighted.history] == pytest.approx([step["nll"] for step in copied.history])


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_whole_weights_are_copies_for_every_likelihood(kind: str) -> None:
    """The curvature, the evidence, and noise fitted around a trained network."""
    likelihood, targets, outputs = LIKELIHOODS[kind]
    method = Laplace(structure=KFAC())
    weighted = method.fit(network(outputs), (INPUTS, targets, WEIGHTS), likelihood)
    copied = method.fit(network(outputs), (INPUTS[COPIES], targets[COPIES]), likelihood)
    assert_same(weighted, copied, 1e-3 if kind in ("heavy tails", "counts") else 1e-10)  # LBFGS ends near the least
    assert weighted.num_data == copied.num_data == len(COPIES)
    for name in ("log_likelihood", "squared_errors", "num_values"):
        assert weighted.details[name] == (copied.details[name] and pytest.approx(copied.details[name], rel=1e-6))
    assert weighted.log_marginal_likelihood() == pytest.approx(copied.log_marginal_likelihood(), rel=1e-6)
    updated = [
        posterior.update(data).details
        for posterior, data in ((weighted, (INPUTS, targets, WEIGHTS)), (copied, (INPUTS[COPIES], targets[COPIES])))
    ]
    assert updated[0]["num_data"] == 2 * len(COPIES)
    assert updated[0]["log_likelihood"] == pytest.approx(updated[1]["log_likelihood"], rel=1e-6)


@pytest.mark.parametrize("name", ["mlp", "nested", "shared", "convolutional", "lstm", "attention", "dict"])
@pytest.mark.parametrize("curvature", [GGN(), Empirical()], ids=lambda kind: type(kind).__name__)
def test_statistics_of_all_layers(name: str, curvature: Any) -> None:
    """In every layout, with and without positions, in batches that cut the rows anywhere."""
    case = make(name, ROWS)
    net = case.net.double().eval()
    inputs = map_tensors(lambda t: t.double() if t.is_floating_point() else t, case.inputs)
    names = [n for n, _ in net.named_parameters()]
    covered = find_blocks(net, inputs, names)
    likelihood = Categorical().build(None)
    wanted: dict[str, Any] = {"kronecker": True, "eigenvalues": True, "diagonal": True, "seed": 0}
    rows = WEIGHTS.nonzero().flatten()
    part = Batch(
        map_tensors(lambda t: t[rows], inputs), case.targets[rows], weights=WEIGHTS[rows] / WEIGHTS[rows].mean()
    )
    copies = Batch(map_tensors(lambda t: t[COPIES], inputs), case.targets[COPIES])
    weighted = statistics(net, covered, TensorSource(part), likelihood, curvature, batch_size=4, **wanted)
    copied = statistics(net, covered, TensorSource(copies), likelihood, curvature, batch_size=5, **wanted)
    for block, means in copied.items():
        for field in ("inputs", "gradients", "diagonal", "input_eigenvalues"):
            expected = getattr(means, field)
            if expected is not None:
                torch.testing.assert_close(getattr(weighted[block], field), expected, rtol=1e-9, atol=1e-11)
        if means.eigenvalues is not None:  # vectors of equal eigenvalues may turn
            trace = weighted[block].eigenvalues
            assert trace is not None
            torch.testing.assert_close(trace.sum(), means.eigenvalues.sum(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [*NOISY_ROWS, "batch-ensemble", "mean-field"])
def test_losses_are_linear_in_the_weights(name: str) -> None:
    """With noise per row the loss of a batch is still Σ w_i ℓ_i / B, at the same noise."""
    method = dubito.methods()[name]
    assert isinstance(method, dubito.method.TrainedMethod)
    objective = method.build(network(3), Categorical(), ROWS)

    def nll(weights: Tensor | None) -> Tensor:
        if hasattr(objective, "rows_seen"):
            objective.rows_seen = 0  # pyright: ignore[reportAttributeAccessIssue]
        stream = torch.Generator().manual_seed(3)
        return objective.loss(INPUTS, LABELS, weights=weights, generator=stream).nll.detach()

    nll(None)
    ones = torch.ones(ROWS)
    torch.testing.assert_close(nll(ones), nll(None))
    parts = torch.stack([nll(torch.eye(ROWS)[row]) for row in range(ROWS)])
    torch.testing.assert_close(nll(WEIGHTS), parts @ WEIGHTS, rtol=1e-10, atol=1e-12)


def test_losses_are_linear_where_components_are_mixed_inside_of_the_logarithm() -> None:
    method: Any = replace(dubito.methods()["rank1"], log_mixture=True)  # pyright: ignore[reportCallIssue]
    assert isinstance(method, dubito.method.TrainedMethod)
    objective = method.build(network(3), Categorical(), ROWS)

    def nll(weights: Tensor | None) -> Tensor:
        return objective.loss(INPUTS, LABELS, weights=weights, generator=torch.Generator().manual_seed(3)).nll.detach()

    nll(None)
    parts = torch.stack([nll(torch.eye(ROWS)[row]) for row in range(ROWS)])
    torch.testing.assert_close(parts.sum(), nll(None), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(nll(WEIGHTS), parts @ WEIGHTS, rtol=1e-10, atol=1e-12)


def test_minibatches_estimate_the_weighted_sum_without_bias() -> None:
    """The mean over an epoch's batches is the loss of all rows: Σ w_i ℓ_i / Σ w_i, with the prior over Σ w_i."""
    prepared = prepare(network(3), (INPUTS, LABELS, WEIGHTS), Categorical())
    objective = MAP(prior_std=1.0).objective(prepared)
    batches = list(prepared.source.batches(5))
    losses = [float(objective.batch_loss(batch, 1.0, None).nll.detach()) * len(batch.targets) for batch in batches]
    net = network(3)
    log_probs = net(INPUTS).detach().log_softmax(1)[torch.arange(ROWS), LABELS]
    assert sum(losses) / 10 == pytest.approx(-float((log_probs * WEIGHTS).sum() / WEIGHTS.sum()))
    loss = objective.batch_loss(batches[0], 1.0, None)
    penalty = sum(0.5 * float(p.detach().square().sum()) for p in net.parameters())
    assert float((loss.total - loss.nll).detach()) == pytest.approx(penalty / float(WEIGHTS.sum()))


class Rows(Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor, Tensor]:
        return INPUTS[row], LABELS[row], WEIGHTS[row]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        return ((INPUTS[row], LABELS[row], WEIGHTS[row]) for row in range(ROWS))


FORMS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: TensorDataset(INPUTS, LABELS, WEIGHTS),
    "arrays": lambda: (INPUTS.numpy(), LABELS.numpy(), WEIGHTS.int().numpy()),
    "dataset": Rows,
    "loader": lambda: DataLoader(Rows(), batch_size=64),
    "stream": lambda: DataLoader(Stream(), batch_size=ROWS),
}


@cache
def reference(standardise: bool = False) -> Posterior:
    likelihood = Gaussian(standardise=True) if standardise else Categorical()
    targets = LABELS[:, None].double() if standardise else LABELS
    data = INPUTS[COPIES], targets[COPIES]
    return MAP(prior_std=1.0).fit(network(1 if standardise else 3), data, likelihood, training=WHOLE)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_brings_weights(form: str) -> None:
    data = FORMS[form]()
    fitted = MAP(prior_std=1.0).fit(network(3), data, Categorical(), training=WHOLE)
    assert_same(fitted, reference())
    expected = reference().evaluate((INPUTS[COPIES], LABELS[COPIES]))
    assert fitted.evaluate(data) == pytest.approx(expected, rel=1e-9)
    if isinstance(data, tuple):
        return  # several inputs, for `predict`
    assert torch.equal(fitted.predict(data, 4).probs, fitted.predict(INPUTS, 4).probs)  # pyright: ignore


@pytest.mark.parametrize("form", ["tensors", "dataset", "stream"])
def test_units_of_targets_are_weighted(form: str) -> None:
    fitted = MAP(prior_std=1.0).fit(
        nn.Sequential(nn.Flatten(), network(1)), FORMS[form](), Gaussian(standardise=True), training=WHOLE
    )
    expected = reference(standardise=True).likelihood
    for name in ("location", "scale"):
        torch.testing.assert_close(getattr(fitted.likelihood, name), getattr(expected, name), rtol=1e-12, atol=1e-12)


def test_weights_of_zero_are_no_rows_whatever_the_batches() -> None:
    small, rows = Training(epochs=3, batch_size=4, lr=1e-2), WEIGHTS > 0
    ones = rows.double()
    for data in ((INPUTS, LABELS, ones), TensorDataset(INPUTS, LABELS, ones)):
        assert_same(
            MAP().fit(network(3), data, Categorical(), training=small),
            MAP().fit(network(3), (INPUTS[rows], LABELS[rows]), Categorical(), training=small),
            0.0,
        )


def test_weights_of_one_change_nothing() -> None:
    small, ones = Training(epochs=2, batch_size=5, lr=1e-2), torch.ones(ROWS)
    for method in (MAP(), dubito.methods()["vogn"], Laplace(structure=EFB())):
        plain = method.fit(network(3), (INPUTS, LABELS), Categorical(), training=small)
        assert_same(method.fit(network(3), (INPUTS, LABELS, ones), Categorical(), training=small), plain, 1e-12)


def test_fractions_count_as_parts_of_a_row() -> None:
    """Half of all weights is half of all data: the same fit to the rows, twice the variance from them."""
    whole, half = (
        Laplace(structure=Diagonal(), prior_precision=1.0).fit(network(3), (INPUTS, LABELS, w), Categorical())
        for w in (WEIGHTS, WEIGHTS / 2)
    )
    assert isinstance(half, LaplacePosterior) and isinstance(whole, LaplacePosterior)
    assert half.num_data == whole.num_data / 2 == float(WEIGHTS.sum()) / 2
    assert half.details["log_likelihood"] == pytest.approx(whole.details["log_likelihood"] / 2)
    uneven = prepare(network(3), (INPUTS, LABELS, torch.full((ROWS,), 0.3)), Categorical())
    assert uneven.num_data == pytest.approx(3.6) and uneven.rows == ROWS


def test_class_weights_are_weights_of_rows(tmp_path: Any) -> None:
    classes = (0.5, 2.0, 3.0)
    rows = torch.tensor(classes, dtype=torch.float64)[LABELS]
    likelihood = Categorical(class_weights=classes)
    for method in (MAP(prior_std=1.0), Laplace(structure=INF(rank=0.5)), dubito.methods()["noisy-kfac"]):
        by_class = method.fit(network(3), (INPUTS, LABELS), likelihood, training=WHOLE)
        by_row = method.fit(network(3), (INPUTS, LABELS, rows), Categorical(), training=WHOLE)
        assert_same(by_class, by_row, 1e-10)
        assert by_class.evaluate((INPUTS, LABELS)) == pytest.approx(by_row.evaluate((INPUTS, LABELS)))
    streamed = MAP(prior_std=1.0).fit(network(3), FORMS["stream"](), likelihood, training=WHOLE)
    both = MAP(prior_std=1.0).fit(network(3), (INPUTS, LABELS, rows * WEIGHTS), Categorical(), training=WHOLE)
    assert_same(streamed, both, 1e-10)
    by_class.save(tmp_path / "posterior")
    loaded = load(tmp_path / "posterior", network(3))
    assert loaded.likelihood.settings == likelihood
    tempered = temperature_scaled(loaded, (INPUTS, LABELS))
    assert tempered.likelihood.settings.class_weights == classes  # pyright: ignore


def test_class_weights_of_a_loop_of_ones_own() -> None:
    classes = (0.5, 2.0, 3.0)
    loss = MAP().build(network(3), Categorical(class_weights=classes), ROWS).loss(INPUTS, LABELS)
    losses = nn.functional.cross_entropy(network(3)(INPUTS), LABELS, reduction="none")
    expected = (losses * torch.tensor(classes, dtype=torch.float64)[LABELS]).mean()
    torch.testing.assert_close(loss.nll, expected)


@pytest.mark.parametrize("kind", ["classes", "reals", "yes or no", "counts"])
def test_metrics_are_weighted_means(kind: str) -> None:
    likelihood, targets, outputs = LIKELIHOODS[kind]
    fitted = MAP().fit(network(outputs), (INPUTS, targets), likelihood, training=WHOLE)
    expected = fitted.evaluate((INPUTS[COPIES], targets[COPIES]))
    assert fitted.evaluate((INPUTS, targets, WEIGHTS / 7)) == pytest.approx(expected, rel=1e-9)
    assert expected != pytest.approx(fitted.evaluate((INPUTS, targets)), rel=1e-3)


def test_validation_and_temperatures_are_weighted() -> None:
    fitted = reference()
    weighted = temperature_scaled(fitted, (INPUTS, LABELS, WEIGHTS))
    copied = temperature_scaled(fitted, (INPUTS[COPIES], LABELS[COPIES]))
    temperature: Any = weighted.likelihood.settings
    assert temperature.temperature == pytest.approx(copied.likelihood.settings.temperature, rel=1e-6)  # pyright: ignore
    scores = [
        MAP()
        .fit(network(3), (INPUTS, LABELS), Categorical(), training=WHOLE, validation=rows)
        .history[-1]["validation_nll"]
        for rows in ((INPUTS, LABELS, WEIGHTS), (INPUTS[COPIES], LABELS[COPIES]), (INPUTS, LABELS))
    ]
    assert scores[0] == pytest.approx(scores[1]) != pytest.approx(scores[2])


def test_the_energy_of_chains() -> None:
    weighted, copied = (
        Target(prepare(network(3), data, Categorical()), 1.0)
        for data in ((INPUTS, LABELS, WEIGHTS), (INPUTS[COPIES], LABELS[COPIES]))
    )
    start = weighted.start(torch.Generator().manual_seed(0))
    torch.testing.assert_close(weighted.energy(start), copied.energy(start))


BAD: dict[str, tuple[Any, str]] = {
    "negative": (torch.tensor([1.0] * 11 + [-0.5]), "weights must be finite and at least 0, got -0.5 at row 11"),
    "NaN": (torch.tensor([math.nan] + [1.0] * 11), "got nan at row 0"),
    "infinite": (torch.tensor([1.0, math.inf] + [1.0] * 10), "got inf at row 1"),
    "short": (torch.ones(11), r"one real number per row, \[12\]"),
    "a column": (torch.ones(12, 1), r"one real number per row, \[12\]"),
    "words": (["a"] * 12, "must hold numbers"),
    "nothing": (torch.zeros(12), "with a sum above it, got a sum of 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_weights_that_are_none_are_refused_before_work_starts(name: str) -> None:
    weights, message = BAD[name]
    fitted = reference()
    laplace = Laplace(structure=Diagonal())
    for use in (
        lambda: laplace.fit(network(3), (INPUTS, LABELS, weights), Categorical()),
        lambda: MAP().fit(
            network(3), (INPUTS, LABELS), Categorical(), training=WHOLE, validation=(INPUTS, LABELS, weights)
        ),
        lambda: fitted.evaluate((INPUTS, LABELS, weights)),
    ):
        with pytest.raises(DataError, match=message):
            use()


def test_weights_of_datasets_are_read_before_work_starts() -> None:
    weights = torch.ones(ROWS)
    weights[-1] = -1
    rows = [(INPUTS[row], LABELS[row], weights[row]) for row in range(ROWS)]
    with pytest.raises(DataError, match=r"got -1\.0 at row 11"):
        prepare(network(3), DataLoader(rows, batch_size=4), Categorical())  # pyright: ignore


def test_what_cannot_be_weighed_says_so() -> None:
    with pytest.raises(ConfigError, match="BALI normalises the gradients"):
        BALI().fit(network(3), (INPUTS, LABELS, WEIGHTS), Categorical(), training=WHOLE)
    with pytest.raises(NetworkError, match="as many numbers as the network has outputs, got 2"):
        MAP().fit(network(3), (INPUTS, LABELS), Categorical(class_weights=(1.0, 2.0)), training=WHOLE)
    with pytest.raises(ConfigError, match=r"class_weights\[1\] must be a finite number of at least 0, got -1"):
        Categorical(class_weights=(1.0, -1.0))
    with pytest.raises(ConfigError, match="sum above 0"):
        Categorical(class_weights=(0.0, 0.0))


def test_rows_kept_back_by_the_protocol_have_their_weights() -> None:
    from dubito.protocol.run import _parted
    from dubito.training.auto import AutoTraining

    many = torch.arange(60).remainder(ROWS)
    data = INPUTS[many], LABELS[many], WEIGHTS[many] + 1
    prepared = prepare(network(3), data, Categorical())
    parted = _parted(prepared, AutoTraining())
    held = parted.run.validation
    assert held is not None and held.total_weight is not None
    assert parted.num_data + held.total_weight == pytest.approx(prepared.num_data)
    for source in (parted.source, held):
        weights = [batch.weights for batch in source.batches(7) if batch.weights is not None]
        assert float(torch.cat(weights).mean()) == pytest.approx(1.0)


def test_poisson_rates_of_exposed_rows_are_the_weighted_mean() -> None:
    """A constant network has its closed form: the rate is Σ w y / Σ w."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.rate.expand(len(x), 1)

    counts = LABELS[:, None].double() + 1
    long = Training(epochs=400, batch_size=64, lr=3e-2)
    fitted = MAP(prior_std=None).fit(Constant(), (INPUTS, counts, WEIGHTS), Poisson(), training=long)
    expected = (counts[:, 0] * WEIGHTS).sum() / WEIGHTS.sum()
    assert float(fitted.predict(INPUTS[:1]).mean) == pytest.approx(float(expected), rel=1e-3)  # pyright: ignore


def test_rows_that_weigh_nothing_count_nowhere() -> None:
    """Neither in means over infinite losses, nor where a temperature is smoothed, nor in stacking."""
    assert weighted_mean(torch.tensor([math.inf, 2.0]), torch.tensor([0.0, 3.0])) == 2
    logs = -torch.rand(3, 20, generator=torch.Generator().manual_seed(0))
    weights = torch.ones(20)
    weights[:8] = 0
    assert stacking_weights(logs, weights) == pytest.approx(stacking_weights(logs[:, 8:]))
    repeated = torch.cat([logs, logs[:, :5]], 1)
    weights = torch.ones(20)
    weights[:5] = 2
    assert stacking_weights(logs, weights) == pytest.approx(stacking_weights(repeated))
    torch.manual_seed(0)
    inputs, labels = torch.randn(60, 3), torch.randint(2, (60,))
    posterior = MAP().fit(nn.Linear(3, 2), (inputs, labels), Categorical(), training=Training(epochs=40, lr=0.1))
    weights = torch.ones(60)
    weights[:30] = 0
    heeded = temperature_scaled(posterior, (inputs, labels, weights), smoothed=True)
    alone = temperature_scaled(posterior, (inputs[30:], labels[30:]), smoothed=True)
    assert heeded.likelihood.settings.temperature == pytest.approx(alone.likelihood.settings.temperature, rel=1e-3)
