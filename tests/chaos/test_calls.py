"""A part of the campaign of bad calls; `make chaos` runs all of it."""

from collections import Counter

from dubito import plot

from . import calls

FEWEST = 1_000


def test_bad_calls_end_in_errors_of_our_own():
    counts: Counter[str] = Counter()
    report = calls.run(0.12, 0, counts)
    print("\n".join(f"{number:4d} {name}" for name, number in counts.items()))
    assert not report.failures, "\n".join(report.failures)
    assert report.cases >= FEWEST


def test_every_parameter_has_five_bad_ways():
    for target in calls.targets():
        ways = Counter(case.parameter for case in calls.cases(target))
        assert all(ways[parameter] >= 5 for parameter in target.hints), (target.name, ways)


def test_what_is_public_is_called():
    names = {target.name for target in calls.targets()}
    assert {"Method.fit", "Posterior.predict", "Posterior.evaluate", "dubito.Laplace", "dubito.metrics.ece"} <= names
    assert {f"dubito.plot.{name}" for name in vars(plot) if callable(getattr(plot, name))} - names <= {
        "dubito.plot.explained_variance"  # of a spectrum, which `NormalPosterior.spectrum` makes
    }
