"""Rejection curve and AURC against plain counting and, with ties, every order of the tied examples."""

from itertools import permutations

import numpy as np
import pytest
import torch

from dubito.errors import DataError
from dubito.metrics import aurc, correct_per_example, rejection_curve


def counted(uncertainty: list[float], correct: list[bool]) -> list[float]:
    """Accuracy after rejecting 0, 1, … of the most uncertain, for one given order of ties."""
    kept = [right for _, right in sorted(zip(uncertainty, correct, strict=True), key=lambda pair: pair[0])]
    return [float(np.mean(kept[: len(kept) - k])) for k in range(len(kept))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_against_counting(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    uncertainty = torch.randn(300, generator=generator, dtype=dtype)
    correct = torch.rand(300, generator=generator) < torch.sigmoid(1 - uncertainty)
    curve = rejection_curve(uncertainty, correct)
    expected = counted(uncertainty.tolist(), correct.tolist())
    # Sums of up to 300 rates, divided in float32.
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(curve.accuracy, expected, atol=tolerance)
    np.testing.assert_allclose(curve.rejected, np.arange(300) / 300, atol=tolerance)
    assert aurc(uncertainty, correct) == pytest.approx(1 - np.mean(expected), abs=tolerance)


def test_ties_give_the_mean_over_every_order() -> None:
    uncertainty = [0.1, 0.5, 0.5, 0.5, 0.9, 0.9]
    correct = [True, False, True, True, False, True]
    orders = permutations(range(6))  # a stable sort keeps the tied ones in the order given
    curves = [counted([uncertainty[i] for i in order], [correct[i] for i in order]) for order in orders]
    expected = np.mean(curves, axis=0)
    tensors = torch.tensor(uncertainty, dtype=torch.float64), torch.tensor(correct)
    np.testing.assert_allclose(rejection_curve(*tensors).accuracy, expected, rtol=1e-12)
    assert aurc(*tensors) == pytest.approx(1 - expected.mean(), rel=1e-12)


def test_extremes() -> None:
    uncertainty = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert aurc(uncertainty, torch.ones(4, dtype=torch.bool)) == 0.0
    assert aurc(uncertainty, torch.zeros(4, dtype=torch.bool)) == 1.0
    assert aurc(torch.ones(4), torch.tensor([0, 1, 1, 0])) == 0.5  # knowing nothing gives the error rate
    best = rejection_curve(uncertainty, torch.tensor([1, 1, 1, 0])).accuracy
    assert best.tolist() == [0.75, 1.0, 1.0, 1.0]
    assert aurc(-uncertainty, torch.tensor([1, 1, 1, 0])) > aurc(uncertainty, torch.tensor([1, 1, 1, 0]))


def test_infinite_uncertainty_is_rejected_first() -> None:
    curve = rejection_curve(torch.tensor([float("inf"), 0.0]), torch.tensor([False, True]))
    assert curve.accuracy.tolist() == [0.5, 1.0]


def test_works_on_what_correct_per_example_gives() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
    correct = correct_per_example(probs, torch.tensor([0, 1, 1]))
    assert rejection_curve(1 - probs.amax(1), correct).accuracy.tolist() == pytest.approx([2 / 3, 1.0, 1.0])


@pytest.mark.parametrize("metric", [rejection_curve, aurc])
def test_bad_inputs_are_refused(metric) -> None:
    with pytest.raises(DataError, match="one shape"):
        metric(torch.zeros(3), torch.ones(2, dtype=torch.bool))
    with pytest.raises(DataError, match="NaN"):
        metric(torch.tensor([float("nan")]), torch.tensor([True]))
    with pytest.raises(DataError, match="booleans"):
        metric(torch.zeros(2), torch.tensor([0.5, 1.0]))
    with pytest.raises(DataError, match="at least one value"):
        metric(torch.zeros(0), torch.zeros(0, dtype=torch.bool))
