"""Draw BALI's Figures 1 to 3 from what was run: `python -m papers.bali.draw [results]`.

Writes papers/bali/pictures/figure-*.png, for the first draw or split; figures that were not run are left out.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure

from dubito.plot.axes import colour

from ..runner.experiment import Experiment
from ..runner.first_cells import first_cells
from ..runner.store import PAPERS, Results
from . import binary, figure_1, figure_3

PICTURES = Path(__file__).parent / "pictures"


def toys(results: Results) -> Figure | None:
    """Figures 1 and 4 to 6: fits and doubt on made-up sets."""
    methods = ("bali", *figure_1.WEIGHTS)
    keys = [(data, method) for data in figure_1.ALL for method in methods]
    found = first_cells(figure_1.EXPERIMENT, "paper", keys, results)
    if not found:
        return None
    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(len(figure_1.ALL), len(methods), sharex="row", sharey="row")
    for axis, ((data, method), one) in zip(axes.flatten(), found.items(), strict=True):
        grid = torch.tensor(one["grid"])
        points, targets = torch.tensor(one["train_inputs"]), torch.tensor(one["train_targets"])
        if data == figure_1.MOONS:
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
    labels = {"xlabel": "step", "ylabel": "test NLL", "xscale": "log", "yscale": "log"}
    methods = binary.METHODS
    return curves(results, binary.EXPERIMENT, binary.DATA, methods, by_step, labels)


def by_step(kept: dict) -> tuple[Sequence[float], Sequence[float]]:
    """Steps and test NLL."""
    steps, values = zip(*kept["test_nll_by_step"], strict=True)
    return steps, values


def foreign(results: Results) -> Figure | None:
    """Figure 3: ROC curves of entropy, MNIST against Fashion-MNIST."""
    labels = {"xlabel": "foreign images taken for own", "ylabel": "own images kept"}
    methods = figure_3.METHODS
    return curves(results, figure_3.EXPERIMENT, figure_3.PAIRS, methods, roc, labels)


def roc(kept: dict) -> tuple[Sequence[float], Sequence[float]]:
    """Shares of foreign and of own images below rising thresholds."""
    return kept["roc"]["false_positives"], kept["roc"]["true_positives"]


def curves(
    results: Results,
    experiment: Experiment,
    data: Sequence[str],
    methods: Sequence[str],
    line: Callable[[dict], tuple[Sequence[float], Sequence[float]]],
    labels: dict[str, str],
) -> Figure | None:
    """A panel for each data set with a line for each method."""
    found = first_cells(experiment, "small", [(own, method) for own in data for method in methods], results)
    if not found:
        return None
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = dict(zip(data, figure.subplots(1, len(data)), strict=True))
    for (own, method), kept in found.items():
        axes[own].plot(*line(kept), label=method, color=colour(methods.index(method)))
    for own, axis in axes.items():
        axis.set(title=own, **labels)
        axis.legend()
    return figure


def main() -> None:
    """Draw what is there."""
    results = Results(folder=Path(sys.argv[1]) if len(sys.argv) > 1 else PAPERS)
    for number, draw in ((1, toys), (2, convergence), (3, foreign)):
        if figure := draw(results):
            figure.savefig(PICTURES / f"figure-{number}.png", dpi=60)


if __name__ == "__main__":
    main()
