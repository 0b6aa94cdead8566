"""BALI's Figures 1 to 3 and its costs, drawn from what was run (`python -m papers pictures`).

For the first draw or split, at the largest size that was run.
"""

import json
from collections.abc import Callable, Sequence

import torch
from matplotlib.figure import Figure

from dubito.plot.axes import colour

from ..runner.experiment import Experiment
from ..runner.first_cells import first_cells
from ..runner.store import Results
from . import binary, costs, figure_1, figure_3


def toys(results: Results) -> Figure | None:
    """Figures 1 and 4 to 6: fits and uncertainty on made-up sets."""
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
    """Figure 2: the NLL of test rows along a run, and of training rows where it was kept (dashed)."""
    return curves(results, binary.EXPERIMENT, binary.LOCAL, binary.METHODS, along, ALONG)


def image_convergence(results: Results) -> Figure | None:
    """Figure 2 on images."""
    return curves(results, figure_3.EXPERIMENT, figure_3.PAIRS, figure_3.ALL, along, ALONG, ("paper", "third"))


ALONG = {"xlabel": "step", "ylabel": "NLL", "xscale": "log", "yscale": "log"}


def along(kept: dict) -> list[tuple[str, Sequence[float], Sequence[float]]]:
    """Steps and NLL of test rows, and of training rows."""
    lines = []
    for name, style in (("test_nll_by_step", "-"), ("train_nll_by_step", "--")):
        if name in kept:
            steps, values = zip(*kept[name], strict=True)
            lines.append((style, steps, values))
    return lines


def detection(results: Results) -> Figure | None:
    """Figure 3: ROC curves of entropy, MNIST against Fashion-MNIST."""
    labels = {"xlabel": "out-of-distribution images below", "ylabel": "in-distribution images below the entropy"}
    for methods in (figure_3.ALL, figure_3.METHODS):
        if figure := curves(results, figure_3.EXPERIMENT, figure_3.PAIRS, methods, roc, labels):
            return figure
    return None


def roc(kept: dict) -> list[tuple[str, Sequence[float], Sequence[float]]]:
    """Shares of out-of-distribution and of in-distribution images below rising thresholds."""
    return [("-", kept["roc"]["false_positives"], kept["roc"]["true_positives"])]


def curves(
    results: Results,
    experiment: Experiment,
    data: Sequence[str],
    methods: Sequence[str],
    lines: Callable[[dict], list[tuple[str, Sequence[float], Sequence[float]]]],
    labels: dict[str, str],
    scales: Sequence[str] = ("paper", "third", "small"),
) -> Figure | None:
    """A panel for each data set with a line for each method, at the first of the scales that was run."""
    keys = [(name, method) for name in data for method in methods]
    stored = (first_cells(experiment, scale, keys, results) for scale in scales if scale in experiment.scales)
    found = next(filter(None, stored), None)
    if not found:
        return None
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = dict(zip(data, figure.subplots(1, len(data)), strict=True))
    for (name, method), kept in found.items():
        for style, x, y in lines(kept):
            label = method if style == "-" else None
            axes[name].plot(x, y, style, label=label, color=colour(methods.index(method)))
    for name, axis in axes.items():
        axis.set(title=name, **labels)
        axis.legend()
    return figure


def cost_curves(results: Results) -> Figure | None:
    """CPU time of a step in width, batch and rows, beside Appendix D's count through the largest place."""
    if not costs.FILE.exists():
        return None
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    measured = json.loads(costs.FILE.read_text(encoding="utf-8"))
    for axis, (name, points) in zip(figure.subplots(1, len(measured)), measured.items(), strict=True):
        places, took = ([point[key] for point in points] for key in (name, "milliseconds"))
        counted = [point["millions"] * took[-1] / points[-1]["millions"] for point in points]
        axis.plot(places, took, "o-", label="measured", color=colour(0))
        axis.plot(places, counted, "--", label="Appendix D, scaled", color=colour(1))
        axis.set(xlabel=name, ylabel="CPU-milliseconds of a step", xscale="log")
        axis.set(**({"ylim": (0, 1.5 * max(took))} if name == "rows" else {"yscale": "log"}))
        axis.legend()
    return figure


#: What draws each picture, by the name of its file.
PICTURED = {
    "figure-1": toys,
    "figure-2": convergence,
    "figure-2-images": image_convergence,
    "figure-3": detection,
    "costs": cost_curves,
}


def figures(results: Results) -> dict[str, Figure | None]:
    """Every figure, by the name of its file."""
    return {name: draw(results) for name, draw in PICTURED.items()}
