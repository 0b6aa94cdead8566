"""Detection metrics against scikit-learn, and fpr95 against counting at every threshold."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from dubito.errors import DataError
from dubito.metrics import auroc, average_precision, fpr95

# torchmetrics divides its counts in float32.
ROUNDING = 5e-7


def direct_fpr95(scores: list[float], positives: list[int]) -> float:
    """Lower the threshold until 95 % of the positives are found, in whole numbers: 100 TP >= 95 P."""
    found = [score for score, positive in zip(scores, positives, strict=True) if positive]
    others = [score for score, positive in zip(scores, positives, strict=True) if not positive]
    for threshold in sorted(set(scores), reverse=True):
        if 100 * sum(score >= threshold for score in found) >= 95 * len(found):
            return sum(score >= threshold for score in others) / len(others)
    raise AssertionError("the lowest threshold finds every positive")


# Few distinct values, so that most draws hold ties within and across the two kinds.
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(-6, 6), st.booleans()), min_size=2, max_size=60))
def test_against_references_with_ties(pairs: list[tuple[int, bool]]) -> None:
    pairs = [*pairs, (0, True), (1, False)]  # both kinds occur
    scores, positives = [float(score) for score, _ in pairs], [int(positive) for _, positive in pairs]
    tensors = torch.tensor(scores), torch.tensor(positives)
    assert auroc(*tensors) == pytest.approx(roc_auc_score(positives, scores), abs=ROUNDING)
    reference = average_precision_score(positives, scores)
    assert average_precision(*tensors) == pytest.approx(reference, abs=ROUNDING)
    assert fpr95(*tensors) == pytest.approx(direct_fpr95(scores, positives), abs=ROUNDING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_scores(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    positives = torch.rand(20_000, generator=generator) < 0.2
    scores = torch.randn(20_000, generator=generator, dtype=dtype) + positives
    assert auroc(scores, positives) == pytest.approx(roc_auc_score(positives, scores), abs=ROUNDING)
    reference = average_precision_score(positives, scores)
    assert average_precision(scores, positives) == pytest.approx(reference, abs=ROUNDING)


def test_all_scores_tied() -> None:
    scores, positives = torch.ones(10), torch.tensor([1] * 4 + [0] * 6)
    assert auroc(scores, positives) == 0.5
    assert average_precision(scores, positives) == pytest.approx(0.4)
    assert fpr95(scores, positives) == 1.0


def test_perfect_and_reversed_scores() -> None:
    positives = torch.tensor([False, False, True, True])
    scores = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert (auroc(scores, positives), average_precision(scores, positives), fpr95(scores, positives)) == (1, 1, 0)
    assert (auroc(-scores, positives), fpr95(-scores, positives)) == (0, 1)


def test_large_and_infinite_scores_keep_their_order() -> None:
    # A sigmoid would merge 50 and 60 in float32, and the difference of two infinities is no number.
    scores = torch.tensor([60.0, 50.0, -math.inf, -math.inf, math.inf, math.inf])
    positives = torch.tensor([1, 0, 0, 1, 1, 0])
    finite = torch.tensor([3.0, 2.0, 1.0, 1.0, 4.0, 4.0])
    assert auroc(scores, positives) == pytest.approx(roc_auc_score(positives, finite), abs=ROUNDING)
    assert average_precision(scores, positives) == pytest.approx(average_precision_score(positives, finite))
    assert fpr95(scores, positives) == 1.0


@pytest.mark.parametrize("num_positives", [20, 40, 60, 100, 1000])
def test_fpr95_counts_exactly_95_percent_as_reached(num_positives: int) -> None:
    # Positives hold the top 95 %, then one negative of four, then the other positives.
    found = num_positives * 95 // 100
    scores = torch.arange(num_positives + 4, dtype=torch.float32).flip(0)
    positives = torch.tensor([1] * found + [0] + [1] * (num_positives - found) + [0] * 3)
    assert fpr95(scores, positives) == 0.0
    one_less = positives.clone()
    one_less[[found - 1, found]] = torch.tensor([0, 1])  # the negative comes before the last of the 95 %
    assert fpr95(scores, one_less) == 0.25


def test_fpr95_does_not_split_ties() -> None:
    scores = torch.tensor([3.0, 2.0, 2.0, 2.0, 1.0])
    positives = torch.tensor([1, 1, 0, 0, 0])
    assert fpr95(scores, positives) == pytest.approx(2 / 3)


def test_a_class_absent() -> None:
    scores = torch.tensor([0.1, 0.9])
    for metric in (auroc, average_precision, fpr95):
        with pytest.raises(DataError, match="at least one positive"):
            metric(scores, torch.tensor([0, 0]))
    for metric in (auroc, fpr95):
        with pytest.raises(DataError, match="at least one negative"):
            metric(scores, torch.tensor([1, 1]))
    assert average_precision(scores, torch.tensor([1, 1])) == average_precision_score([1, 1], scores) == 1.0


@pytest.mark.parametrize(
    ("scores", "positives", "message"),
    [
        (torch.tensor([0.1, float("nan")]), torch.tensor([0, 1]), "NaN"),
        (torch.empty(0), torch.empty(0, dtype=torch.bool), "at least one value"),
        (torch.tensor([0.1, 0.2]), torch.tensor([0, 1, 1]), "one shape"),
        (torch.tensor([[0.1], [0.2]]), torch.tensor([[0], [1]]), "flatten"),
        (torch.tensor([0.1, 0.2]), torch.tensor([0.0, 1.0]), "booleans"),
        (torch.tensor([0.1, 0.2]), torch.tensor([1, 2]), "only 0 and 1"),
        (torch.tensor([0.1, 0.2]), [0, 1], "tensor"),
    ],
)
@pytest.mark.parametrize("metric", [auroc, average_precision, fpr95])
def test_bad_inputs_are_refused(metric, scores, positives, message: str) -> None:
    with pytest.raises(DataError, match=message):
        metric(scores, positives)


def test_importing_metrics_loads_no_heavy_package() -> None:
    heavy = "{'torchmetrics', 'sklearn', 'scipy', 'pandas'}"
    code = f"import sys, dubito.metrics; sys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
