"""What a result says of its making: every fit with all settings, once; the commit and whether code was changed."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from papers_examples import experiment, table
from rich.console import Console

from dubito import Categorical, MeanField, Training, models
from dubito.storage import encode
from papers.runner import Cell, Outcome, Results, provenance, show
from papers.runner.jobs import work
from papers.runner.provenance import Commit, Provenance
from papers.runner.store import Spent
from papers.runner.tables import tables
from papers.settings import explicit

DATA = (torch.zeros(6, 3), torch.arange(6) % 2)


def fitted(seed: int) -> object:
    net = models.mlp(3, (4,), num_classes=2, seed=0)
    training = explicit(Training, iterations=1)
    return provenance.fit(explicit(MeanField), net, DATA, explicit(Categorical), training=training, seed=seed)


def test_fits_are_written_down_once_each_and_only_while_somebody_listens():
    fitted(0)
    with provenance.recording() as records:
        fitted(1)
        fitted(1)
        fitted(2)
    fitted(3)
    assert [record["seed"] for record in records] == [1, 2]
    assert records[0]["method"] == {**encode(explicit(MeanField)), "prior": None}
    assert records[0]["training"] == encode(explicit(Training, iterations=1))


def test_shared_work_is_written_down_for_everybody_who_takes_it():
    store, calls = {}, []

    def make() -> str:
        calls.append(1)
        fitted(5)
        return "made"

    for _ in range(2):
        with provenance.recording() as records:
            assert provenance.shared(store, "key", make) == "made"
        assert [record["seed"] for record in records] == [5]
    assert provenance.shared(store, "key", make) == "made"  # nobody listens
    assert len(calls) == 1


def test_functions_are_told_by_name_and_settings_by_all_fields():
    @dataclass(frozen=True)
    class Some:
        subset: object
        width: int = 3

    told = provenance.spelled({"a": Some(test_functions_are_told_by_name_and_settings_by_all_fields)})
    name = f"{__name__}.test_functions_are_told_by_name_and_settings_by_all_fields"
    assert told == {"a": {"type": "Some", "subset": name, "width": 3}}


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    return subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True, text=True).stdout


def test_the_commit_and_whether_the_code_differs_from_it(tmp_path):
    assert provenance.commit.__wrapped__(tmp_path) is None  # no repository
    git(tmp_path, "init", "-q")
    for name in ("src/a.py", "papers/bali/b.py", "papers/bali/results/c.json", "docs/d.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "x")
    sha = git(tmp_path, "rev-parse", "HEAD").strip()
    seen = provenance.commit.__wrapped__
    assert seen(tmp_path) == Commit(sha=sha, dirty=False)
    (tmp_path / "papers/bali/results/c.json").write_text("2")
    (tmp_path / "docs/d.md").write_text("2")
    assert seen(tmp_path) == Commit(sha=sha, dirty=False)  # results and pages decide no numbers
    (tmp_path / "papers/bali/new.py").write_text("2")
    assert seen(tmp_path) == Commit(sha=sha, dirty=True)
    (tmp_path / "papers/bali/new.py").unlink()
    (tmp_path / "src/a.py").write_text("2")
    assert seen(tmp_path) == Commit(sha=sha, dirty=True)


def test_results_stored_before_are_read_and_shown_as_such(tmp_path):
    results, made = Results(folder=tmp_path), experiment()
    spent = Spent(cpu_seconds=1.0, peak_memory_bytes=None, together=(0,))
    outcome = Outcome(metrics={"error": 1.0, "score": 0.0})
    results.write(made, "paper", Cell("alpha", "one", 0), outcome, spent)
    results.write(made, "paper", Cell("alpha", "one", 1), outcome, spent, Provenance(fits=[], commit=None))
    stored = [results.stored(made, "paper", Cell("alpha", "one", split)) for split in (0, 1)]
    assert [result.recorded for result in stored if result] == [False, True]
    console = Console(width=200, record=True)
    console.print(show.comparison(table(made), "paper", results, made.scales["paper"].cells))
    said = " ".join(console.export_text().split())
    assert "2 finished jobs of 16" in said
    assert "1 of them were stored before the settings of all fits and the commit were kept" in said


def test_jobs_carry_what_made_them():
    made = experiment()
    (done,) = work(made, "paper", [Cell("alpha", "one")])
    assert done.provenance is not None and list(done.provenance.fits) == []


@pytest.mark.filterwarnings("ignore:the network is no better than a constant")  # after two steps it is not
@pytest.mark.parametrize(
    ("name", "methods"),
    [("inf-uci", ["MAP", "Laplace"]), ("bali-table-1", ["BALI"]), ("inf-figure-5", ["ActiveLearning"])],
)
def test_experiments_write_down_what_they_fit(name, methods):
    """Methods that an experiment makes on the way are in no settings of a variant, and still in the record."""
    made = tables()[name].experiment
    method = {"inf-uci": "laplace-inf", "bali-table-1": "bali", "inf-figure-5": "inf-20%"}[name]
    cell = Cell("yacht" if name != "inf-figure-5" else "boston", method)
    for _ in range(2):  # the second time from what the first kept
        with provenance.recording() as records:
            made.run([cell], [made.generate(cell)], made.settings("paper", cell), 2)
        assert [record["method"]["type"] for record in records] == methods


def test_no_experiment_fits_past_the_record():
    for path in (Path(provenance.__file__).parents[1]).rglob("*.py"):
        text = path.read_text()
        # pages show how users fit; estimators and other tools have their settings in the cell's
        if path.name not in ("provenance.py", "page.py", "tabular_tools.py", "tabular_ngboost.py"):
            assert ".fit(" not in text.replace("provenance.fit(", ""), path
