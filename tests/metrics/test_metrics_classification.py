"""Classification metrics against scikit-learn and direct formulas."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from dubito.errors import DataError
from dubito.metrics import (
    accuracy,
    brier,
    brier_per_example,
    correct_per_example,
    nll,
    nll_per_example,
    normalised_entropy,
    normalised_entropy_per_example,
)

# float32 rounds each probability to 6e-8 of itself; the mean of 200 terms of order 1 keeps about that.
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def problem(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(200, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(4, (200,), generator=generator)  # class 4 never occurs
    return logits.softmax(-1).to(request.param), targets


def test_against_scikit_learn_with_a_class_absent(problem: tuple[torch.Tensor, torch.Tensor]) -> None:
    probs, targets = problem
    tolerance = TOLERANCE[probs.dtype]
    exact = probs.double().numpy()
    exact = exact / exact.sum(1, keepdims=True)  # scikit-learn wants sums of 1 in float64
    labels = targets.numpy()
    assert accuracy(probs, targets) == accuracy_score(labels, exact.argmax(1))
    assert nll(probs, targets) == pytest.approx(log_loss(labels, exact, labels=range(5)), rel=tolerance)
    reference = brier_score_loss(labels, exact, labels=range(5), scale_by_half=False)
    assert brier(probs, targets) == pytest.approx(reference, rel=tolerance)
    reference = entropy(exact, axis=1).mean() / np.log(5)
    assert normalised_entropy(probs) == pytest.approx(reference, rel=tolerance)


def test_binary_vector_means_the_same_as_two_columns() -> None:
    generator = torch.Generator().manual_seed(1)
    probs = torch.rand(50, generator=generator, dtype=torch.float64)
    targets = torch.randint(2, (50,), generator=generator)
    columns = torch.stack((1 - probs, probs), -1)
    for metric in (accuracy, nll, brier):
        assert metric(probs, targets) == metric(columns, targets)
        assert metric(probs, targets.bool()) == metric(columns, targets)
    assert normalised_entropy(probs) == normalised_entropy(columns)
    # The one-column score of scikit-learn's default is half the sum over both columns.
    half = brier_score_loss(targets.numpy(), probs.numpy(), scale_by_half=True)
    assert brier(probs, targets) == pytest.approx(2 * half, rel=1e-12)
    assert nll(probs, targets) == pytest.approx(log_loss(targets.numpy(), probs.numpy()), rel=1e-12)


def test_accuracy_is_exact_and_ties_go_to_the_lower_label() -> None:
    probs = torch.tensor([[0.4, 0.4, 0.2], [0.2, 0.4, 0.4], [1.0, 0.0, 0.0]])
    assert accuracy(probs, torch.tensor([0, 1, 1])) == 2 / 3
    assert correct_per_example(probs, torch.tensor([1, 2, 0])).tolist() == [False, False, True]
    assert correct_per_example(torch.tensor([0.5, 0.5]), torch.tensor([0, 1])).tolist() == [True, False]


def test_probabilities_of_exactly_0_and_1() -> None:
    probs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    right, wrong = torch.tensor([0, 1, 0]), torch.tensor([0, 1, 1])
    assert (accuracy(probs, right), nll(probs, right), brier(probs, right)) == (1.0, 0.0, 0.0)
    assert (accuracy(probs, wrong), nll(probs, wrong), brier(probs, wrong)) == (2 / 3, math.inf, pytest.approx(2 / 3))
    assert nll_per_example(probs, wrong).tolist() == [0.0, 0.0, math.inf]
    assert brier_per_example(probs, wrong).tolist() == [0.0, 0.0, 2.0]
    assert normalised_entropy(probs) == 0.0


def test_normalised_entropy_runs_from_0_to_1() -> None:
    probs = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]])
    torch.testing.assert_close(normalised_entropy_per_example(probs), torch.tensor([0.0, 1.0, 0.5]))


def test_half_precision_is_accepted_and_summed_in_float32() -> None:
    generator = torch.Generator().manual_seed(2)
    probs = torch.randn(3000, 10, generator=generator).softmax(-1).bfloat16()
    targets = torch.randint(10, (3000,), generator=generator)
    assert nll(probs, targets) == pytest.approx(nll(probs.float(), targets), abs=0)
    assert nll_per_example(probs, targets).dtype == torch.float32


def test_inputs_with_gradients_are_read_only() -> None:
    probs = torch.tensor([[0.3, 0.7]], requires_grad=True)
    assert not nll_per_example(probs, torch.tensor([1])).requires_grad
    assert brier(probs, torch.tensor([1])) == pytest.approx(0.18)


GOOD = torch.tensor([[0.3, 0.7], [0.6, 0.4]])


@pytest.mark.parametrize(
    ("probs", "targets", "message"),
    [
        (GOOD.tolist(), torch.tensor([0, 1]), "probs must be a tensor"),
        (GOOD, [0, 1], "targets must be a tensor"),
        (torch.empty(0, 2), torch.empty(0, dtype=torch.long), "at least one value"),
        (torch.tensor([[float("nan"), 1.0]]), torch.tensor([0]), "NaN"),
        (GOOD.log(), torch.tensor([0, 1]), "softmax"),
        (torch.tensor([[2.0, 3.0]]), torch.tensor([0]), "sum to 1"),
        (torch.tensor([[-0.2, 1.2]]), torch.tensor([0]), "at least 0"),
        (torch.tensor([-0.1, 0.5]), torch.tensor([0, 1]), "sigmoid"),
        (torch.tensor([0.1, 1.5]), torch.tensor([0, 1]), "sigmoid"),
        (torch.tensor([[0.1], [0.5]]), torch.tensor([0, 1]), "C of at least 2"),
        (GOOD[None], torch.tensor([[0, 1]]), "flatten"),
        (GOOD.to(torch.complex64), torch.tensor([0, 1]), "real numbers"),
        (GOOD, torch.tensor([0.0, 1.0]), "targets.long"),
        (GOOD, torch.tensor([0, 1, 1]), r"shape \[2\]"),
        (GOOD, torch.tensor([[1, 0], [0, 1]]), "one-hot"),
        (GOOD, torch.tensor([0, 2]), "from 0 to 1"),
        (GOOD, torch.tensor([-1, 0]), "from 0 to 1"),
    ],
)
@pytest.mark.parametrize("metric", [accuracy, nll, brier])
def test_bad_inputs_are_refused(metric, probs, targets, message: str) -> None:
    with pytest.raises(DataError, match=message):
        metric(probs, targets)
