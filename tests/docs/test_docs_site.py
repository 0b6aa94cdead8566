"""The site builds without a warning."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def test_the_site_builds_strictly(tmp_path):
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason="needs the extra: pip install 'dubito[docs]'")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    reproduced = (tmp_path / "site" / "reproduced" / "index.html").read_text()
    assert "within 2" in reproduced and "inf-table-1" in reproduced
    reference = (tmp_path / "site" / "api" / "index.html").read_text()
    for name in ("MCDropout", "Posterior", "reliability", "compare"):
        assert name in reference
    assert (tmp_path / "site" / "methods" / "map" / "index.html").is_file()
    bali, active = (
        (tmp_path / "site" / page / "index.html").read_text() for page in ("methods/bali", "active")
    )
    assert 'src="../../pictures/bali/figure-1.png"' in bali and 'src="../pictures/inf/figure-5.png"' in active
    for picture in ROOT.glob("papers/*/pictures/*.png"):
        assert (tmp_path / "site" / "pictures" / picture.parts[-3] / picture.name).is_file()
