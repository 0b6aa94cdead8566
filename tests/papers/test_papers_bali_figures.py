"""BALI's figures and binary tables: the paper's settings, and what is measured."""

from dataclasses import replace

import pytest
import torch

from dubito import metrics
from dubito.inference.bali import BALI
from papers.bali import binary, class_fit, figure_1
from papers.runner.experiment import Cell


def test_settings_are_those_of_tables_5_and_6():
    paper = binary.EXPERIMENT.scales["paper"]
    spam, magic = (paper.variants[data, "bali"].settings for data in binary.LOCAL)
    method = binary.method_of("bali", spam, 3681)
    assert isinstance(method, BALI) and method.sampling == "weight"
    assert (method.step_size, method.update_rate, method.prior_scale) == (0.1, 0.1, 10.0)
    assert (method.effective_data, method.hidden_floor) == (3681 / 4, 0.01)
    other = binary.method_of("bali-l", magic, 15216)
    assert isinstance(other, BALI) and other.sampling == "local"
    assert (other.step_size, other.prior_scale) == (0.5, 8.0) and other.effective_data == pytest.approx(1521.6)
    assert (spam.iterations, spam.batch_size, spam.lr, spam.weight_decay, spam.rate) == (20_000, 2048, 1e-3, 1e-4, 0.1)
    assert {cell.data for cell in paper.cells if cell.method == "bali-l"} == {"spambase", "magic"}
    diabetes, part = paper.variants["diabetes-health", "bali"].settings, binary.OWN["diabetes-20000"]
    assert (diabetes.step_size, diabetes.update_rate, diabetes.iterations) == (0.25, 0.05, 30_000)
    assert diabetes.effective_share * 0.8 * 253_680 == pytest.approx(part.effective_share * 0.8 * 20_000)


def test_a_curve_has_converged_where_it_is_near_its_lowest_value():
    curve = [(2, 1.0), (4, 0.5), (6, 0.419), (8, 0.40), (10, 0.41)]
    assert class_fit.reached(curve) == 6  # 0.419 is within 5 % of 0.40
    assert class_fit.reached([(1, 0.3), (2, 0.5)]) == 1
    long = [(step, 1 / step) for step in range(1, 1001)]
    kept = class_fit.thinned(long, places=30)
    assert kept[0][0] == 1 and kept[-1][0] == 1000 and len(kept) <= 30
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})


def test_a_binary_run_is_judged_by_its_test_rows():
    cell = Cell("spambase", "map")
    settings = replace(binary.OWN["spambase"], iterations=30, batch_size=20, hidden=(8,), lr=0.05)
    train, test = binary.generate_cell(cell)
    found = binary.run_split(cell, train, test, settings, None)
    curve = found.details["test_nll_by_step"]
    assert [step for step, _ in curve] == list(range(3, 31, 3))  # after every epoch of three batches
    assert found.metrics["nll"] == pytest.approx(curve[-1][1], rel=1e-4)  # a point estimate: draws are alike
    assert found.metrics["gap"] == pytest.approx(found.metrics["nll"] - found.details["train_nll"])
    assert found.metrics["accuracy"] > 0.7 and found.metrics["auc"] > 0.8  # the sign of one column, learned


def test_toys_are_measured_near_and_far():
    """Places are far by their distance to training points, and doubt is that of the function, without noise."""
    grid = figure_1.places("sinc", 121)
    assert grid.shape == (121, 1) and float(grid.max()) == figure_1.OUTER
    assert figure_1.places("two-moons", 121).shape == (31 * 31, 2)
    cell = Cell("sines-trend", "bali")
    stream = torch.Generator().manual_seed(0)
    inputs = torch.rand(40, 1, generator=stream) * 2 - 1
    part = figure_1.Part(inputs, inputs.sin() + 0.02 * torch.randn(40, 1, generator=stream))
    settings = replace(figure_1.Toy(), hidden=(16,), iterations=200, initial_std=1.0, num_samples=64, places=61)
    found = figure_1.run_split(cell, part, part, settings, None)
    assert found.metrics["rmse"] < 0.1
    assert found.metrics["growth"] > 1  # a half unit beyond the points
    far = [abs(x) > 1.2 for (x,) in found.details["grid"]]
    outside = metrics.standard_error_over_runs(
        [value for value, out in zip(found.details["epistemic"], far, strict=True) if out]
    ).value
    assert outside == pytest.approx(found.metrics["far"], rel=0.3)
    assert all(std > doubt for std, doubt in zip(found.details["std"], found.details["epistemic"], strict=True))


def test_toys_have_the_settings_of_appendix_h1():
    variants = figure_1.EXPERIMENT.scales["paper"].variants
    sinc, moons = variants["sinc", "bali"].settings, variants["two-moons", "bali"].settings
    assert (sinc.hidden, sinc.prior_std, sinc.initial_std) == ((256, 256, 256), 80.0, 3.0)
    assert (moons.prior_std, moons.initial_std, moons.num_samples) == (20.0, 1.0, 256)
    weights = {variants["sinc", method].settings.kl for method in figure_1.WEIGHTS}
    assert weights == {1.0, 1e-2, 1e-4}
