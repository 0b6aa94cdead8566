"""Draw the pages' figures from the pages' code: `python docs/generate/figures.py [name ...]`.

A tutorial saves its figure as `<name>.svg` itself; README's example is drawn here. All go to docs/figures/.
"""

import os
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))  # for the tests' reader of pages, which is not installed

from tests.docs.pages import run  # noqa: E402

FIGURES = ROOT / "docs" / "figures"
#: Nothing in a file that differs between two runs of the same code.
mpl.rcParams.update({"svg.hashsalt": "dubito", "svg.fonttype": "path", "figure.figsize": (6.4, 3.4)})


def readme() -> None:
    """README's first example: the posterior over a grid, with the training rows."""
    space = run(ROOT / "README.md")
    grid = torch.linspace(-8, 8, 200)[:, None]
    prediction = space["posterior"].predict(grid)
    mean, noise, std = (value[:, 0] for value in (prediction.mean, prediction.aleatoric_std, prediction.std))
    axis = Figure(figsize=(7.2, 2.9), layout="constrained").add_subplot()
    for width, colour, name in (
        (std, "#9ecae1", "total: epistemic and noise"),
        (noise, "#3182bd", "noise alone"),
    ):
        band = (mean - 1.96 * width).tolist(), (mean + 1.96 * width).tolist()
        axis.fill_between(grid[:, 0].tolist(), *band, color=colour, alpha=0.6, linewidth=0, label=name)
    axis.plot(grid[:, 0].tolist(), mean.tolist(), color="#08306b", label="mean")
    axis.plot(
        space["x"].flatten().tolist(),
        space["y"].flatten().tolist(),
        "k.",
        markersize=3,
        label="training rows",
    )
    axis.set(xlim=(-8, 8), ylim=(-4.5, 4.5), xlabel="x", ylabel="y")
    axis.legend(loc="upper center", ncols=4, fontsize=8, frameon=False)
    axis.figure.savefig(FIGURES / "readme.svg", metadata={"Date": None})


def tutorial(page: Path) -> None:
    """What a tutorial draws."""
    name = f"{page.stem}.svg"
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        run(page)
        figure = Path(scratch) / name
        if not figure.is_file():
            sys.exit(f"{page} saves no {name}")
        dated = figure.read_text(encoding="utf-8").splitlines(keepends=True)
        text = "".join(line for line in dated if "<dc:date>" not in line)
        (FIGURES / name).write_text(text, encoding="utf-8")
        os.chdir(ROOT)


if __name__ == "__main__":
    FIGURES.mkdir(exist_ok=True)
    pages = {
        page.stem: page for page in sorted((ROOT / "docs" / "tutorials").glob("*.md")) if page.stem != "index"
    }
    for name in sys.argv[1:] or ["readme", *pages]:
        readme() if name == "readme" else tutorial(pages[name])
        print(name)
