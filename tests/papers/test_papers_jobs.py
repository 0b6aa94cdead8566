"""Jobs: each once, one thread each, kept at once, resumed, in parallel, on a cluster."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from joblib.externals.loky import get_reusable_executor
from papers_examples import TRACE, Toy, experiment, load

from dubito.errors import ConfigError, Interrupted, UnknownNameError
from dubito.jobs import as_they_end
from papers.runner import Cell, Outcome, Results, Scale, Variant, run
from papers.runner.experiment import Experiment
from papers.runner.jobs import batches, peak_memory_bytes, work


@pytest.fixture
def trace(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "trace.txt"
    monkeypatch.setenv(TRACE, str(path))
    get_reusable_executor().shutdown(wait=True)  # workers left by other tests have the environment of theirs
    return path


def lines(trace: Path) -> list[str]:
    return trace.read_text().splitlines() if trace.exists() else []


def field(line: str, name: str) -> str:
    return line.partition(f" {name}=")[2].split()[0]


def test_every_cell_is_run_once_and_kept(tmp_path, trace):
    made, results, ended = experiment(), Results(folder=tmp_path / "results"), []
    cells = made.scales["paper"].cells
    assert run(made, "paper", cells, results, report=ended.append) == []
    assert sorted(finished.cell for finished in ended) == sorted(cells)
    assert sorted(line.split(" threads")[0] for line in lines(trace)) == sorted(map(str, cells))
    for cell in cells:
        outcome = results.read(made, "paper", cell)
        assert outcome is not None
        assert outcome.metrics["error"] == 1.0 + cell.split + (0.5 if cell.method == "two" else 0.0)
        assert outcome.details == {"steps": None}
    run(made, "paper", cells, results)
    assert len(lines(trace)) == len(cells)


def test_a_change_of_settings_runs_the_cells_again(tmp_path, trace):
    results = Results(folder=tmp_path / "results")
    for made in (experiment(base=1.0), experiment(base=2.0)):
        run(made, "paper", [Cell("alpha", "one")], results)
        found = results.read(made, "paper", Cell("alpha", "one"))
        assert found is not None
        assert found.metrics["error"] == made.settings("paper", Cell("alpha", "one")).base
    assert len(lines(trace)) == 2


def test_a_job_has_one_thread_and_gives_the_others_back(tmp_path, trace):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(experiment(), "paper", [Cell("alpha", "one")], Results(folder=tmp_path))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert "threads=1" in lines(trace)[0]


def test_costs_are_measured(tmp_path):
    def busy(cells, data, settings, steps):
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        return [Outcome(metrics={"error": 0.0}) for _ in cells]

    scale = Scale(variants={("alpha", "one"): Variant(settings=Toy(base=0), cpu_seconds=1)}, splits=2)
    made = Experiment(
        paper="toys", name="busy", scales={"paper": scale}, load=load, generate=load, run=busy, together=2
    )
    finished = work(made, "paper", scale.cells)
    assert len(finished) == 2
    for each in finished:
        assert 0.1 <= each.spent.cpu_seconds < 0.2  # two cells share 0.2 s, and little more
        assert each.spent.together == (0, 1)
    peak = peak_memory_bytes()
    assert peak is not None
    assert 50e6 < peak < 1e12  # bytes of a process that holds PyTorch, not KiB


def test_neighbouring_splits_may_be_trained_side_by_side(tmp_path, trace):
    made = experiment(splits=5, together=2)
    cells = made.scales["paper"].select(data=["alpha"], methods=["one"])
    assert [[c.split for c in batch] for batch in batches(made, cells)] == [[0, 1], [2, 3], [4]]
    results = Results(folder=tmp_path / "results")
    run(made, "paper", cells[1:2], results)
    run(made, "paper", cells, results)
    assert [field(line, "with") for line in lines(trace)] == ["1", "1", "2", "2", "1"]
    assert all(results.read(made, "paper", cell) is not None for cell in cells)


def test_different_data_methods_and_seeds_are_never_trained_together():
    made = experiment(splits=4, seeds=2, together=4)
    found = batches(made, made.scales["paper"].cells)
    assert len(found) == 2 * 2 * 2
    assert all(len({(c.data, c.method, c.seed) for c in batch}) == 1 for batch in found)


def test_failures_are_told_and_the_rest_goes_on(tmp_path, trace):
    made, results = experiment(data=("alpha", "broken"), splits=2), Results(folder=tmp_path / "results")
    failures = run(made, "paper", made.scales["paper"].cells, results)
    assert [(f.cell.data, f.failure) for f in failures] == [("broken", "broken data")] * 4
    assert len(lines(trace)) == 4
    assert run(made, "paper", made.scales["paper"].select(data=["alpha"]), results) == []


def test_a_result_that_is_not_finite_is_a_failure(tmp_path):
    made = experiment(base=float("nan"))
    (failure,) = run(made, "paper", [Cell("alpha", "one")], Results(folder=tmp_path))
    assert "not finite" in str(failure.failure)


def test_an_interruption_keeps_what_is_finished_and_says_so(tmp_path, trace):
    made, results = experiment(), Results(folder=tmp_path / "results")
    cells, seen = made.scales["paper"].cells, []

    def stop(finished) -> None:
        seen.append(finished)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=r"after 3 of 16 jobs.*the same command goes on"):
        run(made, "paper", cells, results, report=stop)
    assert sum(results.read(made, "paper", cell) is not None for cell in cells) == 3
    run(made, "paper", cells, results)
    assert len({line.split(" threads")[0] for line in lines(trace)}) == len(lines(trace)) == 16


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    folder = tmp_path / "results"
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(here)])}
    process = subprocess.Popen([sys.executable, str(here / "papers_killed.py"), str(folder)], env=environment)
    try:
        end = time.monotonic() + 120
        while len(list(folder.rglob("*.json"))) < 2 and time.monotonic() < end:
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = {path: path.read_bytes() for path in folder.rglob("*.json")}
    stamps = {path: path.stat().st_mtime_ns for path in left}
    made = experiment(wait=0.4)
    quick = made.scales["paper"].cells
    assert 2 <= len(left) < len(quick)
    again = []
    run(made, "paper", quick[: len(left) + 2], Results(folder=folder), report=again.append)
    assert len(again) == 2
    assert {path: path.stat().st_mtime_ns for path in left} == stamps


def test_jobs_run_in_several_processes(tmp_path, trace):
    made, results = experiment(wait=0.2, splits=2), Results(folder=tmp_path / "results")
    run(made, "paper", made.scales["paper"].cells, results, jobs=2)
    pids = {field(line, "pid") for line in lines(trace)}
    assert len(lines(trace)) == 8
    assert len(pids) == 2
    assert str(os.getpid()) not in pids
    assert all("threads=1" in line for line in lines(trace))


def test_a_dask_cluster_runs_the_jobs_one_at_a_time_per_process(tmp_path, trace):
    distributed = pytest.importorskip("distributed")
    made, results = experiment(wait=0.05), Results(folder=tmp_path / "results")
    cells = made.scales["paper"].cells
    options = {"processes": False, "n_workers": 1, "threads_per_worker": 2, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster:
        failures = run(made, "paper", cells, results, backend="dask", scheduler=cluster.scheduler_address)
    assert failures == []
    assert all(results.read(made, "paper", cell) is not None for cell in cells)
    assert str(threading.get_ident()) not in {field(line, "thread") for line in lines(trace)}
    spans = sorted((float(field(line, "start")), float(field(line, "end"))) for line in lines(trace))
    # Jobs seed the global generator, so two threads of a worker must not run theirs at once.
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_where_results_come_all_at_once_jobs_go_in_rounds():
    """As on Ray; a backend of threads stands for it."""
    joblib = pytest.importorskip("joblib")
    started = []
    with joblib.parallel_config(backend="threading"):
        ended = as_they_end(joblib, [joblib.delayed(started.append)(k) for k in range(5)], 1, "ray")
        next(ended)
        assert started == [0]
        assert len(list(ended)) == 4
    assert started == list(range(5))


def test_clusters_are_asked_for_in_full():
    made = experiment()
    call = {"experiment": made, "scale": "paper", "cells": [], "results": Results(folder=Path("none"))}
    with pytest.raises(ConfigError, match="needs its scheduler's address"):
        run(**call, backend="dask")
    with pytest.raises(ConfigError, match="choose dask or ray"):
        run(**call, scheduler="tcp://host:8786")
    with pytest.raises(UnknownNameError, match="dask, local, ray"):
        run(**call, backend="slurm")
    with pytest.raises(ConfigError, match="jobs must be a whole number"):
        run(**call, jobs=0)


@pytest.mark.parametrize(
    ("module", "options", "extra"),
    [
        ("joblib", {}, "cli"),
        ("distributed", {"backend": "dask", "scheduler": "tcp://host:1"}, "cluster"),
        ("ray", {"backend": "ray"}, "cluster"),
    ],
)
def test_a_missing_extra_is_named(tmp_path, monkeypatch, module, options, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"dubito\[{extra}\]"):
        run(experiment(), "paper", [Cell("alpha", "one")], Results(folder=tmp_path), **options)
