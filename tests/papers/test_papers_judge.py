"""Rows, verdicts and claims against numbers worked out by hand."""

import math

import pytest
from papers_examples import ERROR, experiment, table

from dubito.errors import DataError
from dubito.metrics import Estimate, Over
from papers.runner import Cell, Outcome, Published, Results, judged, rows
from papers.runner.judge import verdict
from papers.runner.store import Spent

SPENT = Spent(cpu_seconds=1.0, peak_memory_bytes=None, together=(0,))


def runs(value: float, error: float, over: Over = Over.RUNS) -> Estimate:
    return Estimate(value=value, standard_error=error, over=over)


def filled(folder, shown, values: dict[tuple[str, str], list[float]], scale: str = "paper") -> Results:
    results = Results(folder=folder)
    for (data, method), series in values.items():
        for split, value in enumerate(series):
            outcome = Outcome(metrics={"error": value, "score": -value})
            results.write(shown.experiment, scale, Cell(data, method, split), outcome, SPENT)
    return results


@pytest.mark.parametrize(
    ("ours", "lower", "expected"),
    [
        (10.0, True, "within 2"),
        (11.0, True, "within 2"),  # 1.0 = 2 · hypot(0.3, 0.4)
        (11.001, True, "worse"),
        (8.999, True, "better"),
        (11.001, False, "better"),
        (8.999, False, "worse"),
    ],
)
def test_verdicts_count_combined_standard_errors(ours, lower, expected):
    assert verdict(runs(ours, 0.3), runs(10.0, 0.4), lower_is_better=lower) == expected


def test_kinds_of_standard_errors_are_never_mixed():
    with pytest.raises(DataError, match="one kind"):
        verdict(runs(1.0, 0.1), runs(1.0, 0.1, Over.EXAMPLES), lower_is_better=True)


def test_rows_hold_mean_and_standard_error_over_runs(tmp_path):
    shown = table(metrics=(ERROR,))
    results = filled(tmp_path, shown, {("alpha", "one"): [2.0, 3.0, 4.0, 7.0]})
    row = next(row for row in rows(shown, "paper", results) if (row.data, row.method) == ("alpha", "one"))
    assert row.ours == 4.0
    assert row.ours_se == pytest.approx(math.sqrt((4 + 1 + 0 + 9) / 3 / 4))
    assert (row.n, row.paper, row.paper_se) == (4, 2.5, 0.5)
    assert row.verdict == "within 2"  # 1.5 < 2 · hypot(1.08, 0.5)


def test_without_a_standard_error_of_the_same_kind_there_is_no_verdict(tmp_path):
    shown = table(metrics=(ERROR,))
    series = [2.0, 3.0, 4.0, 7.0]
    results = filled(tmp_path, shown, {("alpha", "two"): series, ("beta", "one"): series})
    found = {(row.data, row.method): row for row in rows(shown, "paper", results)}
    assert found["alpha", "two"].paper == 2.5  # a number without ±
    assert found["beta", "one"].paper == 2.5  # ± over examples
    for row in (found["alpha", "two"], found["beta", "one"]):
        assert row.ours == 4.0
        assert row.paper_se is None
        assert row.verdict is None
    assert found["beta", "two"].ours is None
    assert (found["beta", "two"].n, found["beta", "two"].paper) == (0, None)


def test_a_single_run_has_no_standard_error_and_no_verdict(tmp_path):
    shown = table(metrics=(ERROR,))
    results = filled(tmp_path, shown, {("alpha", "one"): [2.0]})
    row = rows(shown, "paper", results)[0]
    assert (row.ours, row.ours_se, row.n, row.verdict) == (2.0, None, 1, None)


def test_at_a_smaller_scale_the_papers_column_is_empty(tmp_path):
    shown = table(metrics=(ERROR,))
    results = filled(tmp_path, shown, {("alpha", "one"): [2.0, 3.0]}, scale="small")
    row = rows(shown, "small", results)[0]
    assert (row.ours, row.n) == (2.5, 2)
    assert (row.paper, row.paper_se, row.verdict) == (None, None, None)


def test_a_part_is_read_from_the_part_alone(tmp_path):
    shown = table(metrics=(ERROR,))
    results = filled(tmp_path, shown, {("alpha", "one"): [2.0, 3.0, 4.0, 7.0], ("beta", "one"): [1.0, 1.0]})
    cells = shown.experiment.scales["paper"].select(data=["alpha"], methods=["one"], splits=[0, 1])
    (row,) = rows(shown, "paper", results, cells)
    assert (row.ours, row.n) == (2.5, 2)


def test_data_of_another_name_get_no_number_of_the_paper(tmp_path):
    shown = table(experiment(data=("alpha-substitute",)), metrics=(ERROR,))
    results = filled(tmp_path, shown, {("alpha-substitute", "one"): [2.0, 3.0]})
    assert all(row.paper is None for row in rows(shown, "paper", results))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0], [1.5, 2.6, 3.4, 4.5], "holds"),
        ([1.5, 2.6, 3.4, 4.5], [1.0, 2.0, 3.0, 4.0], "contradicted"),
        ([1.0, 2.0, 3.0, 4.0], [1.5, 1.5, 3.5, 3.5], "open"),
        ([1.0, 2.0, 3.0], [1.1, 2.5, 3.9], "open"),  # all three agree, and Student's interval holds 0
        ([1.0, 2.0], [2.0, 3.0], "open"),
        ([1.0], [2.0], "open"),
        ([1.0, 2.0], [], "not run"),
    ],
)
def test_claims_are_judged_by_paired_differences(tmp_path, first, second, expected):
    """Unpaired, differences of 0.5 would vanish in a spread of 1.3 among splits."""
    shown = table()
    results = filled(tmp_path, shown, {("alpha", "one"): first, ("alpha", "two"): second})
    found = {each.data: each for each in judged(shown, "paper", results)}
    assert found["alpha"].verdict == expected
    assert found["alpha"].n == min(len(first), len(second))
    assert found["beta"].verdict == "not run"
    if found["alpha"].difference is not None:
        expected_difference = sum(first) / len(first) - sum(second) / len(second)
        assert found["alpha"].difference.difference == pytest.approx(expected_difference)


def test_claims_of_higher_scores_turn_the_sign(tmp_path):
    claim = table().claims[0]
    flipped = type(claim)(text="", metric="score", better="one", than="two", data=("alpha",))
    shown = table(claims=(flipped,))
    values = {("alpha", "one"): [1.0, 2.0, 3.0], ("alpha", "two"): [1.5, 2.6, 3.4]}  # score = -value
    results = filled(tmp_path, shown, values)
    assert judged(shown, "paper", results)[0].verdict == "holds"


def test_claims_are_asked_only_of_the_data_asked_for(tmp_path):
    shown = table()
    cells = shown.experiment.scales["paper"].select(data=["beta"])
    assert [each.data for each in judged(shown, "paper", Results(folder=tmp_path), cells)] == ["beta"]


def test_published_zero_errors_still_give_verdicts(tmp_path):
    shown = table(published={("alpha", "one", "error"): Published(2.5, 0.0, Over.RUNS)}, metrics=(ERROR,))
    results = filled(tmp_path, shown, {("alpha", "one"): [2.0, 2.1]})
    assert rows(shown, "paper", results)[0].verdict == "better"
