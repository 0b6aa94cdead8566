"""Draw BALI's Figures 1 to 3 from what was run: `python docs/generate/bali.py [results]`.

Writes docs/methods/bali-figure-*.png, for the first draw or split; figures that were not run are left out.
"""

import sys
from pathlib import Path

import torch
from first_cells import first_cells
from matplotlib.figure import Figure

from dubito.plot.axes import colour
from dubito.reproduce import Results, bali_binary, bali_foreign, bali_toy

ROOT = Path(__file__).parent.parent.parent


def toys(results: Results) -> Figure | None:
    """Figures 1 and 4 to 6: fits and doubt on made-up sets."""
    methods = ("bali", *bali_toy.WEIGHTS)
    keys = [(data, method) for data in bali_toy.ALL for method in methods]
    found = first_cells(bali_toy.EXPERIMENT, "paper", keys, results)
    if not found:
        return None
    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(len(bali_toy.ALL), len(methods), sharex="row", sharey="row")
    for axis, ((data, method), one) in zip(axes.flatten(), found.items(), strict=True):
        grid = torch.tensor(one["grid"])
        points, targets = torch.tensor(one["train_inputs"]), torch.tensor(one["train_targets"])
        if data == bali_toy.MOONS:
            total = torch.tensor(one["total"])
            axis.tricontourf(*grid.T, total, levels=torch.linspace(0, 0.7, 15).tolist(), cmap="viridis")
            axis.scatter(*points.T, c=targets, s=6, cmap="coolwarm")
        else:
            mean, std = torch.tensor(one["mean"]), torch.tensor(one["std"])
            axis.fill_between(grid[:, 0], mean - std, mean + std, color=colour(0), alpha=0.3, linewidth=0)
            axis.plot(grid[:, 0], mean, color=colour(0))
            axis.plot(points[:, 0], targets, ".", color="red", markersize=3)
            axis.set_ylim(float(targets.min()) - 1, float(targets.max()) + 1)
        axis.set_title(f"{data}, {method}", fontsize=9)
    return figure


def convergence(results: Results) -> Figure | None:
    """Figure 2: the test NLL along a run."""
    keys = [(data, method) for data in bali_binary.DATA for method in bali_binary.METHODS]
    found = first_cells(bali_binary.EXPERIMENT, "small", keys, results)
    if not found:
        return None
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = dict(zip(bali_binary.DATA, figure.subplots(1, len(bali_binary.DATA)), strict=True))
    for (data, method), one in found.items():
        steps, values = zip(*one["test_nll_by_step"], strict=True)
        axes[data].loglog(steps, values, label=method, color=colour(bali_binary.METHODS.index(method)))
    for data, axis in axes.items():
        axis.set(title=data, xlabel="step", ylabel="test NLL")
        axis.legend()
    return figure


def foreign(results: Results) -> Figure | None:
    """Figure 3: ROC curves of entropy, MNIST and Fashion-MNIST told from each other."""
    keys = [(data, method) for data in bali_foreign.PAIRS for method in bali_foreign.METHODS]
    found = first_cells(bali_foreign.EXPERIMENT, "small", keys, results)
    if not found:
        return None
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = dict(zip(bali_foreign.PAIRS, figure.subplots(1, len(bali_foreign.PAIRS)), strict=True))
    for (data, method), one in found.items():
        curve = one["roc"]
        axes[data].plot(
            curve["false_positives"],
            curve["true_positives"],
            label=method,
            color=colour(bali_foreign.METHODS.index(method)),
        )
    for data, axis in axes.items():
        axis.set(title=data, xlabel="foreign images taken for own", ylabel="own images kept")
        axis.legend()
    return figure


def main() -> None:
    """Draw what is there."""
    results = Results(folder=Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results")
    for number, draw in ((1, toys), (2, convergence), (3, foreign)):
        if figure := draw(results):
            figure.savefig(ROOT / "docs" / "methods" / f"bali-figure-{number}.png", dpi=60)


if __name__ == "__main__":
    main()
