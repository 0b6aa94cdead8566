"""The recipes of the page run: onnxruntime, a service of its own process under eight threads, PyTorch alone."""

import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.docs.pages import run

pytest.importorskip("onnxruntime")
PAGE = Path(__file__).parent.parent.parent / "docs" / "deploy.md"
SERVICE, PROGRAM = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
#: Runs a file where dubito cannot be imported.
ALONE = "import sys; sys.modules['dubito'] = None; exec(open('program.py').read())"


@pytest.fixture(scope="module")
def space(tmp_path_factory) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("deploy")
        patch.chdir(folder)
        text = PAGE.read_text()
        start = text.index("## onnxruntime")
        (folder / "page.md").write_text(text[start:])
        return {"folder": folder, **run(folder / "page.md")}


def test_a_service_answers_eight_threads_alike(space) -> None:
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    (space["folder"] / "service.py").write_text(SERVICE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "service:app", "--port", str(port), "--log-level", "warning"]
    url, rows = f"http://127.0.0.1:{port}/predict", space["x"][:40].tolist()
    server = subprocess.Popen(command, cwd=space["folder"])
    try:
        for _ in range(300):
            try:
                httpx.post(url, json=rows[:1])
                break
            except httpx.TransportError:
                assert server.poll() is None
                time.sleep(0.1)
        with ThreadPoolExecutor(8) as threads:
            parts = [rows[start : start + 5] for start in range(0, 40, 5)] * 3
            found = list(threads.map(lambda part: httpx.post(url, json=part, timeout=30).json(), parts))
    finally:
        server.terminate()
        server.wait()
    prediction = space["posterior"].predict(space["x"][:40], num_samples=16, seed=0)
    for name in ("probs", "total", "aleatoric", "epistemic", "function_variance"):
        together = torch.tensor([row for part in found for row in part[name]])
        truth = getattr(prediction, name)
        torch.testing.assert_close(together, torch.cat([truth] * 3), rtol=1e-5, atol=1e-5)


def test_a_program_runs_without_dubito(space) -> None:
    (space["folder"] / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=space["folder"], capture_output=True, text=True, check=True
    )
    prediction = space["posterior"].predict(torch.tensor([[0.1, 0.2, -0.3, 0.4]]), 16, seed=0)
    numbers = [float(number) for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", done.stdout)]
    expected = [*prediction.probs[0].tolist(), *prediction.epistemic.tolist()]
    assert numbers == pytest.approx(expected, abs=1e-5)
