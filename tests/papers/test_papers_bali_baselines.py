"""Vadam, Noisy K-FAC and mean field on the UCI tables: networks side by side that share nothing, original units."""

import pytest
import torch
from torch import nn

from dubito import Gaussian, Training
from dubito.data import Part
from dubito.errors import ConfigError
from dubito.inference.mean_field import MeanField
from dubito.inference.natural_gradient import NoisyKFAC, Vadam
from dubito.method import Method
from papers.bali.uci.baselines import BaselineRun, Beside, SideBySide, run_baseline
from papers.bali.uci.columns import BASELINES, TUNED
from papers.bali.uci.tables_1_7 import EXPERIMENT, TABLES
from papers.runner.experiment import Cell


def part(rows: int, seed: int) -> Part:
    stream = torch.Generator().manual_seed(seed)
    inputs = 5 + 2 * torch.randn(rows, 3, generator=stream, dtype=torch.float64)
    noise = 0.5 * torch.randn(rows, 1, generator=stream, dtype=torch.float64)
    return Part(inputs, 100 + 10 * inputs[:, :1] + noise)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_side_by_side_are_a_grouped_convolution(dtype: torch.dtype):
    layer = Beside(4, 3, 5).to(dtype)
    inputs = torch.randn(7, 12, 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = nn.functional.conv1d(inputs, layer.weight, layer.bias, groups=4)
    torch.testing.assert_close(layer(inputs), expected)


def test_each_network_reads_its_own_rows_and_starts_from_its_own_seed():
    net, alone = SideBySide(3, 6, [11, 12]), SideBySide(3, 6, [12])
    inputs = torch.randn(9, 2, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(net(inputs)[:, 1:], alone(inputs[:, 1:]))
    other = inputs.clone()
    other[:, 0] += 1
    assert torch.equal(net(other)[:, 1], net(inputs)[:, 1])
    assert not torch.equal(net(other)[:, 0], net(inputs)[:, 0])


def test_noisy_kfac_has_factors_of_its_own_for_each_network():
    """One network's factors do not know of the other, whose inputs are a hundred times as large."""
    inputs = torch.randn(40, 2, 3, generator=torch.Generator().manual_seed(0))
    inputs[:, 1] *= 100
    posterior = NoisyKFAC(initial_std=None).fit(
        SideBySide(3, 6, [1, 2]),
        (inputs, inputs[..., 0]),
        Gaussian(std=1.0),
        training=Training(iterations=1, batch_size=40),
        progress=False,
    )
    roots = posterior.group("input_tril")["first.weight"]
    seen = torch.cat([inputs, torch.ones(40, 2, 1)], -1)
    for place in range(2):
        gram = seen[:, place].T @ seen[:, place]
        off_diagonal = (roots[place] @ roots[place].T)[0, 1] / (roots[place] @ roots[place].T)[0, 2]
        torch.testing.assert_close(off_diagonal, gram[0, 1] / gram[0, 2], rtol=1e-3, atol=1e-4)
    assert roots[1][0, 0] > 10 * roots[0][0, 0]


@pytest.mark.parametrize(
    ("method", "lr"),
    [(MeanField(initial_std=0.03), 0.02), (NoisyKFAC(beta=0.2), 0.1)],
    ids=["mean field", "Noisy K-FAC"],
)
def test_numbers_are_in_original_units(method: Method, lr: float):
    """Nearly linear data with a spread of 20 and noise of 0.5: errors and noise lie between the two."""
    settings = BaselineRun(method=method, lr=lr, iterations=250, batch_size=64, hidden=10, num_samples=64)
    trains, tests = [part(200, 0), part(200, 1)], [part(60, 2), part(60, 3)]
    outcomes = run_baseline(trains, tests, settings, seeds_of_parts=[1, 2])
    for outcome in outcomes:
        assert 0.35 < outcome.metrics["rmse"] < 6
        assert -4.5 < outcome.metrics["log_likelihood"] < -0.7  # of a Gaussian with the noise itself: -0.73
        assert 0.3 < outcome.details["noise"] < 20
    assert outcomes[0].metrics != outcomes[1].metrics


def test_every_table_has_the_columns():
    scale = EXPERIMENT.scales["paper"]
    for name in BASELINES:
        assert sum(cell.method == name for cell in scale.cells) == 7 * 20
    assert scale.variants["protein", "vadam"].settings.hidden == 100
    assert all(
        ("yacht", name, metric) in table.published
        for table, metric in zip(TABLES, ("rmse", "log_likelihood"), strict=True)
        for name in BASELINES
    )
    claims = {(claim.better, claim.than): claim.data for claim in TABLES[0].claims}
    for form in ("bali", "bali-ruled"):  # against rivals whose settings were searched as well
        assert claims[form, "noisy-kfac-tuned"] == ("yacht", "concrete")  # 3.8 and 3.0 standard errors; energy 1.2
        assert "wine-red" not in claims[form, "mean-field-tuned"]  # where it is BALI that is worse
    assert not {than for _, than in claims} & set(BASELINES)


def test_rivals_have_one_grid_on_every_table():
    variants = EXPERIMENT.scales["paper"].variants
    for data, batch_sizes in (("yacht", {8, 128}), ("protein", {32, 512})):
        grids = {
            tuple(
                (run.lr, getattr(run, "method", run).prior_std, run.batch_size)
                for run in variants[data, f"{name}-tuned"].settings.candidates
            )
            for name in TUNED
        }
        (grid,) = grids
        assert len(grid) == 12 and {batch_size for _, _, batch_size in grid} == batch_sizes
        assert all(variants[data, f"{name}-tuned"].settings.shared for name in TUNED)


def test_the_cells_that_were_run_before_keep_their_identity():
    """Results are found by a checksum over their settings: this one's was run before the columns were there."""
    assert EXPERIMENT.digest("paper", Cell("yacht", "bali", 0)).startswith("0e83d892c7459906")


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="noise_lr"):
        BaselineRun(method=Vadam(), lr=0.1, iterations=1, noise_lr=0.0)
