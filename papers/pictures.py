"""The pictures of all papers' figures, from what was run: `python -m papers pictures`.

Each paper's module `draw` says what to draw; here it is written, to `<paper>/pictures/*.png`.
"""

from importlib import import_module
from pathlib import Path

from .runner.store import PAPERS, Results

DRAWN = ("bali", "implicit", "inf", "k_tied", "rank1")


def folder(paper: str, root: Path = PAPERS) -> Path:
    """Where a paper's pictures lie."""
    return root / paper / "pictures"


def write_pictures(results: Results) -> list[Path]:
    """Draw every figure that was run, beside its paper's results; figures that were not run are left out."""
    written = []
    for paper in DRAWN:
        for name, figure in import_module(f"papers.{paper}.draw").figures(results).items():
            if figure is not None:
                path = folder(paper, results.folder) / f"{name}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(path, dpi=60)
                written.append(path)
    return written
