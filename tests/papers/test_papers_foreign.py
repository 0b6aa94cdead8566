"""Figures and tables on shifts: what is measured, in which units, and against which reference."""

from dataclasses import replace

import pytest
import torch

from dubito import SWA, Categorical, Training, TrainingError, metrics
from dubito.data import Scaling
from papers.bali import figure_3
from papers.inf import figure_4, figure_5, searched, table_2
from papers.runner.experiment import Cell
from papers.runner.store import PAPERS, Results
from papers.settings import explicit


def test_the_area_under_the_kept_curve_is_the_auroc():
    stream = torch.Generator().manual_seed(0)
    inside, outside = torch.randn(400, generator=stream), torch.randn(300, generator=stream) + 1
    curve = figure_3.roc(inside, outside, places=400)
    assert curve["true_positives"][-1] == curve["false_positives"][-1] == 1
    area = torch.trapezoid(torch.tensor(curve["true_positives"]), torch.tensor(curve["false_positives"]))
    truth = metrics.auroc(torch.cat([inside, outside]), torch.arange(700) >= 400)
    assert float(area) == pytest.approx(truth, abs=0.01)  # the first threshold lets in one image at once


def test_the_papers_positives_are_in_distribution_images():
    """The share of the others below the entropy that 95 % of the in-distribution images stay below."""
    stream = torch.Generator().manual_seed(0)
    inside, outside = torch.rand(2000, generator=stream), torch.rand(2000, generator=stream) + 0.5
    outcome = figure_3.Outcome(metrics={}, details={"roc": figure_3.roc(inside, outside)})
    truth = float((outside <= inside.quantile(0.95)).float().mean())
    assert figure_3.paper_positives(outcome)["fpr95_inside"] == pytest.approx(truth, abs=0.01)
    assert truth == pytest.approx(0.45, abs=0.03)


def test_pixels_are_standardised_or_in_the_unit_interval():
    cell = Cell("mnist/fashion-mnist", "bali")
    images = figure_3.generate_cell(cell)
    unit = images.scaled(False)
    assert images.scaled(True) is images
    torch.testing.assert_close(unit.outside, images.outside * 0.3 + 0.1)
    torch.testing.assert_close(unit.train.inputs, images.train.inputs * 0.3 + 0.1)
    assert torch.equal(unit.test.targets, images.test.targets)


def test_bali_has_the_papers_settings():
    method = figure_3.method_of("bali", figure_3.Fit(), 60_000)
    assert (method.step_size, method.update_rate, method.prior_scale) == (0.25, 0.1, 10.0)
    assert method.effective_data == pytest.approx(60_000 / 50) and method.hidden_floor == 0.01


def test_errors_of_active_learning_are_in_original_units():
    settings = figure_5.Steps(initial=8)
    cell = Cell("boston", "inf-50%")
    split = figure_5.generate_cell(cell)
    # two steps: the first fits are no better than a constant, which is warned of
    with pytest.warns(match="no better than a constant"):
        plain = figure_5.run_split(cell, split, settings, 2)
        tripled = figure_5.run_split(
            cell, replace(split, scaling=Scaling(torch.zeros(1), torch.full((1,), 3.0))), settings, 2
        )
        random = figure_5.run_split(Cell("boston", "random"), split, settings, 2)
    assert tripled.metrics["rmse"] == pytest.approx(3 * plain.metrics["rmse"])
    curve = plain.details["rmse"]
    assert len(curve) == 3 and plain.metrics["rmse"] == pytest.approx(sum(curve[1:]) / 2)
    assert plain.metrics["last_rmse"] == pytest.approx(curve[-1])
    assert random.details["rmse"][0] == pytest.approx(curve[0], rel=0.05)  # the same rows and weights to start with


def test_the_toys_reference_must_have_converged():
    pytest.importorskip("pyro")
    cell = Cell(figure_4.DATA, "inf", seed=7)
    short = figure_4.Toy(draws=4, warmup=2, chains=2, iterations=2, num_samples=2)
    with pytest.raises(TrainingError, match="no reference"):
        figure_4.run_split(cell, figure_4.generate_cell(cell), short, None)


@pytest.mark.filterwarnings("ignore:the network is no better than a constant")  # after two steps it may not be
def test_points_are_shared_by_the_structures():
    settings, images = table_2.Fit(), table_2.generate_cell(Cell(table_2.DATA, "nn", seed=9))
    point, _ = table_2.fitted(Cell(table_2.DATA, "nn", seed=9), images, settings, 2)
    laplace, chosen = table_2.fitted(Cell(table_2.DATA, "laplace-diag", seed=9), images, settings, 2)
    assert set(chosen) == {"prior_precision", "data_scale"}
    for name, weight in point.weights().items():
        assert torch.equal(laplace.weights()[name], weight)


@pytest.mark.filterwarnings("ignore:the network is no better than a constant")  # after two steps it may not be
def test_searched_networks_are_trained_once_and_averaged_as_swa_does():
    cell = Cell(searched.MNIST, "swa", seed=9)
    settings, images = searched.SMALL[searched.MNIST], searched.generate_cell(cell)
    mean, _ = searched.fitted(cell, images, settings, 4)
    training = explicit(Training, iterations=4, batch_size=100, lr=settings.lr, weight_decay=settings.weight_decay)
    net = searched.NETWORKS[cell.data](seed=9)
    alone = explicit(SWA).fit(net, images.train, explicit(Categorical), training=training, seed=9)
    for name, weight in alone.weights().items():
        assert torch.equal(mean.weights()[name], weight)
    point, _ = searched.fitted(replace(cell, method="nn"), images, settings, 4)
    around, chosen = searched.fitted(replace(cell, method="laplace-diag"), images, settings, 4)
    assert all(torch.equal(weight, around.weights()[name]) for name, weight in point.weights().items())
    tried = around.details["search"]
    assert tried["predictive"] == "draws" and tried["trials"] == 8 and tried["loss"] <= tried["present_loss"]
    assert chosen["prior_precision"] == around.prior_precision
    assert chosen["data_scale"] * around.num_data == pytest.approx(around.data_scale)


@pytest.mark.filterwarnings("ignore:the network is no better than a constant")
def test_numbers_beside_the_weights_are_those_of_the_structures():
    cell = Cell(searched.MNIST, "laplace-kfac", seed=9)
    images, settings = searched.generate_cell(cell), searched.SMALL[searched.MNIST]
    posterior, _ = searched.fitted(cell, images, settings, 2)
    sides = [(6, 26), (16, 151), (84, 257), (10, 85)]  # outputs, and inputs with the bias
    kept = sum(m * m + m + n * n + n for m, n in sides)
    assert searched.numbers(posterior) == pytest.approx(kept / sum(m * n for m, n in sides))
    diagonal, _ = searched.fitted(replace(cell, method="laplace-diag"), images, settings, 2)
    assert searched.numbers(diagonal) == 1
    assert searched.numbers(searched.fitted(replace(cell, method="nn"), images, settings, 2)[0]) == 0


def test_stored_validated_cells_stand_beside_the_chains_of_their_draw():
    """The reference that a validated cell reads from a file is that of the other methods."""
    results = Results(folder=PAPERS)
    for split in range(3):
        cells = [Cell(figure_4.DATA, method, split) for method in (*figure_4.METHODS, *figure_4.VALIDATED)]
        curves = [one.details["hmc_std"] for cell in cells if (one := results.read(figure_4.EXPERIMENT, "paper", cell))]
        for curve in curves[1:]:
            assert curve == pytest.approx(curves[0], rel=1e-6)
