"""The command: list, run a part, show, JSON, exit codes."""

import json

import pytest
from papers_examples import TRACE

from dubito.cli import main
from dubito.cli.common import numbers
from dubito.errors import ConfigError
from papers.runner.show import duration


@pytest.fixture(autouse=True)
def toy(monkeypatch, tmp_path):
    monkeypatch.setattr("papers.index.TABLES", {"toy-table": "papers_examples"})
    monkeypatch.setattr("papers.runner.store.Results.__init__.__kwdefaults__", {"folder": tmp_path})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(TRACE, str(tmp_path / "trace.txt"))
    return tmp_path


def test_the_list_names_all_with_their_cost(capsys):
    assert main(["reproduce", "--list"]) == 0
    shown = capsys.readouterr().out
    for piece in ("toy-table", "paper", "small", "16", "8 minutes", "2 splits for 4"):
        assert piece in shown


def test_a_part_is_run_and_its_rows_printed_as_json(capsys, toy):
    part = ["reproduce", "toy-table", "--data", "alpha", "--methods", "one", "--splits", "0-1,3", "--json"]
    assert main(part) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert list(rows[0]) == ["data", "method", "metric", "ours", "ours_se", "n", "paper", "paper_se", "verdict"]
    assert [row["metric"] for row in rows] == ["error", "score"]
    assert rows[0]["ours"] == pytest.approx((1 + 2 + 4) / 3)
    assert (rows[0]["n"], rows[0]["paper"], rows[0]["verdict"]) == (3, 2.5, "within 2")
    assert (rows[1]["paper"], rows[1]["verdict"]) == (None, None)
    assert "alpha one split 3 seed 0: error 4" in err
    assert len(list((toy / "toys" / "results" / "toy").rglob("*.json"))) == 3


def test_show_runs_nothing(capsys, toy):
    assert main(["reproduce", "toy-table", "--show", "--json"]) == 0
    assert all(row["ours"] is None and row["n"] == 0 for row in json.loads(capsys.readouterr().out))
    assert not (toy / "trace.txt").exists()
    main(["reproduce", "toy-table", "--data", "alpha"])
    before = (toy / "trace.txt").read_text()
    capsys.readouterr()
    assert main(["reproduce", "toy-table", "--show"]) == 0
    shown = capsys.readouterr().out
    assert "8 finished jobs of 16" in shown
    assert "toys are made of wood [oak]" in " ".join(shown.split())
    assert "2.500 ± 0.645" in shown
    assert "within 2 (+0.0)" in shown
    assert "one errs less" in shown
    assert "holds" in shown
    assert "not run" in shown
    assert (toy / "trace.txt").read_text() == before


def test_a_smaller_scale_says_so_and_shows_no_number_of_the_paper(capsys):
    assert main(["reproduce", "toy-table", "--scale", "small"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "smaller than the paper's: 2 splits for 4" in shown
    assert "one errs less" in shown and "holds" not in shown  # two pairs of runs claim nothing
    assert "within" not in shown
    assert "the paper's ±" not in shown


def test_results_go_where_they_are_asked_to(toy):
    elsewhere = toy / "elsewhere"
    main(["reproduce", "toy-table", "--data", "beta", "--splits", "0", "--results", str(elsewhere)])
    assert len(list((elsewhere / "toys" / "results").rglob("*.json"))) == 2
    assert not (toy / "toys").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs a name"),
        (["toy-tabel"], "did you mean 'toy-table'"),
        (["toy-table", "--splits", "4"], "split must be from 0 to 3"),
        (["toy-table", "--splits", "x"], "like 0-4,7"),
        (["toy-table", "--data", "gamma"], "unknown data 'gamma'"),
        (["toy-table", "--scale", "huge"], "unknown scale"),
        (["toy-table", "--backend", "slurm"], "unknown backend"),
    ],
)
def test_wrong_calls_end_with_a_line_and_code_1(capsys, arguments, message):
    assert main(["reproduce", *arguments]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_failed_jobs_give_code_1(monkeypatch, capsys):
    from papers_examples import experiment, table

    broken = table(experiment(data=("broken",), splits=2), published={}, claims=())
    monkeypatch.setattr("papers_examples.TABLES", (broken,))
    assert main(["reproduce", "toy-table"]) == 1
    assert "broken one split 0 seed 0: failed: broken data" in capsys.readouterr().out


def test_ranges_of_numbers():
    assert numbers("0-4") == [0, 1, 2, 3, 4]
    assert numbers("7, 1-2,2") == [7, 1, 2]
    for wrong in ("", "-1", "3-1", "a", "1-", "1,,2"):
        with pytest.raises(ConfigError):
            numbers(wrong)


def test_durations_are_told_in_fitting_units():
    assert duration(20) == "20 seconds"
    assert duration(600) == "10 minutes"
    assert duration(7200) == "2 hours"
    assert duration(10 * 86_400) == "10 days"
