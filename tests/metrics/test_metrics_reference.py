"""Distances to a reference against closed forms and SciPy."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import norm

from dubito.errors import DataError
from dubito.metrics import (
    agreement,
    agreement_per_example,
    total_variation,
    total_variation_per_example,
    wasserstein2,
    wasserstein2_per_example,
)


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_agreement_and_total_variation_by_hand() -> None:
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.4, 0.2], [0.1, 0.2, 0.7]])
    reference = torch.tensor([[0.5, 0.4, 0.1], [0.3, 0.6, 0.1], [0.0, 0.0, 1.0]])
    assert agreement_per_example(probs, reference).tolist() == [True, False, True]  # a tie is the lower class
    assert agreement(probs, reference) == 2 / 3
    assert total_variation_per_example(probs, reference).tolist() == pytest.approx([0.2, 0.2, 0.3])
    assert total_variation(probs, reference) == pytest.approx(0.7 / 3)
    assert total_variation(probs, probs) == 0 and agreement(probs, probs) == 1


def test_a_reference_in_double_precision_is_not_rounded_to_ties() -> None:
    close = torch.tensor([[0.5 - 1e-9, 0.5 + 1e-9]], dtype=torch.float64)
    assert agreement(torch.tensor([[0.4, 0.6]]), close) == 1


def test_total_variation_is_the_largest_difference_of_any_event() -> None:
    probs, reference = rows(6, 5).softmax(-1), rows(6, 5, seed=1).softmax(-1)
    events = [[bool(number >> bit & 1) for bit in range(5)] for number in range(32)]
    largest = torch.stack(
        [(probs[:, event].sum(1) - reference[:, event].sum(1)).abs() for event in map(np.array, events)]
    ).amax(0)
    torch.testing.assert_close(total_variation_per_example(probs, reference), largest, atol=1e-14, rtol=0)
    assert largest.min() > 0


def test_vectors_mean_class_1_and_shapes_must_agree() -> None:
    probs, reference = torch.tensor([0.9, 0.2]), torch.tensor([0.6, 0.7])
    assert agreement(probs, reference) == 0.5
    assert total_variation(probs, reference) == pytest.approx(0.4)
    with pytest.raises(DataError, match="one shape"):
        agreement(torch.full((3, 2), 0.5), torch.full((3, 4), 0.25))
    with pytest.raises(DataError, match="softmax"):
        total_variation(rows(3, 4), rows(3, 4))
    with pytest.raises(DataError, match="same rows"):
        wasserstein2(rows(5, 3), rows(5, 4))


@pytest.mark.parametrize(("count", "others"), [(7, 7), (4, 6), (5, 3), (1, 8)])
def test_wasserstein_against_the_optimal_assignment(count: int, others: int) -> None:
    draws, reference = rows(count, 3, 2), 0.5 + 2 * rows(others, 3, 2, seed=1)
    both = math.lcm(count, others)  # copies of draws, so that each has a partner
    truth = np.empty((3, 2))
    for index in np.ndindex(3, 2):
        x = np.repeat(draws[(slice(None), *index)].numpy(), both // count)
        y = np.repeat(reference[(slice(None), *index)].numpy(), both // others)
        cost = (x[:, None] - y) ** 2
        truth[index] = math.sqrt(cost[linear_sum_assignment(cost)].mean())
    np.testing.assert_allclose(wasserstein2_per_example(draws, reference), truth, rtol=1e-12)
    assert wasserstein2(draws, reference) == pytest.approx(truth.mean(), rel=1e-12)


def test_wasserstein_of_normals_is_the_closed_form() -> None:
    """W₂² = (m − n)² + (s − t)², from quantiles in place of draws."""
    levels = (np.arange(20_000) + 0.5) / 20_000
    draws = torch.as_tensor(norm.ppf(levels, 1.0, 0.5))[:, None]
    reference = torch.as_tensor(norm.ppf(levels, -1.0, 2.0))[:, None]
    assert wasserstein2(draws, reference) == pytest.approx(math.hypot(2.0, 1.5), rel=1e-4)
