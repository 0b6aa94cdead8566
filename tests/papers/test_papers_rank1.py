"""Differences paired by patient, of the tables on rank-1 networks."""

import pytest
import torch

from dubito import DataError, metrics
from dubito.metrics import Over, paired_bootstrap
from papers.rank1.patients import patient_differences, weighted
from papers.rank1.table_4 import kept_probs
from papers.runner.experiment import Outcome


def made(seed: int, size: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    probs = torch.rand(3, size, generator=stream, dtype=torch.float64).mul(20).round().clamp(1, 19) / 20  # with ties
    return probs, (torch.rand(size, generator=stream, dtype=torch.float64) < probs[0]).long()


def test_counted_patients_are_repeated_patients():
    probs, died = made(0)
    stream = torch.Generator().manual_seed(5)
    picked = torch.randint(200, (4, 200), generator=stream)
    counts = torch.stack([torch.bincount(rows, minlength=200) for rows in picked]).double()
    found = weighted(probs, died, counts)
    for place, rows in enumerate(picked):
        for name, metric in (
            ("nll", metrics.nll),
            ("auc_pr", lambda p, y: metrics.average_precision(p, y == 1)),
            ("ece", metrics.ece),
        ):
            expected = sum(metric(each[rows], died[rows]) for each in probs) / 3
            assert float(found[name][place]) == pytest.approx(expected, rel=1e-6), name


def test_the_interval_of_a_mean_is_that_of_the_paired_bootstrap():
    (first, died), (second, _) = made(1), made(2)
    found = patient_differences(first, second, died)["nll"]
    losses = [torch.stack([metrics.nll_per_example(each, died) for each in probs]).mean(0) for probs in (first, second)]
    expected = paired_bootstrap(*losses, over=Over.EXAMPLES)
    assert found.difference == pytest.approx(expected.difference, rel=1e-9)
    # Two bootstraps of 2,000 resamples: their errors differ by about 2 %, their ends by 0.085 of an error.
    assert found.standard_error == pytest.approx(expected.standard_error, rel=0.1)
    for name in ("lower", "upper"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=0.35 * expected.standard_error)
    with pytest.raises(DataError, match=r"second must be \[seeds, 200\], got \[3, 7\]"):
        patient_differences(first, second[:, :7], died)


def test_probabilities_that_were_rounded_away_have_a_finite_loss():
    kept = kept_probs([Outcome(metrics={}, details={"probs": [0.0, 0.5, 1.0]})])
    assert kept.tolist() == [[5e-7, 0.5, 1 - 5e-7]]
