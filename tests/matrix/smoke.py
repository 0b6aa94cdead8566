"""What a fresh installation must do, bare or with all extras: `python smoke.py`, outside a checkout."""

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

import dubito
from dubito import Categorical, Gaussian, Laplace, MeanField, Training


def main() -> None:
    """Fit, save, load and predict; the command line; with the extras, a comparison and its page."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    net = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    fitted = MeanField().fit(net, (x, x.sin()), Gaussian(), training=Training(epochs=5), progress=False)
    assert fitted.predict(x).std.isfinite().all()
    classes = torch.nn.Linear(1, 2)
    posterior = Laplace().fit(classes, (x, (x[:, 0] > 0).long()), Categorical(), progress=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.safetensors"
        posterior.save(path)
        loaded = dubito.load(path, classes).predict(x).probs
        assert torch.equal(loaded, posterior.predict(x).probs)
        command = [str(Path(sys.executable).with_name("dubito"))]
        subprocess.run([*command, "--help"], check=True, stdout=subprocess.DEVNULL)
        whole = find_spec("sklearn") is not None
        if whole:
            words = ["compare", "wine", "--methods", "map,laplace-kfac", "--steps", "50", "--out", folder]
            subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL)
            assert list(Path(folder).rglob("*.html"))
    place = Path(str(dubito.__file__)).parent
    assert (place / "py.typed").is_file()
    print(f"dubito {dubito.__version__} works in {place}, {'with' if whole else 'without'} extras")


if __name__ == "__main__":
    main()
