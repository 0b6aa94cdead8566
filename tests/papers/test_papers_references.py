"""References: ranks against an exact posterior, R-hat against known chains, rows kept back, and rehearsals of cells."""

import math

import numpy as np
import pytest
import torch

from dubito import Gaussian, methods
from dubito.fitting import prepare
from dubito.inference.hmc.target import Target
from dubito.models import mlp
from papers.references import calibration, gap, hmc
from papers.references.hmc_chains import Chains, Network, run_chains
from papers.references.hmc_methods import OTHER_PRIOR, SAME_PRIOR
from papers.runner.experiment import Cell
from papers.runner.gap import GAP_SPLITS, divided

pytestmark = [
    pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")  # after two steps networks rightly make some warn
]


# -- rows -------------------------------------------------------------------------------------------------------


def test_every_row_has_one_purpose_and_a_tenth_of_those_around_the_gap_is_kept_back():
    inside = np.arange(40, 70)
    rows = divided(100, inside, 0.1)
    assert sorted(np.concatenate(rows)) == list(range(100))
    assert len(rows.outside) == 7 and set(rows.inside) == set(inside)
    again = divided(100, inside, 0.1)
    assert np.array_equal(rows.outside, again.outside) and np.any(np.diff(rows.outside) > 1)
    assert len(divided(100, inside, 0.0).outside) == 0


def test_all_83_splits_are_run_and_naval_without_a_gap_stands_apart():
    assert sum(GAP_SPLITS.values()) == 83 and len(GAP_SPLITS) == 9
    assert sum(map(len, gap.COLUMNS.values())) == 83
    assert sorted(gap.COLUMNS["naval"] + gap.COLUMNS["naval-no-gap"]) == list(range(16))
    assert {data for claim in gap.TABLES[0].claims for data in claim.data} == set(GAP_SPLITS)


def test_methods_of_a_split_see_the_same_rows(monkeypatch):
    """Rows to train on are limited by the split's number, rows to judge on by none."""
    seen = {}

    def fit(point, method, rows, auto, seed):
        seen[type(method).__name__] = rows
        return point

    monkeypatch.setattr(gap, "fit_from", fit)
    for name in ("map", "swag", "mean-field"):
        cell = Cell("protein", name, split=2)
        settings = gap.GapFit(**{**vars(gap.settings_of(name)), "train_rows": 20, "validation_rows": 9})
        gap.run_cells([cell], [gap.generate_cell(cell)], settings, 2)
    first, *others = seen.values()
    assert len(first.train.targets) == 20 and len(first.validation.targets) == 9 and len(others) == 2
    for rows in others:
        assert torch.equal(rows.train.inputs, first.train.inputs)
        assert torch.equal(rows.validation.inputs, first.validation.inputs)


@pytest.mark.parametrize("name", ["map", "deep-ensemble", "bali", "laplace-inf"])
def test_cells_of_the_gaps_run_on_made_up_rows(name):
    cell = Cell("naval-no-gap", name, split=1)
    (outcome,) = gap.EXPERIMENT.run([cell], [gap.generate_cell(cell)], gap.EXPERIMENT.settings("paper", cell), 2)
    assert {metric.name for metric in gap.TABLES[0].metrics} <= outcome.metrics.keys()
    assert all(math.isfinite(value) for value in outcome.metrics.values())
    assert outcome.details["column"] == 11


# -- chains -----------------------------------------------------------------------------------------------------


def autoregressive(correlation: float, chains: int = 4, length: int = 4000) -> torch.Tensor:
    stream = torch.Generator().manual_seed(1)
    noise = torch.randn(chains, length, 3, generator=stream, dtype=torch.float64)
    values = [noise[:, 0]]
    for step in range(1, length):
        values.append(correlation * values[-1] + math.sqrt(1 - correlation**2) * noise[:, step])
    return torch.stack(values, 1)


@pytest.mark.parametrize("correlation", [0.0, 0.6, 0.9])
def test_effective_sizes_are_those_of_autoregressive_chains(correlation):
    """n / τ with τ = (1 + ρ) / (1 − ρ); an estimate from n draws has a relative standard error of about √(10 τ / n)."""
    r_hat, size = hmc.ranked_diagnostics(autoregressive(correlation))
    time = (1 + correlation) / (1 - correlation)
    assert size == pytest.approx(16_000 / time, rel=3 * math.sqrt(10 * time / 16_000))
    assert 0.999 < r_hat < 1.01


