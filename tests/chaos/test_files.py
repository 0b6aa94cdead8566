"""A small part of the campaign of mutated files."""

from .files import run


def test_no_mutation_ends_in_foreign_errors_or_silent_nan():
    report = run(size=0.04, seed=1)
    assert report.failures == [] and report.outcomes["own error"] > 100
