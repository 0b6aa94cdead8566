"""Calibration metrics against scikit-learn's curve and formulas written out example by example."""

import math

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve

from dubito.errors import ConfigError, DataError
from dubito.metrics import classwise_ece, ece, reliability_curve


def direct_ece(confidence: np.ndarray, hits: np.ndarray, num_bins: int) -> float:
    """Σ_m n_m/B |acc_m - conf_m| with bins (m/M, (m+1)/M], the first also holding 0."""
    total = 0.0
    for m in range(num_bins):
        inside = (confidence > m / num_bins) & (confidence <= (m + 1) / num_bins)
        if m == 0:
            inside |= confidence == 0
        if inside.any():
            total += inside.mean() * abs(hits[inside].mean() - confidence[inside].mean())
    return total


def direct_adaptive_ece(confidence: np.ndarray, hits: np.ndarray, num_bins: int) -> float:
    """Equal numbers of examples by sorting and splitting; only right without ties, and B a multiple of M."""
    order = confidence.argsort()
    parts = zip(np.split(confidence[order], num_bins), np.split(hits[order], num_bins), strict=True)
    return float(np.mean([abs(h.mean() - c.mean()) for c, h in parts]))


@pytest.fixture
def problem() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(600, 4, generator=generator, dtype=torch.float64)
    logits[:, 3] -= 2
    # Labels of the same ranking but other sharpness: too bold in some bins, too timid in others.
    truth = (0.7 * logits[:, :3]).softmax(-1)
    targets = torch.multinomial(truth, 1, generator=generator).squeeze(1)  # class 3 never occurs
    return logits.softmax(-1), targets


@pytest.mark.parametrize("num_bins", [1, 10, 15, 200])
def test_ece_against_the_direct_formula(problem, num_bins: int) -> None:
    probs, targets = problem
    confidence, predicted = probs.max(1)
    reference = direct_ece(confidence.numpy(), (predicted == targets).numpy(), num_bins)
    assert ece(probs, targets, num_bins) == pytest.approx(reference, rel=1e-12)
    # float32 can only move the value by its rounding: no confidence here lies on a bin edge.
    assert ece(probs.float(), targets, num_bins) == pytest.approx(reference, abs=1e-6)


def test_fifteen_bins_by_default(problem) -> None:
    probs, targets = problem
    assert ece(probs, targets) == ece(probs, targets, 15) != ece(probs, targets, 14)
    assert classwise_ece(probs, targets) == classwise_ece(probs, targets, 15) != classwise_ece(probs, targets, 14)
    assert len(reliability_curve(probs, targets).count) == 15


@pytest.mark.parametrize("num_bins", [1, 15, 600])
def test_adaptive_ece_against_sorting_and_splitting(problem, num_bins: int) -> None:
    probs, targets = problem
    confidence, predicted = probs.max(1)
    reference = direct_adaptive_ece(confidence.numpy(), (predicted == targets).numpy(), num_bins)
    assert ece(probs, targets, num_bins, adaptive=True) == pytest.approx(reference, rel=1e-12)


def test_adaptive_bins_differ_by_at_most_one_example(problem) -> None:
    probs, targets = problem
    curve = reliability_curve(probs[:599], targets[:599], 15, adaptive=True)
    assert curve.count.sum() == 599
    assert set(curve.count.tolist()) == {39, 40}
    # The limits are the ⌈7/3⌉ = 3rd and ⌈14/3⌉ = 5th of seven confidences.
    confidence = torch.tensor([0.9, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85])
    curve = reliability_curve(confidence, torch.ones(7, dtype=torch.long), 3, adaptive=True)
    torch.testing.assert_close(curve.edges, torch.tensor([0.0, 0.7, 0.8, 1.0]))
    assert curve.count.tolist() == [3, 2, 2]


def test_classwise_ece_averages_over_all_classes_the_absent_one_too(problem) -> None:
    probs, targets = problem
    exact, labels = probs.numpy(), targets.numpy()
    reference = np.mean([direct_ece(exact[:, c], labels == c, 15) for c in range(4)])
    assert classwise_ece(probs, targets) == pytest.approx(reference, rel=1e-12)
    reference = np.mean([direct_adaptive_ece(exact[:, c], labels == c, 15) for c in range(4)])
    assert classwise_ece(probs, targets, adaptive=True) == pytest.approx(reference, rel=1e-12)
    # The absent class is all error: its mean probability.
    curve = reliability_curve(probs, targets, 1, label=3)
    assert curve.accuracy.item() == 0.0
    assert curve.confidence.item() == pytest.approx(exact[:, 3].mean(), rel=1e-12)


