"""INF's Figures 4 to 7, and its cost, drawn from what was run (`python -m papers pictures`)."""

import json
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from dubito.data import load
from dubito.plot.axes import colour

from ..runner.experiment import Cell
from ..runner.first_cells import first_cells
from ..runner.store import Results
from . import cost, figure_4, figure_5, searched, table_2


def toy(results: Results) -> Figure | None:
    """Figure 4: HMC first, then every method, each with two standard deviations; the first draw of the points."""
    groups = [[(figure_4.DATA, method) for method in group] for group in (figure_4.METHODS, figure_4.VALIDATED)]
    kept, validated = (first_cells(figure_4.EXPERIMENT, "paper", keys, results) for keys in groups)
    if not kept:
        return None
    kept |= validated
    first = next(iter(kept.values()))
    curves = {"HMC": (first["hmc_mean"], first["hmc_std"])}
    curves |= {method: (one["mean"], one["std"]) for (_, method), one in kept.items()}
    lines = -(-len(curves) // 4)
    figure = Figure(figsize=(12, 2.75 * lines), layout="constrained")
    axes = figure.subplots(lines, 4, sharex=True, sharey=True).flatten()
    for axis in axes[len(curves) :]:
        axis.set_axis_off()
    x, points = torch.tensor(first["x"]), load(figure_4.DATA, 0, standardise=False).train
    for axis, (name, curve) in zip(axes, curves.items(), strict=False):
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


def judged(results: Results) -> dict[str, dict[str, dict]]:
    """What the first seed kept of every network whose methods were all run, by data and method."""
    kept: dict[str, dict[str, dict]] = {}
    for experiment in (searched.DIGITS, searched.OBJECTS):
        for data in dict.fromkeys(name for name, _ in experiment.scales["small"].variants):
            keys = [(data, method) for method in (*searched.AVERAGED, *table_2.STRUCTURES)]
            if cells := first_cells(experiment, "small", keys, results):
                kept[data] = {method: details for (_, method), details in cells.items()}
    return kept


def reliability(results: Results) -> Figure | None:
    """Figure 6: confidence less accuracy against confidence, in bins with at least ten images."""
    kept = judged(results)
    if not kept:
        return None
    figure = Figure(figsize=(5 * len(kept), 3.8), layout="constrained")
    axes = figure.subplots(1, len(kept), squeeze=False)[0]
    for axis, (data, methods) in zip(axes, kept.items(), strict=True):
        for number, (method, details) in enumerate(methods.items()):
            curve = {name: torch.tensor(values) for name, values in details["reliability"].items()}
            full = curve["count"] >= 10
            gap = (curve["confidence"] - curve["accuracy"])[full]
            axis.plot(curve["confidence"][full], gap, marker=".", color=colour(number), label=method)
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set(title=data, xlabel="confidence", ylabel="confidence − accuracy")
    axes[0].legend(fontsize=7)
    return figure


def entropies(results: Results) -> Figure | None:
    """Figure 7: histograms of normalised entropies, in distribution and out of it."""
    kept = judged(results)
    if not kept:
        return None
    columns = max(len(methods) for methods in kept.values())
    figure = Figure(figsize=(2 * columns, 2 * len(kept)), layout="constrained")
    axes = figure.subplots(len(kept), columns, sharex=True, squeeze=False)
    for row, (data, methods) in zip(axes, kept.items(), strict=True):
        for axis, (method, details) in zip(row, methods.items(), strict=True):
            for number, (name, shares) in enumerate(details["entropies"].items()):
                axis.stairs(shares, torch.linspace(0, 1, len(shares) + 1), color=colour(number), label=name)
            axis.set(title=method, yscale="log")
        row[0].set_ylabel(data, fontsize=7)
    axes[0][0].legend(fontsize=7)
    return figure


def costs(results: Results) -> Figure | None:
    """CPU seconds along the size L of INF's factorisation, and along the weights of a layer beside the dense Normal."""
    if not cost.OUT.exists():
        return None
    kept = json.loads(cost.OUT.read_text(encoding="utf-8"))
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    along, beside = figure.subplots(1, 2)
    for number, work in enumerate(("factorisation", "draw")):
        lines = ((along, "along size", "size", "INF"), (beside, "along weights", "weights", "INF"))
        for axis, key, places, name in (*lines, (beside, "dense", "weights", "dense")):
            style = "--" if name == "dense" else "-"
            x, y = ([entry[field] for entry in kept[key]] for field in (places, work))
            axis.plot(x, y, style, marker=".", color=colour(number), label=f"{name}, {work}")
    along.set(xlabel="L, of 65,536 weights", ylabel="CPU seconds", xscale="log", yscale="log")
    beside.set(xlabel="weights N; INF at L = 100", xscale="log", yscale="log")
    for axis in (along, beside):
        axis.legend(fontsize=8)
    return figure


def errors(results: Results, data: str, method: str) -> Tensor | None:
    """The curves of all splits, [splits, steps + 1]; None unless all were run."""
    experiment = figure_5.EXPERIMENT
    cells = [Cell(data, method, split) for split in range(experiment.scales["paper"].splits_of(data))]
    found = [results.read(experiment, "paper", cell) for cell in cells]
    return torch.tensor([one.details["rmse"] for one in found if one]) if all(found) else None


def figures(results: Results) -> dict[str, Figure | None]:
    """Every figure, by the name of its file."""
    drawn = {"figure-4": toy, "figure-5": active, "figure-6": reliability, "figure-7": entropies, "cost": costs}
    return {name: draw(results) for name, draw in drawn.items()}
