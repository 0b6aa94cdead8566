"""Result files: whole, stable, refused when altered, silent when of other settings."""

import json
import math
from pathlib import Path

import pytest
from papers_examples import experiment

from dubito.errors import StorageError
from papers.runner import Cell, Outcome, Results, tables
from papers.runner.store import PAPERS, Spent

CELL = Cell("alpha", "one", 2, 1)
FOUND = Outcome(metrics={"score": -2.0, "error": 1.5}, details={"rate": 0.1})
SPENT = Spent(cpu_seconds=1.25, peak_memory_bytes=1024, together=(2,))


def written(folder: Path, **changes) -> Path:
    return Results(folder=folder).write(experiment(), "paper", CELL, FOUND, SPENT)


def test_a_result_comes_back(tmp_path):
    path = written(tmp_path)
    assert path == tmp_path / "toys" / "results" / "toy" / "alpha" / "one" / "split-2-seed-1.json"
    assert Results(folder=tmp_path).read(experiment(), "paper", CELL) == FOUND


def test_a_result_says_how_it_was_made(tmp_path):
    content = json.loads(written(tmp_path).read_text())
    assert content["metrics"] == {"error": 1.5, "score": -2.0}
    assert content["settings"] == {"type": "Toy", "base": 1.0, "wait": 0.0}
    assert content["cell"] == {"data": "alpha", "method": "one", "split": 2, "seed": 1}
    assert content["versions"].keys() == {"dubito", "numpy", "python", "torch"}
    assert content["cpu_seconds"] == 1.25
    assert content["peak_memory_bytes"] == 1024


def test_files_are_stable_with_sorted_keys_and_nothing_beside_them(tmp_path):
    path = written(tmp_path)
    first = path.read_bytes()
    assert written(tmp_path).read_bytes() == first
    assert json.dumps(json.loads(first), indent=1, sort_keys=True) + "\n" == first.decode()
    assert list(path.parent.iterdir()) == [path]


def test_results_of_other_settings_are_not_shown(tmp_path):
    written(tmp_path)
    results = Results(folder=tmp_path)
    assert results.read(experiment(base=2.0), "paper", CELL) is None
    assert results.read(experiment(revision=2), "paper", CELL) is None
    assert results.read(experiment(), "small", CELL) is None
    assert results.read(experiment(), "paper", Cell("alpha", "one", 0, 1)) is None


def test_scales_do_not_share_files(tmp_path):
    results = Results(folder=tmp_path)
    paths = {results.path(experiment(), scale, CELL) for scale in ("paper", "small")}
    assert len(paths) == 2


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"format": 1}', '{"format": 2}', "\udcff"],
    ids=["empty", "cut", "list", "no fields", "format alone", "later format", "not text"],
)
def test_altered_files_are_refused_by_name(tmp_path, content):
    path = written(tmp_path)
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(StorageError, match=r"split-2-seed-1\.json"):
        Results(folder=tmp_path).read(experiment(), "paper", CELL)


def test_numbers_that_are_not_finite_are_not_kept(tmp_path):
    results = Results(folder=tmp_path)
    for value in (math.nan, math.inf):
        with pytest.raises(StorageError, match="not finite"):
            results.write(experiment(), "paper", CELL, Outcome(metrics={"error": value}), SPENT)
    assert list(tmp_path.rglob("*.json")) == []


def test_a_failed_write_leaves_the_old_result(tmp_path, monkeypatch):
    path = written(tmp_path)
    first = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(StorageError, match=r"no space.*--results"):
        Results(folder=tmp_path).write(experiment(), "paper", CELL, Outcome(metrics={"error": 9.0}), SPENT)
    monkeypatch.undo()
    assert path.read_bytes() == first
    assert list(path.parent.iterdir()) == [path]


def test_results_lie_in_the_folder_of_their_paper():
    path = Results().path(experiment(), "small", CELL)
    assert path == PAPERS / "toys" / "results" / "toy-small" / "alpha" / "one" / "split-2-seed-1.json"
    assert Path(__file__).parents[2] / "papers" == PAPERS


def test_committed_results_are_of_the_settings_of_today():
    """Whoever changes settings or the code behind them runs the results again."""
    by_folder = {}
    for table in tables().values():
        for scale in table.experiment.scales:
            for cell in table.experiment.scales[scale].cells:
                path = Results().path(table.experiment, scale, cell)
                by_folder[path] = table.experiment, scale, cell
    stored = list(PAPERS.glob("*/results/**/*.json"))
    assert len(stored) > 2_000
    assert set(stored) <= by_folder.keys()
    for path in stored:
        assert Results().read(*by_folder[path]) is not None, path