def test_classwise_ece_is_the_same_in_small_blocks(problem, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = classwise_ece(*problem)
    for block in (1, 1800):  # one class at a time; three, then the last
        monkeypatch.setattr("dubito.metrics.calibration._BLOCK", block)
        assert classwise_ece(*problem) == whole


def test_reliability_curve_against_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(1)
    probs = 0.5 * torch.rand(300, generator=generator, dtype=torch.float64)  # bins above 0.5 stay empty
    targets = torch.rand(300, generator=generator) < probs
    curve = reliability_curve(probs, targets, 10, label=1)
    frequency, mean = calibration_curve(targets.numpy(), probs.numpy(), n_bins=10)
    filled = curve.count > 0
    assert filled.tolist() == [True] * 5 + [False] * 5
    np.testing.assert_allclose(curve.accuracy[filled], frequency, rtol=1e-12)
    np.testing.assert_allclose(curve.confidence[filled], mean, rtol=1e-12)
    assert curve.accuracy[~filled].isnan().all()
    assert curve.confidence[~filled].isnan().all()
    torch.testing.assert_close(curve.edges, torch.linspace(0, 1, 11, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_confidences_on_the_edges_belong_to_the_bin_below(dtype: torch.dtype) -> None:
    probs = torch.tensor([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], dtype=dtype)
    curve = reliability_curve(probs, torch.zeros(6, dtype=torch.long), 15, label=1)
    assert curve.count.nonzero().flatten().tolist() == [0, 2, 5, 8, 11, 14]
    assert curve.count.sum() == 6


def test_confidence_of_exactly_1_shares_the_last_bin() -> None:
    probs = torch.tensor([[1.0, 0.0], [0.97, 0.03]])
    targets = torch.tensor([1, 0])
    # One bin of two: |1/2 - (1 + 0.97)/2|; with 1 in a bin of its own it would be (1 + 0.03)/2 = 0.515.
    assert ece(probs, targets) == pytest.approx(0.485, abs=1e-6)


def test_saturated_predictions() -> None:
    probs = torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert ece(probs, torch.tensor([0, 1, 1, 0])) == 0.0
    assert ece(probs, torch.tensor([1, 0, 0, 1])) == 1.0
    assert ece(probs, torch.tensor([0, 1, 0, 1])) == 0.5
    assert classwise_ece(probs, torch.tensor([1, 0, 0, 1]), adaptive=True) == 1.0


def test_ties_stay_together_in_adaptive_bins_whatever_the_order() -> None:
    probs = torch.tensor([0.6, 0.6, 0.6, 0.6, 0.9, 0.9], dtype=torch.float64)
    targets = torch.tensor([1, 0, 1, 0, 1, 0])
    expected = 4 / 6 * abs(0.5 - 0.6) + 2 / 6 * abs(0.5 - 0.9)
    for seed in range(5):
        order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
        value = ece(probs[order], targets[order], 3, adaptive=True)
        assert value == pytest.approx(expected, rel=1e-12)
    curve = reliability_curve(probs, targets, 3, adaptive=True)
    assert curve.count.tolist() == [4, 0, 2]
    assert math.isnan(curve.accuracy[1])


def test_more_adaptive_bins_than_examples() -> None:
    probs, targets = torch.tensor([0.7, 0.9], dtype=torch.float64), torch.tensor([1, 0])
    assert ece(probs, targets, 15, adaptive=True) == pytest.approx((0.3 + 0.9) / 2, rel=1e-12)


def test_binary_ece_uses_the_predicted_class() -> None:
    probs = torch.tensor([0.1, 0.3, 0.8], dtype=torch.float64)
    targets = torch.tensor([0, 1, 1])
    expected = (abs(1 - 0.9) + abs(0 - 0.7) + abs(1 - 0.8)) / 3
    assert ece(probs, targets) == pytest.approx(expected, rel=1e-12)
    assert ece(torch.stack((1 - probs, probs), -1), targets) == ece(probs, targets)


def test_float32_sums_do_not_drift() -> None:
    probs = torch.full((200_000,), 0.9996)  # added one by one in float32 their mean is off by 4e-4
    targets = torch.ones(200_000, dtype=torch.long)
    assert ece(probs, targets) == pytest.approx(0.0004, abs=2e-6)


def test_bad_settings_are_refused(problem) -> None:
    probs, targets = problem
    for metric in (ece, classwise_ece, reliability_curve):
        with pytest.raises(ConfigError, match="num_bins"):
            metric(probs, targets, 0)
        with pytest.raises(DataError, match="softmax"):
            metric(probs.log(), targets)
    with pytest.raises(ConfigError, match="class from 0 to 3, got 4"):
        reliability_curve(probs, targets, label=4)
    with pytest.raises(ConfigError, match="label"):
        reliability_curve(probs, targets, label=-1)
