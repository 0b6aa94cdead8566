"""The site builds without a warning."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dubito
import dubito.metrics

ROOT = Path(__file__).parent.parent.parent


def public() -> set[str]:
    """What docs/compatibility.md calls public: the names of the package, and those of its public rooms."""
    rooms = [getattr(dubito, name) for name in dubito.__all__ if inspect.ismodule(getattr(dubito, name))]
    names = set(dubito.__all__) - {"__version__"}
    for room in (*rooms, dubito.metrics):
        own = getattr(room, "__all__", ()) or [name for name in vars(room) if not name.startswith("_")]
        values = {name: getattr(room, name) for name in own}
        names |= {
            name
            for name, value in values.items()
            if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith(room.__name__)
        }
    return names - {"NoisyOptimizer", "TemperedBernoulliLikelihood", "TemperedCategoricalLikelihood", "trained"}


def test_the_site_builds_strictly(tmp_path):
    for module in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(module, reason="needs the extra: pip install 'dubito[docs]'")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    reproduced = (tmp_path / "site" / "reproduced.html").read_text()
    assert "within 2" in reproduced and "inf-table-1" in reproduced
    reference = (tmp_path / "site" / "api.html").read_text()
    for name in ("MCDropout", "Posterior", "reliability", "compare", "temperature_scaled", "ood_pair", "BALD"):
        assert name in reference
    for room in ("calibration", "shifts", "active", "optim", "distributions", "diagnostics", "layers"):
        assert f'id="dubito.{room}"' in reference
    shown = {name.rsplit(".", 1)[-1] for name in re.findall(r'id="dubito\.([\w.]+)"', reference)}
    assert not public() - shown
    for internal in ("fit_prepared", "BALI.resolved", "Posterior.finished", "Posterior.check_form", "INF.facts"):
        assert internal not in reference
    assert (tmp_path / "site" / "methods" / "map.html").is_file()
    bali, active = ((tmp_path / "site" / f"{page}.html").read_text() for page in ("methods/bali", "active"))
    assert 'src="../pictures/bali/figure-1.png"' in bali and 'src="pictures/inf/figure-5.png"' in active
    for picture in ROOT.glob("papers/*/pictures/*.png"):
        assert (tmp_path / "site" / "pictures" / picture.parts[-3] / picture.name).is_file()
    laplace = (tmp_path / "site" / "methods" / "laplace.html").read_text()
    assert laplace.count("<math") > 8 and 'id="eq-6"' in laplace and "arithmatex" not in laplace
    # Nothing is fetched: the site, its search and its formulas work from disk.
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.search(r'<(?:script|link|img)[^>]*(?:src|href)="?https?:', page.read_text()), page
    assert (tmp_path / "site" / "search" / "search_index.js").is_file()
    assert "assets/iframe-worker.js" in laplace
