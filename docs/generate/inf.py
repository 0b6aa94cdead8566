"""Draw INF's Figures 4 and 5 from what was run: `python docs/generate/inf.py [results]`.

Writes docs/methods/inf-figure-*.png; figures that were not run are left out.
"""

import sys
from pathlib import Path

import torch
from first_cells import first_cells
from matplotlib.figure import Figure
from torch import Tensor

from dubito.data import load
from dubito.plot.axes import colour
from dubito.reproduce import Cell, Results, inf_active, inf_toy

ROOT = Path(__file__).parent.parent.parent


def toy(results: Results) -> Figure | None:
    """Figure 4: HMC first, then every method, each with two standard deviations; the first draw of the points."""
    keys = [(inf_toy.DATA, method) for method in inf_toy.METHODS]
    kept = first_cells(inf_toy.EXPERIMENT, "paper", keys, results)
    if not kept:
        return None
    first = next(iter(kept.values()))
    curves = {"HMC": (first["hmc_mean"], first["hmc_std"])}
    curves |= {method: (one["mean"], one["std"]) for (_, method), one in kept.items()}
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    axes = figure.subplots(2, 4, sharex=True, sharey=True).flatten()
    x, points = torch.tensor(first["x"]), load(inf_toy.DATA, 0, standardise=False).train
    for axis, (name, curve) in zip(axes, curves.items(), strict=True):
        mean, std = (torch.tensor(values) for values in curve)
        axis.fill_between(x, mean - 2 * std, mean + 2 * std, color=colour(0), alpha=0.3, linewidth=0)
        axis.plot(x, mean, color=colour(0))
        axis.plot(*(part.flatten() for part in points), ".", color="red")
        axis.set(title=name, ylim=(-150, 150))
    return figure


def active(results: Results) -> Figure | None:
    """Figure 5: the test error along active learning, means over splits with their standard errors."""
    runs = {
        (data, method): errors(results, data, method)
        for data in inf_active.UCI
        for method in inf_active.RANKS
    }
    if any(own is None for own in runs.values()):
        return None
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    axes = dict(zip(inf_active.UCI, figure.subplots(1, len(inf_active.UCI)), strict=True))
    for (data, method), own in runs.items():
        assert own is not None
        mean, error = own.mean(0), own.std(0) / len(own) ** 0.5
        steps, tint = torch.arange(own.shape[1]), colour(list(inf_active.RANKS).index(method))
        axes[data].fill_between(steps, mean - error, mean + error, color=tint, alpha=0.15, linewidth=0)
        axes[data].plot(steps, mean, color=tint, label=method)
    for data, axis in axes.items():
        axis.set(title=data, xlabel="labels asked for", ylabel="test RMSE")
        axis.legend()
    return figure


def errors(results: Results, data: str, method: str) -> Tensor | None:
    """The curves of all splits, [splits, steps + 1]; None unless all were run."""
    experiment = inf_active.EXPERIMENT
    cells = [Cell(data, method, split) for split in range(experiment.scales["paper"].splits_of(data))]
    found = [results.read(experiment, "paper", cell) for cell in cells]
    return torch.tensor([one.details["rmse"] for one in found if one]) if all(found) else None


def main() -> None:
    """Draw what is there."""
    results = Results(folder=Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results")
    for number, draw in ((4, toy), (5, active)):
        if figure := draw(results):
            figure.savefig(ROOT / "docs" / "methods" / f"inf-figure-{number}.png", dpi=60)


if __name__ == "__main__":
    main()