def test_r_hat_sees_chains_that_differ_in_place_in_spread_or_by_outliers_alone():
    values = autoregressive(0.0, length=500)
    moved, wider = values.clone(), values.clone()
    moved[0] += 0.7
    wider[0] *= 3
    assert hmc.ranked_diagnostics(moved)[0] > 1.02
    assert hmc.ranked_diagnostics(wider)[0] > 1.02  # same centre: plain R-hat is blind to it
    assert hmc.diagnostics(wider)[0] < 1.01
    monotone = values.sinh().sinh()  # heavy tails, same ranks
    assert hmc.ranked_diagnostics(monotone)[1] == pytest.approx(hmc.ranked_diagnostics(values)[1])


def test_chains_that_disagree_are_no_reference():
    short = Chains(chains=2, warmup=8, draws=8, most_steps=1)
    reference = hmc.Reference(noise=0.1, chains=short, hidden=2)
    with pytest.raises(hmc.TrainingError, match="run 0 of the chains on yacht is no reference: R-hat is"):
        hmc.chains_of("yacht", hmc.generate_cell(Cell("yacht", "hmc")), reference, 0, None)


def test_chains_draw_from_a_normal_law_whose_covariance_is_known():
    stream = torch.Generator().manual_seed(0)
    root = torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.3, 0.0], [0.0, 0.05, 0.1]]).double()
    covariance, mean = root @ root.T, torch.tensor([3.0, -1.0, 0.5]).double()
    precision = covariance.inverse()

    def energies(places: torch.Tensor) -> torch.Tensor:
        return 0.5 * ((places - mean) @ precision * (places - mean)).sum(1)

    start = torch.randn(16, 3, generator=stream).double()
    run = run_chains(energies, start, Chains(chains=16, warmup=200, draws=300), stream)
    draws = run.draws.flatten(0, 1)
    r_hat, size = hmc.ranked_diagnostics(run.draws)
    assert r_hat < 1.02 and size > 500 and run.divergent == 0 and 0.6 < run.acceptance < 0.98
    deviations = covariance.diagonal().sqrt()
    assert ((draws.mean(0) - mean).abs() < 4 * deviations / size**0.5).all()
    units = deviations[:, None] * deviations
    assert ((draws.T.cov() - covariance).abs() < 4 * 2**0.5 * units / size**0.5).all()


def test_energies_of_chains_are_those_of_the_library():
    rows, net = hmc.generate_cell(Cell("yacht", "hmc")).train, mlp(3, [4], num_classes=1, seed=1).double()
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    target = Target(prepare(net, rows, Gaussian(std=0.2)), 0.3)
    together = torch.stack([weights, 2 * weights])
    ours = Network(3, 4).energies(together, rows, 0.2, 0.3)
    theirs = torch.stack([target.energy(vector) for vector in together])
    torch.testing.assert_close(ours[0] - ours[1], theirs[0] - theirs[1])  # up to a constant
    torch.testing.assert_close(Network(3, 4).functions(together, rows.inputs)[0], net(rows.inputs)[:, 0])


def test_all_methods_are_held_against_one_posterior():
    """Same prior and noise in every cell of a table, no early stopping, no colder divergence."""
    assert len(SAME_PRIOR) >= 10 and {*SAME_PRIOR, *OTHER_PRIOR} <= set(methods())
    for (data, name), variant in hmc.EXPERIMENT.scales["paper"].variants.items():
        settings = variant.settings
        assert settings.reference == hmc.settings_of(data, "hmc").reference
        if settings.training is not None:
            assert settings.training.early_stopping is None and settings.training.kl.weight == 1
        if name in SAME_PRIOR:
            method = settings.method
            std = getattr(method, "prior_std", None) or method.prior_precision**-0.5
            assert std == pytest.approx(0.3) and getattr(method, "kl_weight", 1) == 1


