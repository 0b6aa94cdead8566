"""The prior by marginal likelihood in training: closed forms of linear models, the best turn, checkpoints."""

import json
import math
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import dubito
from dubito import (
    KFAC,
    Around,
    Categorical,
    ConfigError,
    Diagonal,
    Empirical,
    Gaussian,
    Laplace,
    OnlineEvidence,
    StudentT,
    Training,
)
from dubito.training import EarlyStopping
from dubito.training.steps import GradientStepper

ROWS, WIDTH = 60, 5


def linear_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a linear model with noise 0.5."""
    stream = torch.Generator().manual_seed(0)
    inputs, noise = (torch.randn(ROWS, size, generator=stream, dtype=torch.float64) for size in (WIDTH, 1))
    weights = 0.7 * torch.randn(WIDTH, 1, generator=stream, dtype=torch.float64)
    return inputs, inputs @ weights + 0.5 * noise


def closed_form(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float, float]:
    """The τ and σ of the largest evidence log N(y | 0, σ² + X Xᵀ / τ), and that evidence, by L-BFGS on its density."""
    logs = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # log τ, log σ²
    optimizer = torch.optim.LBFGS([logs], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def evidence() -> torch.Tensor:
        covariance = logs[1].exp() * torch.eye(ROWS, dtype=torch.float64) + inputs @ inputs.T / logs[0].exp()
        return MultivariateNormal(torch.zeros(ROWS, dtype=torch.float64), covariance).log_prob(targets[:, 0])

    def loss() -> float:
        optimizer.zero_grad()
        value = -evidence()
        value.backward()
        return value.item()

    optimizer.step(loss)
    return math.exp(logs[0].item()), math.exp(logs[1].item() / 2), evidence().item()


def linear_fit(**settings):
    training = Training(epochs=250, batch_size=ROWS, lr=0.05)
    net = nn.Linear(WIDTH, 1, bias=False).double()
    with torch.no_grad():
        net.weight.fill_(0.1)
    method = Laplace(structure=KFAC(), evidence=OnlineEvidence(**settings))  # exact for one output
    return method.fit(net, linear_rows(), Gaussian(), training=training)


@pytest.mark.parametrize("settings", [{}, {"per_layer": True, "every": 10, "burn_in": 20}], ids=str)
def test_a_linear_model_reaches_the_largest_evidence_in_closed_form(settings) -> None:
    precision, std, evidence = closed_form(*linear_rows())
    posterior = linear_fit(**settings)
    assert posterior.prior_precision == pytest.approx(precision, rel=0.01)
    assert posterior.likelihood.std().item() == pytest.approx(std, rel=0.01)
    assert posterior.log_marginal_likelihood() == pytest.approx(evidence, abs=1e-3)


def test_turns_come_when_they_should_and_move_no_further_than_a_step() -> None:
    posterior = linear_fit(every=7, burn_in=20, step=0.05)
    turns = posterior.details["evidence"]
    assert turns["steps"] == [*range(27, 250, 7), 250] and turns["epochs"] == 250
    (name,) = posterior.blocks
    logs = [0.0, *(math.log(precisions[name]) for precisions in turns["precisions"])]
    moves = [abs(b - a) for a, b in pairwise(logs)]
    assert max(moves) <= 0.05 + 1e-12
    assert turns["best"] == turns["values"].index(max(turns["values"]))


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def classes() -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(1)
    inputs = torch.randn(48, 4, generator=stream, dtype=torch.float64)
    return inputs, inputs[:, :3].argmax(1)


def problem(kind: str) -> tuple:
    """Rows and a likelihood; reals have two outputs with noise of different sizes."""
    inputs, labels = classes()
    if kind == "classes":
        return network(), (inputs, labels), Categorical()
    stream = torch.Generator().manual_seed(2)
    noise = torch.randn(48, 3, generator=stream, dtype=torch.float64) * torch.tensor([0.1, 1.0, 3.0])
    return network(), (inputs, inputs[:, :3].sin() + noise), Gaussian(standardise=kind == "standardised")


@pytest.mark.parametrize("structure", [KFAC(), Diagonal()], ids=str)
@pytest.mark.parametrize("kind", ["classes", "reals", "standardised"])
def test_the_posterior_is_that_of_the_best_turn(kind, structure, tmp_path) -> None:
    net, rows, likelihood = problem(kind)
    method = Laplace(structure=structure, evidence=OnlineEvidence(every=2, per_layer=True))
    training = Training(epochs=9, batch_size=16, lr=0.05)
    posterior = method.fit(net, rows, likelihood, training=training)
    turns = posterior.details["evidence"]
    assert len(turns["values"]) == 5 and len({*turns["precisions"][-1].values()}) == len(posterior.blocks) > 1
    # The weights, the noise and the prior that are kept have the evidence that was kept.
    assert posterior.log_marginal_likelihood() == pytest.approx(max(turns["values"]), rel=1e-9)
    assert posterior.prior_precisions == turns["precisions"][turns["best"]]
    if kind != "classes":
        residuals = rows[1] - posterior.likelihood.restored(posterior.network(rows[0]))
        ratios = posterior.likelihood.std() / residuals.square().mean(0).sqrt()
        # In proportion to the residuals of every output, and larger: weights that are determined cost rows.
        torch.testing.assert_close(ratios, ratios[:1].expand(3), rtol=1e-6, atol=0)
        assert ratios[0] > 1
    posterior.save(tmp_path / "file")
    loaded = dubito.load(tmp_path / "file", network())
    assert loaded.details["evidence"] == turns and loaded.method == posterior.method


def test_the_weights_are_the_most_probable_under_the_last_prior() -> None:
    inputs, targets = linear_rows()
    posterior = linear_fit()
    ratio = posterior.prior_precision * posterior.likelihood.std().item() ** 2
    # (XᵀX + τσ²) w = Xᵀy
    gram = inputs.T @ inputs + ratio * torch.eye(WIDTH, dtype=torch.float64)
    expected = torch.linalg.solve(gram, inputs.T @ targets)
    torch.testing.assert_close(posterior.network.weight.T, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("at", [2, 10, 20])
@pytest.mark.parametrize("kind", ["classes", "reals"])
def test_an_interrupted_run_goes_on(monkeypatch, tmp_path, kind, at) -> None:
    training = Training(epochs=9, batch_size=16, lr=0.05, checkpoint_minutes=0)
    method = Laplace(structure=KFAC(), evidence=OnlineEvidence(every=2, per_layer=True))
    whole = method.fit(*problem(kind), training=training, seed=3)
    step = GradientStepper.step

    def broken(self, number, *rest):
        if number == at:
            raise KeyboardInterrupt
        return step(self, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(GradientStepper, "step", broken)
        with pytest.raises(KeyboardInterrupt):
            method.fit(*problem(kind), training=training, seed=3, checkpoint=tmp_path / "c")
    resumed = method.fit(*problem(kind), training=training, seed=3, checkpoint=tmp_path / "c")
    assert resumed.details["evidence"] == whole.details["evidence"]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


class Augmented(torch.utils.data.Dataset):
    """Rows with noise from the global generator, as augmentation has it."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.tensor([row / 24 - 1, (row % 7) / 7, 1.0])
        return inputs + 0.3 * torch.randn(3), inputs[:1].sin()


