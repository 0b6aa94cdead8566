"""The likelihood of a comparison: chosen by training targets and residuals, or told; counts are shown as counts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dubito import ConfigError, HeteroscedasticGaussian, NegativeBinomial, Poisson, StudentT
from dubito.compare import Settings
from dubito.compare.baselines import fit
from dubito.compare.likelihood import holds_counts
from dubito.compare.task import Task, make_task
from dubito.prediction import CountPrediction

ROWS = 1200


def table(folder: Path, kind: str) -> str:
    """A table with a target of known noise."""
    draws = np.random.default_rng(0)
    inputs = draws.normal(size=(ROWS, 2))
    rate = np.exp(1.5 + 0.7 * inputs[:, 0])
    targets: dict[str, Any] = {
        "poisson": lambda: draws.poisson(rate),
        "negative-binomial": lambda: draws.poisson(rate * draws.gamma(1.5, 1 / 1.5, ROWS)),
        "gaussian": lambda: inputs[:, 0] + draws.normal(size=ROWS),
        "student-t": lambda: inputs[:, 0] + draws.standard_t(2.5, size=ROWS),
    }
    path = folder / f"{kind}.csv"
    np.savetxt(path, np.column_stack([inputs, targets[kind]()]), delimiter=",", header="a,b,y", comments="")
    return str(path)


def task(folder: Path, kind: str, **options: Any) -> Task:
    return make_task(Settings(data=table(folder, kind), target="y", **options))


@pytest.mark.parametrize("kind", ["poisson", "negative-binomial", "gaussian", "student-t"])
def test_the_noise_of_a_table_is_recognised(tmp_path: Path, kind: str) -> None:
    chosen = task(tmp_path, kind)
    assert chosen.likelihood_reason.startswith(f"{kind}:")
    counted = kind in ("poisson", "negative-binomial")
    assert (chosen.data.target_scaling is None) == counted
    if counted:
        for part in (chosen.train, chosen.validation, chosen.test):
            assert torch.equal(part.targets, part.targets.round()) and float(part.targets.min()) >= 0


def test_test_rows_do_not_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test targets of any size leave the sentence, with its figures, as it is."""
    from dubito.compare import task as module

    first = task(tmp_path, "student-t").likelihood_reason
    load = module.loaded

    def changed(settings: Settings) -> Any:
        data = load(settings)
        data.test.targets.mul_(1e6)
        return data

    monkeypatch.setattr(module, "loaded", changed)
    assert task(tmp_path, "student-t").likelihood_reason == first


def test_the_user_decides_otherwise(tmp_path: Path) -> None:
    for name, kind in (("heteroscedastic", HeteroscedasticGaussian), ("student-t", StudentT)):
        told = task(tmp_path, "gaussian", likelihood=name)
        assert isinstance(told.likelihood, kind) and told.likelihood_reason == f"{name}, as asked for"
        assert told.network.num_outputs == (2 if name == "heteroscedastic" else 1)
    assert isinstance(task(tmp_path, "negative-binomial", likelihood="poisson").likelihood, Poisson)
    with pytest.raises(ConfigError, match="poisson is for counts, but the target holds"):
        task(tmp_path, "gaussian", likelihood="poisson")
    with pytest.raises(ConfigError, match="categorical is not for regression"):
        make_task(Settings(data="diabetes", likelihood="categorical"))


def test_models_beside_the_methods_are_scored_by_probabilities_of_counts(tmp_path: Path) -> None:
    """Their likelihood sums to 1 over counts, as the methods' does, and intervals are whole and not below 0."""
    counted = task(tmp_path, "negative-binomial")
    assert isinstance(counted.likelihood, NegativeBinomial)
    for name in ("poisson-regression", "gradient-boosting"):
        prediction = fit(name, counted).predict(counted.test.inputs[:3])
        assert isinstance(prediction, CountPrediction) and prediction.total_count is not None
        assert 0.5 < float(prediction.total_count.flatten()[0]) < 6  # 1.5 made the rows
        total = sum(prediction.log_prob(torch.full((3, 1), float(k))).exp() for k in range(2000))
        torch.testing.assert_close(total, torch.ones(3, dtype=torch.float64), rtol=1e-6, atol=1e-6)
        lower, upper = prediction.interval(0.9)
        assert torch.equal(lower, lower.round()) and float(lower.min()) >= 0 and bool((upper >= lower).all())


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ([0, 1, 2, 3, 7, 1, 0], True),
        ([0.5, 1, 2, 3], False),
        ([-1, 0, 1, 2, 5], False),
        ([0, 10, 20, 100, 30], False),  # steps of ten are codes
        ([1990, 1991, 1993, 2001], False),
        ([5, 6, 5, 6, 7, 5, 6], False),  # grades lie nearer to their mean
        ([120_000, 250_001, 99_999], False),
        ([0, 1, 1, 0], False),
    ],
)
def test_what_counts_are(values: list[float], counts: bool) -> None:
    assert holds_counts(torch.tensor(values, dtype=torch.float64)[:, None]) == counts
