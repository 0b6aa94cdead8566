"""Two processes give what one gives; a run goes on with another number of them; a lost peer ends it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import shared_runs
import torch
from examples import gap, step_in
from safetensors.torch import load_file

from dubito import ProcessError
from dubito.posterior import Posterior
from dubito.training import Processes, current

HERE = Path(__file__).parent


def run_shared(folder: Path) -> None:
    """Let two processes write all their runs into the folder; one run was begun there by this process."""
    shared_runs.crash_at(4)
    with pytest.raises(shared_runs.Crash):
        shared_runs.resumed(folder / "begun")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port()]
    done = subprocess.run(
        [*command, str(HERE / "shared_runs.py"), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def both(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors that both processes have, the same bit for bit."""
    first, second = (load_file(folder / f"{name}.{rank}") for rank in (0, 1))
    assert first.keys() == second.keys(), name
    assert all(torch.equal(first[key], second[key]) for key in first), name
    return first


def written_out(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Decomposed factors as the matrices they stand for: rounding turns vectors of close eigenvalues."""
    names = [key.removeprefix("output_vectors.") for key in tensors if key.startswith("output_vectors.")]
    parts = ("vectors", "eigenvalues")
    rest = {key: tensor for key, tensor in tensors.items() if not key.split(".")[0].endswith(parts)}
    for name in names:
        outputs, inputs = (tensors[f"{side}_vectors.{name}"] for side in ("output", "input"))
        if f"eigenvalues.{name}" in tensors:
            eigenvalues = tensors[f"eigenvalues.{name}"]
        else:
            left, right = (tensors[f"{side}_eigenvalues.{name}"] for side in ("output", "input"))
            eigenvalues = left.unsqueeze(-1) * right.unsqueeze(-2)
        vectors = torch.einsum("gij,gkl->gikjl", outputs, inputs).flatten(3).flatten(1, 2)
        rest[f"curvature.{name}"] = vectors * eigenvalues.flatten(1).unsqueeze(1) @ vectors.mT
    return rest


def compare(folder: Path, name: str, alone: Posterior, atol: float = 1e-5) -> None:
    alone.save(folder / f"{name}.alone")
    expected = written_out(load_file(folder / f"{name}.alone"))
    for key, tensor in written_out(both(folder, name)).items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=atol, msg=lambda m, k=key: f"{name} {k}: {m}")


def test_two_processes_are_as_one(tmp_path):
    run_shared(tmp_path)  # once for all that follows: it takes its time
    for method in shared_runs.METHODS:
        compare(tmp_path, method, shared_runs.every_method(method))
    for run in shared_runs.ALIKE:
        compare(tmp_path, run.__name__, run())
    # Sums of numbers with 11 bits in another order; Adam makes a step of the rate from any gradient's sign.
    compare(tmp_path, "half", shared_runs.half(), atol=5e-3)
    assert both(tmp_path, "statistics")["network.1.running_mean"].abs().sum() > 0

    # Begun by one process and finished by two, and the other way round.
    expected = shared_runs.resumed(tmp_path / "new")
    compare(tmp_path, "resumed", expected)
    # Several processes learn of a wish to stop together, a step after it was told.
    for begun, step in (("left", 5), ("interrupted", 6)):
        assert step_in(tmp_path / begun) == step
        assert gap(shared_runs.resumed(tmp_path / begun), expected) < 1e-5

    first, second = (json.loads((tmp_path / f"said.{rank}").read_text()) for rank in (0, 1))
    for said in (first, second):
        assert "interrupted after step 6 of 9" in said["interrupted"]
        assert "at step" in said["nan"] and "lower lr" in said["nan"]
        assert said["stray"] == []
    assert first["writes"] > 10 and second["writes"] == 0


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 27])
def test_shares_are_the_rows_and_none_is_of_one_row(rows, count):
    shares = [Processes(rank, count).share(rows) for rank in range(count)]
    assert [row for first, end in shares for row in range(first, end)] == list(range(rows))
    sizes = [end - first for first, end in shares]
    assert rows == 1 or 1 not in sizes
    busy = [size for size in sizes if size]
    assert max(busy) - min(busy) <= 1


def test_peers_that_never_come_are_missed(monkeypatch):
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ProcessError, match=r"did not find each other within 0\.5 s"):
        current(0.5, torch.device("cpu"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert current(0.5, torch.device("cpu")).count == 1
