"""What BALI's cost curves count."""

import pytest

from papers.bali import costs


def test_operations_are_those_of_appendix_d():
    """By hand for 64 inputs, width 1, 10 classes and a batch of 2: 64 to 1, 1 to 1, 1 to 10."""
    squares = (64**2 + 64 + 1) + 3 + (1 + 10 + 100)
    cubes = (64**3 + 1 + 64**2 + 64) + 4 + (1 + 1000 + 10 + 100)
    assert costs.operations(1, 2) == 2 * squares + cubes


def test_a_step_is_timed_and_its_growth_told(monkeypatch: pytest.MonkeyPatch):
    spent = iter([9.0, 1.0, 3.0, 1.0, 5.0, 1.0, 4.0])  # a run that warms up, then pairs that differ by 2, 4 and 3
    monkeypatch.setattr(costs, "seconds", lambda *place: next(spent))
    assert costs.step_seconds(8, 4, 16, pairs=3, steps=(2, 4)) == 1.5
    points = [{"width": 2, "milliseconds": 1.0}, {"width": 4, "milliseconds": 8.0}]
    assert costs.growth(points, "width", "milliseconds") == pytest.approx(3.0)
