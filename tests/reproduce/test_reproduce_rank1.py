"""Differences paired by patient, and noise in images, of the tables on rank-1 and implicit networks."""

import pytest
import torch

from dubito.metrics import Over
from dubito.reproduce.experiment import Outcome
from dubito.reproduce.implicit_images import corrupted
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


def test_noise_in_images():
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert torch.equal(corrupted(images, "gaussian", 0.0, 1), images)
    assert torch.equal(corrupted(images, "salt-and-pepper", 0.0, 1), images)
    mixed = corrupted(images, "gaussian", 0.4, 1)
    noise = (mixed - 0.6 * images) / 0.4
    assert float(noise.mean()) == pytest.approx(0, abs=0.1) and float(noise.std()) == pytest.approx(
        1, abs=0.1
    )
    specked = corrupted(images, "salt-and-pepper", 0.3, 1)
    changed = specked != images
    assert float(changed.float().mean()) == pytest.approx(0.3, abs=0.04)
    assert set(specked[changed].unique().tolist()) == {0.0, 1.0}
    assert float(specked[changed].mean()) == pytest.approx(0.5, abs=0.06)