def test_an_interrupted_run_on_augmented_rows_goes_on_to_the_same_turns(monkeypatch, tmp_path) -> None:
    training = Training(epochs=6, batch_size=16, lr=0.05, checkpoint_minutes=0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    fit = partial(Laplace(evidence=OnlineEvidence(every=2)).fit, net, Augmented(), Gaussian(), training=training)
    whole, step = fit(), GradientStepper.step

    def broken(self, number, *rest):
        if number == 9:
            raise KeyboardInterrupt
        return step(self, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(GradientStepper, "step", broken)
        with pytest.raises(KeyboardInterrupt):
            fit(checkpoint=tmp_path / "c")
    resumed = fit(checkpoint=tmp_path / "c")
    assert resumed.details["evidence"] == whole.details["evidence"]
    assert resumed.log_marginal_likelihood() == whole.log_marginal_likelihood()


def test_learned_noise_of_other_likelihoods_is_judged_as_it_is_kept() -> None:
    inputs, targets = linear_rows()
    method = Laplace(evidence=OnlineEvidence(every=1))
    posterior = method.fit(
        nn.Linear(WIDTH, 1).double(), (inputs, targets), StudentT(), training=Training(epochs=4, lr=0.02)
    )
    best = max(posterior.details["evidence"]["values"])
    assert posterior.log_marginal_likelihood() == pytest.approx(best, rel=1e-9)


def test_refusals() -> None:
    net, rows, likelihood = problem("classes")
    method = Laplace(evidence=OnlineEvidence())
    with pytest.raises(ConfigError, match="give training="):
        method.fit(net, rows, likelihood)
    stopping = Training(epochs=2, early_stopping=EarlyStopping())
    with pytest.raises(ConfigError, match="leave one of them out"):
        method.fit(net, rows, likelihood, training=stopping, validation=rows)
    with pytest.raises(ConfigError, match="leave out prior="):
        Laplace(evidence=OnlineEvidence(), curvature=Empirical())
    with pytest.raises(ConfigError, match="leave out prior="):
        Laplace(evidence=OnlineEvidence(), prior=Around(net, std=1.0))
    with pytest.raises(ConfigError, match="every"):
        OnlineEvidence(every=0)


@pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_the_end_is_that_of_laplace_torch(task) -> None:
    """From the same start and rows (benchmarks/peers_evidence.py), under the diagonal, which both define alike."""
    file = Path(__file__).parents[2] / "benchmarks" / "results" / "peers_evidence.json"
    stored = json.loads(file.read_text(encoding="utf-8"))
    kept = stored["networks"][task]
    theirs, sizes = kept["answers"]["diag"], {"regression": (2, 16, 1), "classification": (2, 12, 8, 3)}[task]
    layers = [part for sides in pairwise(sizes) for part in (nn.Linear(*sides), nn.Tanh())][:-1]
    net = nn.Sequential(*layers).double()
    net.load_state_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in kept["start"].items()})
    targets = torch.tensor(kept["y"], dtype=torch.float64 if task == "regression" else torch.long)
    posterior = Laplace(structure=Diagonal(), evidence=OnlineEvidence()).fit(
        net,
        (torch.tensor(kept["x"], dtype=torch.float64), targets),
        Gaussian() if task == "regression" else Categorical(),
        training=Training(epochs=700, batch_size=len(targets), lr=stored["lr"]),
    )
    assert posterior.log_marginal_likelihood() == pytest.approx(theirs["log_marginal_likelihood"], abs=0.02)
    if task == "classification":
        assert posterior.prior_precision == pytest.approx(theirs["prior_precision"], rel=0.01)
    else:  # both give the weights up: the likeliest network under this structure is a constant
        assert posterior.likelihood.std().item() == pytest.approx(theirs["noise"], rel=0.01)
        assert min(posterior.prior_precision, theirs["prior_precision"]) > 100
