"""What `Laplace()` means: the exact curvature, linearised predictions, a prior precision by validation rows."""

import math

import pytest
import torch
from laplace_reference import categorical_hessian, labels, layers, mlp, normal
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dubito
from dubito import EFB, GGN, INF, KFAC, Categorical, DataError, Diagonal, Fisher, Gaussian, Laplace, Training
from dubito.errors import ConfigError, DubitoWarning
from dubito.inference.laplace import validation
from dubito.inference.laplace.tuning import HIGHEST

# Networks here start from random weights: Laplace rightly says that they have not learned anything.
pytestmark = pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")
every_structure = pytest.mark.parametrize("structure", [Diagonal(), KFAC(), EFB(), INF(rank=4)], ids=str)


def trained(outputs: int, steps: int = 60) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network that has learned something, and its rows: real targets are its first outputs and noise."""
    torch.manual_seed(0)
    network, inputs = mlp(outputs), normal(40, 4)
    truth = inputs @ normal(4, outputs, seed=3)
    optimizer = torch.optim.Adam(network.parameters(), 0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        (network(inputs) - truth).square().mean().backward()
        optimizer.step()
    return network, inputs, truth.detach()


def noisy(truth: Tensor, seed: int) -> Tensor:
    return truth + 0.4 * normal(*truth.shape, seed=seed)


def classes_of(truth: Tensor, seed: int) -> Tensor:
    return noisy(truth, seed).argmax(1)


KINDS = {"classes": (Categorical(), 3, classes_of, 0.01), "reals": (Gaussian(std=0.4), 2, noisy, 0.03)}


def rows_of(kind: str, count: int = 25):
    likelihood, outputs, targets, margin = KINDS[kind]
    network, inputs, known = trained(outputs)
    more = 1.5 * normal(count, 4, seed=7)
    # Classes of the truth, but reals of the network itself: they have no use for any width.
    truth = more @ normal(4, outputs, seed=3) if kind == "classes" else network(more).detach()
    held = more, targets(truth, 9)
    return network, (inputs, targets(known, 8)), likelihood, held, margin


# -- curvature and predictions --------------------------------------------------------------------------------------


def test_the_default_is_kfac_of_the_exact_curvature() -> None:
    network, inputs = mlp(), normal(20, 4)
    posterior = Laplace(prior_precision=0.7).fit(network, (inputs, labels(20)), Categorical())
    assert posterior.method == Laplace(structure=KFAC(), curvature=GGN(), prior_precision=0.7)
    for name, layer in layers(network, inputs, categorical_hessian).items():
        (expected,) = layer.precision(KFAC(), 20, 0.7)
        torch.testing.assert_close(posterior.block(name).precision_matrix, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("network", "curvature"),
    [
        (nn.Linear(4, 32), GGN()),
        (nn.Linear(4, 33), Fisher(draws=10)),
        (nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4))), Fisher(draws=10)),
    ],
    ids=["few", "many", "positions"],
)
def test_labels_are_drawn_where_outputs_are_many_or_at_positions(network: nn.Module, curvature) -> None:
    inputs = normal(12, 4).float()
    shape = network(inputs[:1]).shape[2:]
    targets = torch.zeros(12, *shape, dtype=torch.long)
    assert Laplace().fit(network, (inputs, targets), Categorical()).method.curvature == curvature


def test_predictions_are_linearised_and_the_number_of_samples_means_nothing() -> None:
    network, data, likelihood, held, _ = rows_of("classes")
    posterior = Laplace().fit(network, data, likelihood)
    closed = posterior.predict(held[0], linearised=True).probs
    assert posterior.predict(held[0]).probs.equal(closed)
    assert posterior.predict(held[0], num_samples=3).probs.equal(closed)
    drawn = posterior.predict(held[0], linearised=False).probs
    folded = [posterior.fold(index)(held[0]).softmax(-1) for index in range(32)]
    torch.testing.assert_close(drawn, torch.stack(folded).mean(0).detach())


def test_registered_methods_have_these_defaults() -> None:
    for name, structure in (("diag", Diagonal()), ("kfac", KFAC()), ("efb", EFB()), ("inf", INF())):
        assert dubito.methods()[f"laplace-{name}"] == Laplace(structure=structure)


# -- the prior precision --------------------------------------------------------------------------------------------


@every_structure
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_posteriors_fitted_one_by_one(structure, kind: str) -> None:
    network, data, likelihood, held, margin = rows_of(kind)
    start = Laplace(structure=structure).fit(network, data, likelihood).prior_precision
    posterior = Laplace(structure=structure).fit(network, data, likelihood, validation=held)
    choice = posterior.details["precision_choice"]
    grid = [start * 10 ** (power / 2) for power in range(11)]
    centre = dubito.MAP().fit(network, data, likelihood, training=Training(iterations=1, lr=1e-30))
    at_centre = centre.predict(held[0]).log_prob(held[1])
    passed, shares = [], []
    for precision in grid:
        fitted = Laplace(structure=structure, prior_precision=precision).fit(network, data, likelihood)
        prediction = fitted.predict(held[0])
        loss = at_centre - prediction.log_prob(held[1])
        index = len(passed)
        if index < len(choice["grid"]):
            assert math.isclose(choice["grid"][index], precision)
            assert math.isclose(choice["losses"][index], float(loss.mean()), rel_tol=1e-6, abs_tol=1e-9)
            error = float(loss.std() / len(loss) ** 0.5)
            assert math.isclose(choice["standard_errors"][index], error, rel_tol=1e-6, abs_tol=1e-9)
        parts = prediction.epistemic.sum(0), prediction.aleatoric.sum(0)
        shares.append(float((parts[0] / (parts[0] + parts[1])).mean()))
        passed.append(float(loss.mean() + loss.std() / len(loss) ** 0.5) <= margin)
    first = passed.index(True)
    assert 0 < first < 10  # the weights' own precision is too wide here, and something is left
    assert posterior.prior_precision == choice["taken"] == pytest.approx(grid[first])
    assert choice["share"] == pytest.approx(shares[first])
    assert choice["no_uncertainty"] == (shares[first] < 0.01)
    # A precision of INF is a factorisation: none is judged beyond the first that passes.
    assert len(choice["grid"]) == (first + 1 if isinstance(structure, INF) else 11)


@every_structure
def test_rescaled_distributions_are_those_built_anew(structure) -> None:
    network, data, likelihood, _, _ = rows_of("classes")
    posterior = Laplace(structure=structure, prior_precision=0.3).fit(network, data, likelihood)
    anew = Laplace(structure=structure, prior_precision=5.0).fit(network, data, likelihood)
    for name in posterior.blocks:
        (wide,), (built,) = posterior.normals(name), anew.normals(name)
        facts = ("covariance_matrix", "variance", "precision_logdet", "num_determined", "relative_logdet")
        for fact in facts:
            getattr(wide, fact)  # what is stored at the first prior must not be met again
        other = wide.rescaled(num_data=posterior.num_data, prior_precision=5.0)
        for fact in facts:
            torch.testing.assert_close(getattr(other, fact), getattr(built, fact), rtol=1e-12, atol=1e-14)


@every_structure
def test_draws_and_densities_are_under_the_chosen_precision(structure) -> None:
    network, data, likelihood, held, _ = rows_of("classes")
    chosen = Laplace(structure=structure).fit(network, data, likelihood, validation=held)
    plain = Laplace(structure=structure, prior_precision=chosen.prior_precision).fit(network, data, likelihood)
    for linearised in (True, False):
        ours, theirs = (p.predict(held[0], linearised=linearised).probs for p in (chosen, plain))
        assert ours.equal(theirs)
    for name in plain.blocks:
        assert chosen.block(name).precision_matrix.equal(plain.block(name).precision_matrix)


@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")  # of a network that has learned nothing
@pytest.mark.parametrize("structure", [KFAC(), INF(rank=2)], ids=str)
def test_weights_near_0_have_the_narrowest_prior(structure) -> None:
    """The precision of the weights themselves is beyond all that a prior may have."""
    network, inputs = mlp(1), normal(40, 4)
    with torch.no_grad():
        for weight in network[-1].parameters():
            weight.mul_(1e-6)
    rows = inputs, inputs.sum(1, keepdim=True)
    posterior = Laplace(structure=structure, subset=dubito.last_layer).fit(network, rows, Gaussian(), validation=rows)
    assert posterior.prior_precision == HIGHEST


def test_uncertainty_that_helps_is_kept() -> None:
    # Least squares of few rows: the exact posterior predicts better than its mean.
    inputs, held = normal(12, 6), normal(300, 6, seed=5)
    weights = normal(6, 1, seed=2)
    network = nn.Linear(6, 1, bias=False).double()
    targets = inputs @ weights + 0.5 * normal(12, 1, seed=3)
    network.weight.data = torch.linalg.lstsq(inputs, targets).solution.mT
    rows = held, held @ weights + 0.5 * normal(300, 1, seed=4)
    posterior = Laplace().fit(network, (inputs, targets), Gaussian(std=0.5), validation=rows)
    choice = posterior.details["precision_choice"]
    assert posterior.prior_precision == pytest.approx(1 / float(network.weight.detach().square().mean()))
    assert choice["losses"][0] < 0 and choice["share"] > 0.2 and not choice["no_uncertainty"]
    assert f"{choice['share']:.1%} of their uncertainty epistemic" in str(posterior.summary())


def test_uncertainty_that_costs_is_the_last_to_go_and_said() -> None:
    # Nothing is known of the slope but that it is right: at far rows every width of the grid is too wide.
    network = nn.Linear(1, 1, bias=False).double()
    network.weight.data.fill_(1.0)
    inputs, held = 1e-3 * normal(30, 1), 1e3 * normal(30, 1, seed=5)
    data, rows = (inputs, inputs), (held, held + 1e-3 * normal(30, 1, seed=6))
    with pytest.warns(DubitoWarning, match="its weights get no uncertainty; give more validation rows"):
        posterior = Laplace().fit(network, data, Gaussian(std=1e-3), validation=rows)
    choice = posterior.details["precision_choice"]
    assert posterior.prior_precision == HIGHEST and choice["no_uncertainty"] and choice["share"] == 0
    assert "no uncertainty about weights" in str(posterior.summary())
    assert min(choice["losses"]) > 0.03


def test_a_share_below_one_percent_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    network, data, likelihood, held, _ = rows_of("classes")
    monkeypatch.setattr(validation, "CLASSES_MARGIN", 1e-5)
    choice = Laplace().fit(network, data, likelihood, validation=held).details["precision_choice"]
    assert choice["no_uncertainty"] and 0 < choice["share"] < 0.01


def test_rows_may_come_in_any_form_and_batches() -> None:
    network, data, likelihood, held, _ = rows_of("reals")
    loader = DataLoader(TensorDataset(*held), batch_size=4, shuffle=True)
    whole, batches = (Laplace().fit(network, data, likelihood, validation=v) for v in (held, loader))
    ours, theirs = (p.details["precision_choice"] for p in (whole, batches))
    assert ours.keys() == theirs.keys() and whole.prior_precision == batches.prior_precision
    for key in ("losses", "standard_errors", "shares"):
        assert ours[key] == pytest.approx(theirs[key])


def test_a_map_fit_with_validation_rows_ends_in_the_same_choice() -> None:
    network, data, likelihood, held, _ = rows_of("classes")
    training = Training(iterations=20, batch_size=10, lr=1e-2)
    both = Laplace().fit(network, data, likelihood, training=training, validation=held)
    point = dubito.MAP(prior_std=1.0).fit(network, data, likelihood, training=training, validation=held)
    after = Laplace().fit(point.fold().requires_grad_(), data, likelihood, validation=held)
    assert both.details["precision_choice"] == after.details["precision_choice"]


def test_the_choice_is_stored_and_forgotten_where_the_evidence_chooses(tmp_path) -> None:
    network, data, likelihood, held, _ = rows_of("classes")
    posterior = Laplace().fit(network, data, likelihood, validation=held)
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = dubito.load(tmp_path / "posterior.safetensors", mlp())
    assert loaded.details["precision_choice"] == posterior.details["precision_choice"]
    assert "validation rows" in str(loaded.summary())
    tuned = posterior.tuned()
    assert tuned.details["precision_choice"] is None and "validation rows" not in str(tuned.summary())
    kept = posterior.tuned(prior=False, validation=held)
    assert kept.details["precision_choice"] == posterior.details["precision_choice"]


def test_refusals() -> None:
    network, data, likelihood, held, _ = rows_of("classes")
    given = Laplace(prior_precision=2.0).fit(network, data, likelihood, validation=held)
    assert given.prior_precision == 2.0 and "precision_choice" not in given.details
    with pytest.raises(DataError, match="takes 2 rows or more that the network gives a finite likelihood, got 1"):
        Laplace().fit(network, data, likelihood, validation=(held[0][:1], held[1][:1]))
    with pytest.raises(ConfigError, match=r"curvature must be Fisher\(\), GGN\(\) or Empirical\(\)"):
        Laplace(curvature="ggn")  # pyright: ignore
