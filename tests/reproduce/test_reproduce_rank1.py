"""Differences paired by patient, of the tables on rank-1 networks."""

import pytest
import torch

from dubito.metrics import Over
from dubito.reproduce.experiment import Outcome
from dubito.reproduce.rank1_clinical import patient_difference


def outcome(probs: list[float]) -> Outcome:
    return Outcome(metrics={}, details={"probs": probs})


def test_patients_losses_are_means_over_seeds():
    died = torch.tensor([1, 0, 0])
    first = [outcome([0.5, 0.2, 0.2]), outcome([0.8, 0.2, 0.2])]
    second = [outcome([0.5, 0.2, 0.0]), outcome([0.5, 0.2, 0.2])]
    found = patient_difference(first, second, died)
    least = 5e-7  # a kept probability of 0 stands for all that are rounded to it
    expected = [
        -(torch.tensor(0.5).log() + torch.tensor(0.8).log()) / 2 + torch.tensor(0.5).log(),
        torch.tensor(0.0),
        -torch.tensor(0.8).log() / 2 + torch.log1p(torch.tensor(-least)) / 2,
    ]
    assert found.difference == pytest.approx(float(sum(expected)) / 3, rel=1e-5)
    assert found.over is Over.EXAMPLES and found.lower <= found.difference <= found.upper
