"""BALI on the UCI tables: original units, settings of the paper's Table 4, splits side by side."""

import math

import pytest
import torch

from dubito.data import Part
from dubito.errors import ConfigError
from dubito.inference.bali import BALI
from papers.bali.uci.layerwise import LayerwiseRun, run_layerwise
from papers.bali.uci.tables_1_7 import EXPERIMENT
from papers.runner.experiment import Cell


def part(rows: int, seed: int) -> Part:
    stream = torch.Generator().manual_seed(seed)
    inputs = 5 + 2 * torch.randn(rows, 3, generator=stream, dtype=torch.float64)
    noise = 0.5 * torch.randn(rows, 1, generator=stream, dtype=torch.float64)
    return Part(inputs, 100 + 10 * inputs[:, :1] + noise)


def test_numbers_are_in_original_units():
    """Nearly linear data: the error is near the noise of 0.5, and the likelihood near that of such a Gaussian."""
    settings = LayerwiseRun(
        method=BALI(effective_data=200.0, output_floor=1e-5, initial_std=1.0),
        iterations=400,
        batch_size=200,
        hidden=20,
        num_samples=64,
    )
    trains, tests = [part(200, 0), part(200, 1)], [part(60, 2), part(60, 3)]
    outcomes = run_layerwise(trains, tests, settings, seeds_of_parts=[1, 2])
    for outcome in outcomes:
        rmse = outcome.metrics["rmse"]
        assert 0.35 < rmse < 1.5
        best = -math.log(rmse) - 0.5 * math.log(2 * math.pi) - 0.5  # of a Gaussian with just this error
        assert best - 0.6 < outcome.metrics["log_likelihood"] < best + 0.2
        assert 0.2 < outcome.details["noise"] < 2
    assert outcomes[0].metrics != outcomes[1].metrics


def test_settings_are_those_of_table_4():
    scale = EXPERIMENT.scales["paper"]
    kin8nm, protein, yacht = (scale.variants[data, "bali"].settings for data in ("kin8nm", "protein", "yacht"))
    assert (kin8nm.iterations, protein.iterations) == (20_000, 30_000)
    assert kin8nm.method.effective_data == pytest.approx(0.9 * 8192 / 4, abs=1)
    assert yacht.method.effective_data == 277
    assert (protein.method.update_rate, protein.method.prior_scale, protein.hidden) == (0.1, 20.0, 100)
    assert (yacht.method.update_rate, yacht.method.prior_scale, yacht.hidden) == (0.2, 40.0, 50)
    assert sum(cell.method == "bali" for cell in scale.cells) == 6 * 20 + 5
    assert Cell("protein", "bali", 4) in scale.cells and Cell("protein", "bali", 5) not in scale.cells


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="iterations"):
        LayerwiseRun(method=BALI(), iterations=0)
