"""The harness of the benchmarks: turns, ratios, memory, and the page with its history."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import bars, page


def test_every_file_enters_benchmarks_with_limits_above_zero():
    benchmarks = command.discover()
    files = {path.stem for path in command.FOLDER.glob("*.py")} - command.OTHERS
    entered = {getattr(item.measure, "func", item.measure).__module__ for item in benchmarks.values()}
    assert entered == {f"benchmarks.{file}" for file in files}
    limits = [bar.limit for item in benchmarks.values() for bar in item.bars.values() if bar.limit is not None]
    assert len(limits) > 50 and min(limits) > 0


def test_cases_take_turns_in_every_round():
    calls: list[str] = []
    works = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    seconds = bars.interleaved(works, 3, warm=1, least=0.0)
    assert "".join(calls) == "aabb" + "ab" * 3  # one to warm up and one to count, then in turn
    assert [len(values) for values in seconds.values()] == [3, 3]


def test_ratios_are_of_the_same_round():
    assert bars.ratios({"a": [2.0, 6.0], "b": [1.0, 2.0]}, "a", "b") == [2.0, 3.0]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts peaks")
def test_a_peak_is_counted_though_it_is_gone():
    code = "import torch; from benchmarks.bars import peak_mebibytes as peak; print(peak(lambda: torch.ones(2**24)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=bars.ROOT)
    assert 60 < float(done.stdout) < 128  # 64 MiB


def test_another_process_measures_when_asked():
    other = bars.Other("works = {'sum': lambda: sum(range(10**5))}")
    assert other.names == ["sum"]
    seconds = bars.interleaved_with(other, {"none": lambda: None}, 2)
    other.close()
    assert min(seconds["sum"]) > max(seconds["none"])


def test_the_page_shows_every_bar_with_its_history(tmp_path, monkeypatch):
    def row(median: float) -> dict:
        return {"median": median, "least": median, "rounds": 7, "limit": 10.0, "unit": "passes"}

    for day, (commit, median) in enumerate((("aaa", 12.0), ("bbb", 9.0)), 1):
        content = {"commit": commit, "date": f"2026-01-0{day}T00:00", "benchmarks": {"x_y": {"case": row(median)}}}
        (tmp_path / f"2026-01-0{day}-{commit}.json").write_text(json.dumps(content))
    monkeypatch.setattr(page, "RUNS", tmp_path)
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.write_page()
    text = (tmp_path / "page.md").read_text()
    assert "## X y" in text and "Commit bbb, 2026-01-02" in text
    assert "| case | 9 | 9 | 10 | yes | passes | 12 (aaa, 01-01) |" in text
    assert len(page.stored()) == 2


def test_the_page_in_the_docs_is_that_of_the_stored_runs(tmp_path, monkeypatch):
    shown = page.PAGE.read_text()
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.write_page()
    assert (tmp_path / "page.md").read_text() == shown, "run `python -m benchmarks.page`"
