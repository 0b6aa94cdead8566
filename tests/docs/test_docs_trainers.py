"""The recipes for other people's trainers: alone as the page shows, and in two processes as in one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.docs.pages import run

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
SCRIPT = Path(__file__).parent / "trainers_runs.py"


@pytest.mark.filterwarnings("ignore")  # of Lightning and Transformers
def test_the_page_runs_and_its_trainers_learn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = run(PAGE)
    assert space["right"] > 0.9


def ran(folder: Path, recipe: str, processes: int) -> list[dict]:
    path = folder / f"{recipe}-{processes}"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *(launcher if recipe == "fsdp" and processes > 1 else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(SCRIPT), recipe, str(path), str(processes)],
        capture_output=True, text=True, cwd=folder, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(f"{path}.{rank}") for rank in range(processes)]


@pytest.mark.parametrize("recipe", ["fsdp", "lightning"])
def test_two_processes_end_where_one_does(recipe: str, tmp_path):
    (alone,) = ran(tmp_path, recipe, 1)
    for fitted in ran(tmp_path, recipe, 2):
        for method, expected in alone.items():
            torch.testing.assert_close(fitted[method], expected, rtol=1e-6, atol=1e-6)
