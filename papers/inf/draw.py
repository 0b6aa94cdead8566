"""Draw INF's Figures 4 and 5 from what was run: `python -m papers.inf.draw [results]`.

Writes papers/inf/pictures/figure-*.png; figures that were not run are left out.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from dubito.data import load
from dubito.plot.axes import colour

from ..runner.experiment import Cell
from ..runner.first_cells import first_cells
from ..runner.store import PAPERS, Results
from . import figure_4, figure_5

PICTURES = Path(__file__).parent / "pictures"


def toy(results: Results) -> Figure | None:
    """Figure 4: HMC first, then every method, each with two standard deviations; the first draw of the points."""
    keys = [(figure_4.DATA, method) for method in figure_4.METHODS]
    kept = first_cells(figure_4.EXPERIMENT, "paper", keys, results)
    if not kept:
        return None
    first = next(iter(kept.values()))
    curves = {"HMC": (first["hmc_mean"], first["hmc_std"])}
    curves |= {method: (one["mean"], one["std"]) for (_, method), one in kept.items()}
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    axes = figure.subplots(2, 4, sharex=True, sharey=True).flatten()
    x, points = torch.tensor(first["x"]), load(figure_4.DATA, 0, standardise=False).train
    for axis, (name, curve) in zip(axes, curves.items(), strict=True):
        mean, std = (torch.tensor(values) for values in curve)
        axis.fill_between(x, mean - 2 * std, mean + 2 * std, color=colour(0), alpha=0.3, linewidth=0)
        axis.plot(x, mean, color=colour(0))
        axis.plot(*(part.flatten() for part in points), ".", color="red")
        axis.set(title=name, ylim=(-150, 150))
    return figure


def active(results: Results) -> Figure | None:
    """Figure 5: the test error along active learning, means over splits with their standard errors."""
    runs = {(data, method): errors(results, data, method) for data in figure_5.UCI for method in figure_5.RANKS}
    if any(own is None for own in runs.values()):
        return None
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    axes: dict[str, Any] = dict(zip(figure_5.UCI, figure.subplots(1, len(figure_5.UCI)), strict=True))
    for (data, method), own in runs.items():
        assert own is not None
        mean, error = own.mean(0), own.std(0) / len(own) ** 0.5
        steps, tint = torch.arange(own.shape[1]), colour(list(figure_5.RANKS).index(method))
        axes[data].fill_between(steps, mean - error, mean + error, color=tint, alpha=0.15, linewidth=0)
        axes[data].plot(steps, mean, color=tint, label=method)
    for data, axis in axes.items():
        axis.set(title=data, xlabel="labels asked for", ylabel="test RMSE")
        axis.legend()
    return figure


def errors(results: Results, data: str, method: str) -> Tensor | None:
    """The curves of all splits, [splits, steps + 1]; None unless all were run."""
    experiment = figure_5.EXPERIMENT
    cells = [Cell(data, method, split) for split in range(experiment.scales["paper"].splits_of(data))]
    found = [results.read(experiment, "paper", cell) for cell in cells]
    return torch.tensor([one.details["rmse"] for one in found if one]) if all(found) else None


def main() -> None:
    """Draw what is there."""
    results = Results(folder=Path(sys.argv[1]) if len(sys.argv) > 1 else PAPERS)
    for number, draw in ((4, toy), (5, active)):
        if figure := draw(results):
            figure.savefig(PICTURES / f"figure-{number}.png", dpi=60)


if __name__ == "__main__":
    main()
