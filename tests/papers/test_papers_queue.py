"""The queue: ranked by rows per CPU-hour, stopped and taken up again, claims, deaths, words."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from papers_queue import MODULES, TRACE

from papers import index
from papers.__main__ import main
from papers.runner import Cell, Results, tables
from papers.runner.jobs import Finished, Outcome
from papers.runner.queue import Queue, ranked, workers
from papers.runner.queue.claims import Claims
from papers.runner.queue.failures import Failures
from papers.runner.queue.line import told
from papers.runner.queue.ranking import tasks
from papers.runner.queue.state import State
from papers.runner.queue.workers import ending
from papers.runner.store import Spent


@pytest.fixture(autouse=True)
def toys(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "TABLES", MODULES)
    monkeypatch.setenv(TRACE, str(tmp_path))
    monkeypatch.setattr(workers, "NICENESS", 0)  # on a busy machine 19 would take for ever
    return tmp_path


def groups_of(folder: Path, only: str, **options) -> list:
    return ranked(tables(), Results(folder=folder), only=only, **options)


def run(folder: Path, only: str, jobs: int = 1, **options):
    queue = Queue(groups_of(folder, only), MODULES, Results(folder=folder), jobs=jobs, **options)
    return queue.run()


def traced(folder: Path) -> list[str]:
    return (folder / "trace.txt").read_text().splitlines()


def stored(folder: Path, name: str) -> list[Path]:
    return sorted((folder / "toys" / "results" / name).rglob("*.json"))


def left_behind(folder: Path) -> list[Path]:
    return [*folder.rglob("*.partial")] + [path for path in (folder / ".runs" / "claims").rglob("*") if path.is_file()]


# -- ranking ----------------------------------------------------------------------------------------------------


def test_groups_are_ranked_by_rows_closed_per_cpu_hour(toys):
    cheap, dear = groups_of(toys, "quick")
    assert (cheap.method, cheap.rows, cheap.rows_per_hour) == ("cheap", 1, pytest.approx(3600 / 10))
    assert (dear.method, dear.rows_per_hour) == ("dear", pytest.approx(3600 / 100))
    assert not cheap.measured


def test_measured_seconds_and_what_is_there_change_the_order(toys):
    experiment = tables()["quick"].experiment
    spent = Spent(cpu_seconds=1.0, peak_memory_bytes=None, together=(0,))
    outcome = Outcome(metrics={"error": 0.0})
    Results(folder=toys).write(experiment, "paper", Cell("data", "dear"), outcome, spent)
    first, second = groups_of(toys, "quick")
    assert (first.method, first.cpu_seconds, first.measured) == ("dear", 1.0, True)
    assert first.waiting == (Cell("data", "dear", 1),)
    assert (second.method, second.cpu_seconds) == ("cheap", 10.0)


def test_costs_of_cells_that_share_work_are_to_each_other_as_they_were_estimated(toys):
    experiment = tables()["shared"].experiment
    costs = {"one": 2.0, "two": 6.0}
    variants = {(d, m): replace(v, cpu_seconds=costs[m]) for (d, m), v in experiment.scales["paper"].variants.items()}
    experiment = replace(experiment, scales={"paper": replace(experiment.scales["paper"], variants=variants, seeds=2)})
    table = replace(tables()["shared"], experiment=experiment)
    spent = Spent(cpu_seconds=4.0, peak_memory_bytes=None, together=(0,))
    results = Results(folder=toys)
    results.write(experiment, "paper", Cell("data", "one"), Outcome(metrics={"error": 0.0}), spent)
    groups = {group.method: group for group in ranked({"shared": table}, results)}
    assert {name: group.cell_seconds for name, group in groups.items()} == {"one": 4.0, "two": 12.0}


def test_a_group_closes_the_rows_of_all_tables_that_read_it(monkeypatch, toys):
    monkeypatch.undo()
    monkeypatch.setattr(index, "TABLES", {name: index.TABLES[name] for name in ("bali-table-2", "bali-figure-2")})
    groups = ranked(tables(), Results(folder=toys))
    assert {group.rows for group in groups} == {4 + 3}
    assert {group.scale for group in groups} == {"small"}  # the one that is run where none is asked for
    assert {group.scale for group in ranked(tables(), Results(folder=toys), scale="all")} == {"small", "paper"}
    assert ranked(tables(), Results(folder=toys), scale="huge") == []


def test_patterns_choose_by_table_scale_data_and_method(toys):
    assert [group.method for group in groups_of(toys, "quick*cheap")] == ["cheap"]
    assert {group.table for group in groups_of(toys, "paper data d")} == {"quick", "deadly"}
    assert groups_of(toys, "nothing like it") == []


# -- running ----------------------------------------------------------------------------------------------------


def test_a_queue_runs_what_is_missing_at_low_priority_and_then_nothing(toys, monkeypatch):
    monkeypatch.setattr(workers, "NICENESS", 2)
    ended = run(toys, "quick")
    assert (ended.finished, ended.rows, ended.failed, ended.stopped) == (4, 2, {}, False)
    lines = traced(toys)
    assert [line.split()[2] for line in lines if line.startswith("start")] == ["cheap"] * 2 + ["dear"] * 2
    assert all(f"nice={os.nice(0) + 2} " in line and "threads=1" in line for line in lines)
    assert all(f"pid={os.getpid()} " not in line for line in lines)
    assert len({re.search(r"pid=\d+", line)[0] for line in lines}) == 1  # one worker, kept
    assert left_behind(toys) == []
    monkeypatch.undo()
    assert workers.NICENESS == 19
    monkeypatch.setattr(index, "TABLES", MODULES)
    assert run(toys, "quick").finished == 0
    assert len(traced(toys)) == len(lines)


def test_results_say_with_which_settings_and_which_commit(toys):
    run(toys, "fitted")
    (path,) = stored(toys, "fitted")
    content = json.loads(path.read_text())
    (entry,) = content["fits"]
    assert entry["method"] == {"type": "MAP", "prior_std": None, "prior": None}
    plain = {"class_axis": 1, "class_weights": None, "ignore_index": None, "shift": False}
    assert entry["likelihood"] == {"type": "Categorical", **plain}
    assert entry["training"]["iterations"] == 2
    assert entry["training"]["optimizer"] == {"type": "Adam", "betas": [0.9, 0.999], "eps": 1e-08}
    assert entry["seed"] == 3
    assert entry["data"][0] == {"shape": [8, 3], "dtype": "torch.float32"}
    assert any("Linear(in_features=3, out_features=4" in line for line in entry["network"])
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert content["commit"]["sha"] == head.stdout.strip()
    assert isinstance(content["commit"]["dirty"], bool)


def test_failures_are_marked_with_their_reason_and_tried_twice_at_most(toys):
    ended = run(toys, "bad")
    assert sorted(ended.failed.values()) == ["ZeroDivisionError: by chance", "no such data"]
    assert ended.finished == 0
    assert len(traced(toys)) == 2  # what fails by an error of its own would fail again at once
    again = run(toys, "bad")
    assert (len(traced(toys)), again.failed) == (4, ended.failed)
    assert run(toys, "bad").failed == ended.failed
    assert len(traced(toys)) == 4
    assert left_behind(toys) == []


def test_marks_of_other_settings_or_another_commit_do_not_count(tmp_path):
    name = Path("a", "b.json")
    assert Failures(tmp_path, "first").add(name, "digest", "reason").attempts == 1
    assert Failures(tmp_path, "first").add(name, "digest", "reason").attempts == 2
    assert Failures(tmp_path, "first").read(name, "digest").reason == "reason"
    assert Failures(tmp_path, "second").read(name, "digest") is None
    assert Failures(tmp_path, "first").read(name, "other") is None
    (tmp_path / name).write_text("{")
    assert Failures(tmp_path, "first").read(name, "digest") is None


def test_a_worker_that_dies_is_replaced_and_its_cell_tried_once_more(toys):
    reported = []
    ended = run(toys, "deadly", report=lambda group, finished, state: reported.append(finished))
    assert list(ended.failed.values()) == ["its process was ended by SIGKILL"]
    assert "dies split 0" in next(iter(ended.failed))
    assert ended.finished == 1  # the other, at its second try
    starts = [line.split()[2] for line in traced(toys) if line.startswith("start")]
    assert sorted(starts) == ["dies", "dies", "dies-once", "dies-once"]
    assert [finished.failure for finished in reported].count("its process was ended by SIGKILL") == 3
    assert left_behind(toys) == []
    assert ending(3) == "its process ended with code 3"


def test_cells_that_share_work_run_one_after_the_other_on_one_worker(toys):
    assert run(toys, "shared", jobs=2).finished == 2
    lines = traced(toys)
    assert [line.split()[0] for line in lines] == ["start", "end", "start", "end"]
    assert len({re.search(r"pid=\d+", line)[0] for line in lines}) == 1


# -- claims -----------------------------------------------------------------------------------------------------


def test_what_another_queue_has_claimed_is_left_to_it(toys):
    group = groups_of(toys, "quick*cheap")[0]
    results = Results(folder=toys)
    path = results.path(group.experiment, "paper", Cell("data", "cheap", 1)).relative_to(toys)
    holder = (
        "import sys, time; from pathlib import Path; from papers.runner.queue.claims import Claims\n"
        "claims = Claims(Path(sys.argv[1])); assert claims.take([Path(sys.argv[2])])\n"
        "print('held', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", holder, str(toys / ".runs" / "claims"), str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            ended = run(toys, "quick*cheap")
            assert (ended.finished, ended.elsewhere) == (1, 1)
        finally:
            process.kill()
    assert (toys / ".runs" / "claims" / path).exists()  # left by the dead, and free
    ended = run(toys, "quick*cheap")
    assert (ended.finished, ended.elsewhere) == (1, 0)
    assert left_behind(toys) == []


def test_claims_are_all_or_none(tmp_path):
    first, second = Claims(tmp_path), Claims(tmp_path)
    a, b, c = (Path(name) for name in "abc")
    assert first.take([b])
    assert not second.take([a, b, c])
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    first.release([b])
    assert second.take([a, b, c])
    second.release_all()
    assert list(tmp_path.iterdir()) == []


# -- stopping ---------------------------------------------------------------------------------------------------


def started(folder: Path, jobs: int) -> subprocess.Popen:
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(here)])}
    command = [sys.executable, str(here / "papers_queue_run.py"), str(folder), "slow", str(jobs)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def waited(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda stop: stop.name)
def test_a_queue_is_stopped_at_any_time_and_taken_up_again(toys, stop):
    with started(toys, 2) as process:
        try:
            waited(lambda: len(stored(toys, "slow")) >= 2)
            process.send_signal(stop)
            said = process.communicate(timeout=60)[0]
        finally:
            process.kill()
    finished = stored(toys, "slow")
    assert 2 <= len(finished) < 6
    times = {path: path.stat().st_mtime_ns for path in finished}
    workers = {int(re.search(r"pid=(\d+)", line)[1]) for line in traced(toys)}
    waited(lambda: not any(alive(pid) for pid in workers))  # also those of a killed queue
    if stop != signal.SIGKILL:  # which leaves no time to remove a hidden file that is no result yet
        assert process.returncode == 0, said
        assert "the same command goes on from there" in said
        assert "Traceback" not in said
        assert left_behind(toys) == []
    ended = run(toys, "slow", jobs=2)
    assert ended.finished == 6 - len(finished)
    assert all(path.stat().st_mtime_ns == before for path, before in times.items())
    assert len(stored(toys, "slow")) == 6
    assert all(path.suffix == ".partial" and stop == signal.SIGKILL for path in left_behind(toys))


def test_two_queues_share_the_cells(toys):
    with started(toys, 1) as first, started(toys, 1) as second:
        for process in (first, second):
            said = process.communicate(timeout=120)[0]
            assert process.returncode == 0, said
    starts = [" ".join(line.split()[1:5]) for line in traced(toys) if line.startswith("start")]
    assert len(starts) == len(set(starts)) == 6
    assert len(stored(toys, "slow")) == 6
    assert left_behind(toys) == []


# -- words ------------------------------------------------------------------------------------------------------


def test_the_line_says_what_runs_what_is_left_and_how_long(toys):
    (task, *_) = tasks(groups_of(toys, "slow"))
    words = told(State(running=[(task, 30.0)], cells=5, rows=1, seconds=7200.0))
    assert words == (
        "running: slow (paper) data waits split 0 seed 0 since 30 seconds; "
        "1 running, 5 waiting, 1 rows open, about 2 hours left"
    )


def test_the_time_left_follows_what_cells_took_here(toys):
    groups = groups_of(toys, "quick*dear")
    queue = Queue(groups, MODULES, Results(folder=toys), jobs=2)
    assert queue.state().seconds == pytest.approx(2 * 50 / 2)
    spent = Spent(cpu_seconds=4.0, peak_memory_bytes=None, together=(0,))
    done = Finished(cell=groups[0].waiting[0], outcome=Outcome(metrics={"error": 0.0}), spent=spent)
    queue.waiting.popleft()
    queue._keep(groups[0], done)
    assert queue.state().seconds == pytest.approx(4 / 2)
    queue.wall = 12.0  # three times as long as its CPU time: others use the machine
    assert queue.state().seconds == pytest.approx(3 * 4 / 2)


def test_the_command_lists_and_runs(toys, capsys, monkeypatch):
    monkeypatch.setattr(index, "TABLES", {"quick": "papers_queue", "bad": "papers_queue"})
    assert main(["runs", "--list", "--results", str(toys)]) == 0
    shown = capsys.readouterr().out
    assert shown.index("quick (paper) data cheap") < shown.index("quick (paper) data dear")
    assert "6 cells" in shown
    assert not (toys / ".runs").exists()
    assert main(["runs", "--only", "quick", "--jobs", "1", "--results", str(toys)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"quick \(paper\) data cheap split 0 seed 0: error 0, 0\.\d CPU-seconds; 0 running, 3 waiting, "
        r"2 rows open, about .* left",
        lines[0],
    )
    assert lines[-1] == "4 cells finished, 2 rows closed"
    assert main(["runs", "--only", "bad", "--jobs", "1", "--results", str(toys)]) == 1
    assert "2 cells failed:" in capsys.readouterr().out
    assert main(["runs", "--jobs", "0"]) == 1
    assert "jobs must be" in capsys.readouterr().err
