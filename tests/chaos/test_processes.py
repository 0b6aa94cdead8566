"""A small part of the campaign of processes: every fault once."""

from tests.chaos import processes


def test_no_process_waits_for_a_peer_that_is_gone_or_goes_on_beside_one_that_differs():
    report = processes.run(0.0, seed=0)
    assert report.failures == [] and report.cases == len(processes.FAULTS)
