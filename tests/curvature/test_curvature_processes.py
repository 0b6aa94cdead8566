"""Two processes share the rows and the decompositions, and each has what one alone would have."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import shared_statistics
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
#: Of a run in float32: sums in another order. In float64 nothing but Λ and the vectors see a difference.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-11}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_two_processes_are_as_one(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launch, "--master_port", free_port(), str(HERE / "shared_statistics.py"), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for name in shared_statistics.RUNS:
        first, second = (load_file(tmp_path / f"{name}.{rank}") for rank in (0, 1))
        alone = shared_statistics.run(name, None)
        assert first.keys() == second.keys() == alone.keys()
        for key, expected in alone.items():
            assert torch.equal(first[key], second[key]), (name, key)
            if expected.dtype == torch.float32 and "vectors" in key:
                continue  # close eigenvalues may turn vectors; what is measured along them is compared
            error = (first[key] - expected).norm() / expected.norm()
            assert error < TOLERANCE[expected.dtype], (name, key, error)
        counts = [json.loads((tmp_path / f"{name}.{rank}.json").read_text()) for rank in (0, 1)]
        assert [each["all_reduce"] for each in counts] == [2, 2]  # one for each pass
        total = sum(each["eigh"] for each in counts)
        groups = sum(len(value) for key, value in alone.items() if key.endswith(("inputs", "gradients")))
        assert total == groups and min(each["eigh"] for each in counts) > 0, (name, counts)
    for name in shared_statistics.FITS:
        first, second = (load_file(tmp_path / f"{name}.{rank}") for rank in (0, 1))
        alone = shared_statistics.fit(name)
        assert first.keys() == second.keys() == alone.keys() and len(alone) == 3
        for key, expected in alone.items():
            # training sums gradients in another order too, and 20 epochs carry that on
            torch.testing.assert_close(first[key], expected, rtol=1e-6, atol=0)
            torch.testing.assert_close(second[key], first[key], rtol=1e-12, atol=0)
