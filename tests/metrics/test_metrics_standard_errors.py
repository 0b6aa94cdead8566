"""Standard errors against SciPy, the bootstrap against every resample of a few pairs."""

from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap, sem

from dubito.errors import ConfigError, DataError
from dubito.metrics import (
    Estimate,
    Over,
    brier,
    brier_per_example,
    paired_bootstrap,
    standard_error_over_examples,
    standard_error_over_runs,
)


def test_over_runs_against_scipy() -> None:
    values = [0.91, 0.93, 0.90, 0.95]
    for given in (values, tuple(values), torch.tensor(values, dtype=torch.float64), np.array(values)):
        result = standard_error_over_runs(given)
        assert result.value == pytest.approx(np.mean(values), rel=1e-12)
        assert result.standard_error == pytest.approx(sem(values), rel=1e-12)
        assert result.over is Over.RUNS


def test_over_examples_against_scipy() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(100, 4, generator=generator, dtype=torch.float64).softmax(-1)
    targets = torch.randint(4, (100,), generator=generator)
    values = brier_per_example(probs, targets)
    result = standard_error_over_examples(values)
    assert result.value == pytest.approx(brier(probs, targets), rel=1e-12)
    assert result.standard_error == pytest.approx(sem(values), rel=1e-12)
    assert result.over is Over.EXAMPLES
    yes_or_no = torch.tensor([True, False, True, True])
    assert standard_error_over_examples(yes_or_no).standard_error == pytest.approx(sem([1, 0, 1, 1]), rel=1e-12)


def test_two_kinds_never_mix() -> None:
    runs = standard_error_over_runs([0.9, 0.8])
    examples = standard_error_over_examples(torch.tensor([1.0, 0.0, 1.0]))
    with pytest.raises(DataError, match="one over runs and one over examples"):
        runs - examples
    with pytest.raises(DataError, match="one over examples and one over runs"):
        examples - runs
    with pytest.raises(ConfigError, match="values must be a list whose every item is a number"):
        standard_error_over_runs([examples, examples])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="values_a must be a list whose every item is a number"):
        paired_bootstrap([examples, examples], [0.1, 0.2], over=Over.RUNS)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        runs - 0.5  # type: ignore[operator]


def test_independent_estimates_of_one_kind_subtract() -> None:
    first = Estimate(value=0.9, standard_error=0.03, over=Over.RUNS)
    second = Estimate(value=0.8, standard_error=0.04, over=Over.RUNS)
    difference = first - second
    assert difference.value == pytest.approx(0.1)
    assert difference.standard_error == pytest.approx(0.05)
    assert difference.over is Over.RUNS


def test_bootstrap_against_every_resample() -> None:
    first, second = np.array([3.0, 1.0, 4.0, 1.5]), np.array([1.0, 1.5, 0.0, 1.0])
    means = np.array([np.mean(picked) for picked in product(first - second, repeat=4)])  # all 256
    result = paired_bootstrap(first.tolist(), second.tolist(), over=Over.RUNS, num_resamples=20_000)
    assert result.difference == pytest.approx((first - second).mean(), rel=1e-12)
    # 20 000 draws know a standard deviation to about 1/√40 000 = 0.5 % of itself; 2 % is four times that.
    assert result.standard_error == pytest.approx(means.std(), rel=0.02)
    # The resampled means lie on steps of 1/8, so the quantiles are found exactly.
    lower, upper = np.quantile(means, [0.025, 0.975])
    assert (result.lower, result.upper) == pytest.approx((lower, upper), abs=1e-9)
    assert (result.level, result.over) == (0.95, Over.RUNS)


def test_bootstrap_against_scipy_and_closed_form() -> None:
    rng = np.random.default_rng(0)
    second = rng.normal(size=400)
    first = second + 0.1 + 0.2 * rng.normal(size=400)  # strongly paired
    result = paired_bootstrap(
        torch.from_numpy(first), torch.from_numpy(second), over=Over.EXAMPLES, num_resamples=8000, level=0.9
    )
    # The bootstrap of a mean has the standard error σ/√n with σ of ddof 0; 8000 draws know it to 0.8 %.
    closed = (first - second).std() / np.sqrt(400)
    assert result.standard_error == pytest.approx(closed, rel=0.03)
    assert result.standard_error < 0.2 * np.hypot(sem(first), sem(second))  # what pairing is for
    reference = bootstrap(
        (first - second,), np.mean, n_resamples=8000, confidence_level=0.9, method="percentile", rng=rng
    ).confidence_interval
    # A 5 % quantile of 8000 draws is known to about 0.024 standard errors; two such differ by less than 0.12.
    assert result.lower == pytest.approx(reference.low, abs=0.12 * closed)
    assert result.upper == pytest.approx(reference.high, abs=0.12 * closed)


def test_bootstrap_depends_on_its_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.arange(50.0), torch.arange(50.0).square() / 50
    before = torch.random.get_rng_state()
    once = paired_bootstrap(first, second, over=Over.EXAMPLES, seed=3)
    assert once == paired_bootstrap(first, second, over=Over.EXAMPLES, seed=3)
    assert once != paired_bootstrap(first, second, over=Over.EXAMPLES, seed=4)
    assert torch.equal(before, torch.random.get_rng_state())
    monkeypatch.setattr("dubito.metrics.standard_errors._MOST_DRAWS_AT_ONCE", 700)  # many small pieces
    assert once == paired_bootstrap(first, second, over=Over.EXAMPLES, seed=3)


def test_equal_values_have_no_difference() -> None:
    values = [0.1, 0.2, 0.3]
    result = paired_bootstrap(values, values, over=Over.RUNS)
    assert (result.difference, result.standard_error, result.lower, result.upper) == (0, 0, 0, 0)


def test_bad_inputs_are_refused() -> None:
    for function in (standard_error_over_runs, standard_error_over_examples):
        with pytest.raises(DataError, match="at least two"):
            function(torch.tensor([1.0]))
        with pytest.raises(DataError, match="in one row"):
            function(torch.ones(2, 2))
        with pytest.raises(DataError, match="infinite nll"):
            function(torch.tensor([1.0, float("inf")]))
        with pytest.raises(DataError, match="must be finite"):
            function(torch.tensor([1.0, float("nan")]))
    with pytest.raises(ConfigError, match="every item is a number"):
        standard_error_over_runs(["a", "b"])  # type: ignore[list-item]
    pair = [1.0, 2.0], [1.0, 3.0]
    with pytest.raises(DataError, match="pair up, got 2 and 3"):
        paired_bootstrap(pair[0], [1.0, 2.0, 3.0], over=Over.RUNS)
    with pytest.raises(ConfigError, match="over must be"):
        paired_bootstrap(*pair, over="runs")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_resamples"):
        paired_bootstrap(*pair, over=Over.RUNS, num_resamples=1)
    with pytest.raises(ConfigError, match="level"):
        paired_bootstrap(*pair, over=Over.RUNS, level=1.0)
    with pytest.raises(ConfigError, match="seed"):
        paired_bootstrap(*pair, over=Over.RUNS, seed=0.5)  # type: ignore[arg-type]
