"""A small part of the campaign of kills."""

from tests.chaos import kills


def test_what_is_killed_is_not_lost():
    report = kills.run(0.01, seed=0)
    assert report.failures == [] and report.outcomes["SIGKILL with equal bits"] >= 2


def test_workers_end_with_their_parent_and_are_replaced():
    for number in (0, 1):  # the parent is killed, then a worker
        report = kills.orphans(kills._reproduced, number, seed=0)
        assert report.failures == [] and report.cases == 1
