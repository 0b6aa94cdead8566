"""Draw INF's Figure 4 from what was run: `python docs/generate/inf.py [results]`.

Writes docs/methods/inf-figure-4.png, for the first draw of the points.
"""

import sys
from pathlib import Path

import torch
from first_cells import first_cells
from matplotlib.figure import Figure

from dubito.data import load
from dubito.plot.axes import colour
from dubito.reproduce import Results, tables
from dubito.reproduce.inf_toy import DATA, METHODS

ROOT = Path(__file__).parent.parent.parent


def main() -> None:
    """HMC first, then every method, each with two standard deviations."""
    results = Results(folder=Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results")
    experiment = tables()["inf-figure-4"].experiment
    kept = first_cells(experiment, "paper", [(DATA, method) for method in METHODS], results)
    if not kept:
        raise SystemExit("run `dubito reproduce inf-figure-4` first")
    first = kept[DATA, METHODS[0]]
    curves = {"HMC": (first["hmc_mean"], first["hmc_std"])}
    curves |= {method: (one["mean"], one["std"]) for (_, method), one in kept.items()}
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    axes = figure.subplots(2, 4, sharex=True, sharey=True).flatten()
    x, points = torch.tensor(first["x"]), load(DATA, 0, standardise=False).train
    for axis, (name, curve) in zip(axes, curves.items(), strict=True):
        mean, std = (torch.tensor(values) for values in curve)
        axis.fill_between(x, mean - 2 * std, mean + 2 * std, color=colour(0), alpha=0.3, linewidth=0)
        axis.plot(x, mean, color=colour(0))
        axis.plot(*(part.flatten() for part in points), ".", color="red")
        axis.set(title=name, ylim=(-150, 150))
    figure.savefig(ROOT / "docs" / "methods" / "inf-figure-4.png", dpi=60)


if __name__ == "__main__":
    main()
