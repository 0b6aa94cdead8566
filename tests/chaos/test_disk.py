"""A small part of the campaign of full disks, several writers and odd paths."""

from .disk import run


def test_the_old_file_stays_whatever_the_disk_does():
    report = run(size=0.1, seed=1)
    assert report.failures == []
    assert report.outcomes["own error"] > 40 and report.outcomes["link followed"] == 2
    assert report.outcomes["written beside others"] > 0 and report.outcomes["read whole"] > 0