@pytest.mark.parametrize("name", hmc.METHODS)
def test_cells_against_chains_run_on_made_up_rows(name):
    cell = Cell("yacht", name)
    settings = hmc.EXPERIMENT.settings("paper", cell)
    (outcome,) = hmc.EXPERIMENT.run([cell], [hmc.generate_cell(cell)], settings, 2)
    costs = {"bytes", "seconds"} if name == "hmc" else set()  # chains leave no file
    assert {metric.name for metric in hmc.TABLES[0].metrics} - costs <= outcome.metrics.keys()
    assert all(math.isfinite(value) for value in outcome.metrics.values()) and outcome.metrics["w2_inside"] > 0
    assert (outcome.metrics["spread_inside"] == 0) == (name in ("map", "swag"))  # which gathers after two steps


# -- calibration ------------------------------------------------------------------------------------------------


def exact_ranks(scale: float, replications: int = 400) -> torch.Tensor:
    """Ranks under draws of the exact posterior of a linear model, its standard deviations times `scale`."""
    settings = calibration.Simulation(**{**vars(calibration.settings_of("map")), "hidden": ()})
    at = torch.cat([calibration.places(), torch.ones(3, 1, dtype=torch.float64)], 1)
    rows = []
    for number in range(replications):
        (inputs, targets), truth = calibration.simulated(number, settings)
        design = torch.cat([inputs, torch.ones_like(inputs)], 1)
        precision = design.T @ design / settings.noise**2 + torch.eye(2).double() / settings.prior_std**2
        covariance = precision.inverse()
        mean = covariance @ design.T @ targets[:, 0] / settings.noise**2
        noise = torch.randn(settings.draws, 2, generator=torch.Generator().manual_seed(number)).double()
        draws = mean + scale * noise @ torch.linalg.cholesky(covariance).T
        rows.append(calibration.ranks(draws @ at.T, truth))
    return torch.stack(rows)


def test_ranks_are_uniform_under_the_exact_posterior_and_not_under_one_half_as_wide():
    """The simulation draws from the prior and the noise that it says: else exact draws would miss."""
    for scale, uniform in ((1.0, True), (0.5, False), (2.0, False)):
        ranks = exact_ranks(scale)
        chances = [calibration.uniformity(calibration.histogram(ranks[:, place], 63)) for place in range(3)]
        assert (min(chances) > 0.01) if uniform else (max(chances) < 1e-6), (scale, chances)


def test_the_chance_is_that_of_the_chi_square_law():
    """The 95 % quantile of chi-square with 7 degrees of freedom is 14.067; a flat histogram is no surprise."""
    flat = torch.full((8,), 10_000)
    assert calibration.uniformity(flat) == 1.0
    step = round(math.sqrt(14.067 * 10_000 / 2))  # two bins off by `step`: 2 step² / 10,000
    bent = flat + step * torch.tensor([1, -1, 0, 0, 0, 0, 0, 0])
    assert calibration.uniformity(bent) == pytest.approx(0.05, abs=0.001)


def test_ranks_and_bins_by_hand():
    draws = torch.tensor([[0.0, 5.0], [1.0, 6.0], [2.0, 7.0]])
    assert calibration.ranks(draws, torch.tensor([1.5, 9.0])).tolist() == [2, 3]
    assert calibration.histogram(torch.tensor([0, 7, 8, 63]), 63).tolist() == [2, 1, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("name", ["hmc", "map", "laplace-diag"])
def test_blocks_of_replications_run(name):
    cell = Cell(calibration.DATA, name, split=3)
    settings = calibration.EXPERIMENT.settings("paper", cell)
    numbers = calibration.load_cell(cell)
    assert list(numbers) == list(range(24, 32))
    outcome = calibration.run_block(numbers, settings, 2)
    ranks = torch.tensor([outcome.details["ranks"][place] for place in calibration.PLACES])
    assert ranks.shape == (3, 2) and ranks.min() >= 0 and ranks.max() <= 63
    outer = ((ranks < 8) | (ranks >= 56)).double()
    assert outcome.metrics["tails"] == pytest.approx(float(outer.mean()))
    if name == "map":
        assert set(ranks.flatten().tolist()) <= {0, 63}


def test_the_network_of_the_simulation_is_small_and_replications_are_the_same_for_all_methods():
    settings = [calibration.settings_of(name) for name in calibration.METHODS]
    assert len(settings) > 10
    assert sum(parameter.numel() for parameter in calibration.network(settings[0], 0).parameters()) <= 200
    first, *others = (calibration.simulated(5, some) for some in settings)
    assert all(torch.equal(first.truth, other.truth) for other in others)
    assert all(torch.equal(first.rows.targets, other.rows.targets) for other in others)
