"""The page that ranks: sentences on planted results are what their numbers say, and nothing is needed to build it."""

import re

import pytest

from papers.references import gap_page, page, ranking
from papers.references.ranking import SOURCES, Board, Row, Source, Span, ranked, sentence, spanned

DISTANCE = Source(table="planted", metric="total_variation", title="distance", margin=0.005, floor="hmc")


def row(*values: float, nbytes: float | None = 1e6, seconds: float | None = 10.0) -> Row:
    return Row(values={("imdb", 0, seed): value for seed, value in enumerate(values)}, nbytes=nbytes, seconds=seconds)


PLANTED = {
    "hmc": row(0.04, 0.05, 0.06),
    "deep-ensemble": row(0.100, 0.110, 0.120, nbytes=4e6, seconds=40.0),
    "laplace-inf": row(0.101, 0.1105, 0.1215, nbytes=2e6, seconds=12.0),  # farther by 0.001 on every seed
    "rank1": row(0.160, 0.090, 0.150, nbytes=1.2e6, seconds=90.0),  # by 0.023 ± 0.1
    "map": row(0.200, 0.212, 0.219, nbytes=1e6),
    "swag": row(0.25, nbytes=5e6, seconds=20.0),
}


@pytest.fixture
def board() -> Board:
    return ranked(DISTANCE, PLANTED)


def test_ranks_and_statuses_follow_the_intervals(board):
    assert [(each.method, each.rank, each.status) for each in board.standings] == [
        ("deep-ensemble", 1, "nearest"),
        ("laplace-inf", 2, "ties"),
        ("rank1", 3, "open"),
        ("map", 4, "farther"),
        ("swag", 5, "one run"),
    ]
    assert board.floor is not None and board.floor.span.value == pytest.approx(0.05)


def test_sentences_say_what_the_numbers_say(board):
    told = {each.method: sentence(each, board) for each in board.standings}
    assert told["deep-ensemble"] == "Closest of 5, 2.2× as far as the reference is from itself."
    assert told["laplace-inf"].startswith("Ties with deep-ensemble: a difference within 0.005.")
    assert told["laplace-inf"].endswith("nothing as small or as fast is closer.")
    assert told["rank1"].startswith("No difference from deep-ensemble shown.")
    assert "nothing as small is closer; deep-ensemble is closer and as fast." in told["rank1"]
    assert re.match(r"Farther than deep-ensemble by 0\.09\d+ to 0\.1\d+\.", told["map"])
    assert told["swag"].startswith("By 0.150 farther than deep-ensemble: too few runs")
    assert "deep-ensemble is closer and as small; laplace-inf is closer and as fast." in told["swag"]


def test_where_higher_is_nearer_the_order_turns():
    source = Source(table="planted", metric="agreement", title="agreement", margin=0.005, lower_is_better=False)
    board = ranked(source, {"map": row(0.80, 0.81, 0.82), "rank1": row(0.90, 0.915, 0.92)})
    assert [each.method for each in board.standings] == ["rank1", "map"]
    assert board.standings[1].status == "farther" and board.standings[1].gap.value == pytest.approx(0.305 / 3)


def test_equals_tie_and_neither_is_nearer():
    board = ranked(DISTANCE, {"map": row(0.1, 0.2), "swa": row(0.1, 0.2, nbytes=2e6)})
    second = board.standings[1]
    assert (second.status, second.gap) == ("ties", Span(value=0.0, half=0.0))
    assert "nothing as small or as fast is closer" in sentence(second, board)


def test_means_are_over_data_sets_and_their_variances_add_up():
    values = {("a", 0, 0): 1.0, ("a", 1, 0): 3.0, ("b", 0, 0): 10.0, ("b", 1, 0): 10.0, ("b", 2, 0): 16.0}
    span = spanned(values)
    assert span.value == pytest.approx((2 + 12) / 2)
    error = (2 / 2 + 12 / 3) ** 0.5 / 2
    assert span.half == pytest.approx(12.706205 * error)  # t of one degree of freedom, of "a"
    assert spanned({("a", 0, 0): 1.0, ("b", 0, 0): 2.0}).half is None


def test_a_method_that_lacks_a_data_set_has_no_rank():
    far = Row(values={("imdb", 0, 0): 0.5, ("cifar", 0, 0): 0.5})
    board = ranked(DISTANCE, {"map": far, "swag": Row(values={("imdb", 0, 0): 0.01})})
    assert [each.method for each in board.standings] == ["map"] and board.incomplete == ["swag"]
    assert "lack a data set: swag" in page.section(board)


def test_pages_hold_every_method_and_every_sentence(board):
    markdown, html = page.page([board]), page.charts([board])
    for each in board.standings:
        assert re.search(rf"^\| {each.method} \|.* \| {re.escape(sentence(each, board))} \|$", markdown, re.MULTILINE)
        assert html.count(f'data-name="{each.method}"') >= 3  # in every chart
    assert "| hmc, against itself |" in markdown and html.count("<svg") == 3
    assert not re.search(r'(?:src|href)="?https?:', html)
    bare = ranked(DISTANCE, {"map": row(0.1, nbytes=None), "swa": row(0.2, nbytes=None)})
    assert page.charts([bare]).count("<svg") == 2  # no chart of bytes without bytes


def test_without_results_the_pages_say_what_to_run(tmp_path):
    made = ranking.boards(page.Results(folder=tmp_path))
    assert made == []
    markdown, html = page.page(made, page.Results(folder=tmp_path)), page.charts(made)
    assert ranking.command("sbc") in markdown
    for source in SOURCES:
        assert ranking.command(source.table) in markdown
        assert f"&#x27;{source.table} *&#x27;" in html
    assert page.NOTHING in markdown and page.NOTHING in html


def test_the_pages_are_those_of_what_is_stored():
    made = ranking.boards()
    assert page.PAGE.read_text(encoding="utf-8") == page.page(made)
    assert page.CHARTS.read_text(encoding="utf-8") == page.charts(made)
    assert page.TABLES.read_text(encoding="utf-8") == page.tabular_page.page()


def test_methods_beside_map_are_paired_by_split_and_table():
    """Closed forms: a method that is 0.5 better everywhere, and one that is 1 better and 1 worse by turns."""
    keys = [(data, split, 0) for data in gap_page.WITH_GAPS for split in range(gap_page.SPLITS[data])]
    base = {key: float(len(key[0]) + key[1]) for key in keys}
    changes = {"map": lambda split: 0.0, "swag": lambda split: 0.5, "bali": lambda split: (-1.0) ** split}
    names = ("log_likelihood_inside", "log_likelihood_outside", "coverage_90_inside", "coverage_90_outside")
    read = {
        method: {name: {key: value + change(key[1]) for key, value in base.items()} for name in names}
        for method, change in changes.items()
    }
    gap = gap_page.less(read, "swag", "inside")
    assert (gap.value, gap.half) == (pytest.approx(0.5), pytest.approx(0.0, abs=1e-12)) and gap_page.sign(gap) == 1
    turns = gap_page.less(read, "bali", "inside", "naval")  # 14 splits, seven of either sign
    assert turns.value == pytest.approx(0.0) and turns.half == pytest.approx(
        2.1604 * (14 / 13) ** 0.5 / 14**0.5, rel=1e-4
    )
    lines = gap_page.overall(read, list(changes)).splitlines()
    assert lines[2].startswith("| swag |") and "9 : 0" in lines[2]
    assert gap_page.by_table(read, list(changes)).count("**0.500") == 9
