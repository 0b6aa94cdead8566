"""Disagreement against counting over pairs."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, zero_one_loss

from dubito.errors import DataError
from dubito.metrics import disagreement


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_against_counting_over_pairs(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(5, 40, 3, generator=generator, dtype=dtype).softmax(-1)
    targets = torch.randint(3, (40,), generator=generator)
    predicted = probs.argmax(-1).numpy()
    error = 1 - np.mean([accuracy_score(targets, row) for row in predicted])
    expected = np.zeros((5, 5))
    for s, t in combinations(range(5), 2):
        expected[s, t] = expected[t, s] = zero_one_loss(predicted[s], predicted[t]) / error
    result = disagreement(probs, targets)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(result.pairs, expected, rtol=tolerance)
    mean = np.mean([expected[s, t] for s, t in combinations(range(5), 2)])
    assert result.mean == pytest.approx(mean, rel=tolerance)


def test_binary_vectors_mean_class_1() -> None:
    probs = torch.tensor([[0.9, 0.2, 0.6, 0.5], [0.8, 0.7, 0.4, 0.1]])
    targets = torch.tensor([1, 0, 1, 0])
    # Predictions 1 0 1 0 and 1 1 0 0: they differ on 2 of 4, and 2 of 8 are wrong.
    assert disagreement(probs, targets).mean == pytest.approx((2 / 4) / (2 / 8))
    assert disagreement(torch.stack((1 - probs, probs), -1), targets).mean == pytest.approx(2.0)


def test_equal_members_and_perfect_members() -> None:
    probs = torch.tensor([[0.9, 0.2, 0.6]]).expand(3, 3)
    assert disagreement(probs, torch.tensor([1, 0, 0])).mean == 0.0
    perfect = disagreement(probs, torch.tensor([1, 0, 1]))
    assert math.isnan(perfect.mean)
    assert perfect.pairs.isnan().all()


def test_bfloat16_rows_may_miss_1_by_its_rounding() -> None:
    probs = torch.randn(2, 30, 50, generator=torch.Generator().manual_seed(0)).softmax(-1).bfloat16()
    targets = torch.zeros(30, dtype=torch.long)
    assert disagreement(probs, targets).mean == disagreement(probs.float().softmax(-1), targets).mean


def test_bad_inputs_are_refused() -> None:
    probs, targets = torch.full((2, 4), 0.5), torch.zeros(4, dtype=torch.long)
    with pytest.raises(DataError, match="at least 2 members"):
        disagreement(probs[:1], targets)
    with pytest.raises(DataError, match=r"\[S, B, C\]"):
        disagreement(probs[0], targets)
    with pytest.raises(DataError, match=r"shape \[4\]"):
        disagreement(probs, targets[:3])
    with pytest.raises(DataError, match="sigmoid"):
        disagreement(probs + 1, targets)
