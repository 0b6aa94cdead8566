"""The implicit paper's figures, drawn from what was run (`python -m papers pictures`): the first run of each cell."""

from collections.abc import Mapping, Sequence

import torch
from matplotlib.figure import Figure

from dubito import plot
from dubito.data import load
from dubito.plot.axes import colour

from ..runner.experiment import Outcome
from ..runner.first_cells import first_cells, runs_by_method
from ..runner.store import Results
from ..runner.tables import tables
from . import figures_4_8
from .figure_1 import DATA as CUBIC
from .figure_1 import DEPTHS, PLACES
from .figures_4_8 import WIDTHS

Runs = Mapping[str, Sequence[Outcome]]

OBJECTS = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")


def details(name: str, results: Results) -> dict[tuple[str, str], dict]:
    """What the first run of each cell kept, by data and method; nothing unless all were run."""
    made = tables()[name].experiment
    scale = made.scale(None)
    return first_cells(made, scale, made.scales[scale].variants, results)


def cubic(kept: dict) -> Figure:
    """Figure 1: fits of growing depth."""
    data = load(CUBIC, 0, standardise=False)
    figure = Figure(figsize=(12, 5), layout="constrained")
    axes = figure.subplots(2, len(DEPTHS), sharex=True, sharey=True)
    x = PLACES.flatten()
    for row, method in zip(axes, ("mean-field", "implicit"), strict=True):
        for axis, depth in zip(row, DEPTHS, strict=True):
            one = kept[CUBIC, method][str(depth)]
            mean, std = torch.tensor(one["mean"]), torch.tensor(one["std"])
            axis.fill_between(x, mean - 2 * std, mean + 2 * std, color=colour(0), alpha=0.3, linewidth=0)
            axis.plot(x, mean, color=colour(0))
            axis.plot(*(part.flatten() for part in data.train), ".", color="red")
            axis.set(title=f"{method}, {depth} hidden", ylim=(-150, 150))
    return figure


def planes(kept: dict) -> Figure:
    """Figure 2: losses and accuracies around the components, and around plain networks."""
    figure = Figure(figsize=(15, 6), layout="constrained")
    axes = figure.subplots(2, 4)
    for row, ((_, method), one) in zip(axes, kept.items(), strict=True):
        kinds = ("train_nll", "train_accuracy", "test_nll", "test_accuracy")
        for axis, kind in zip(row, kinds, strict=True):
            values, x, y = (torch.tensor(one[key]) for key in (kind, "x", "y"))
            components, centre = torch.tensor(one["components"]), torch.tensor(one["centre"])
            words = kind.replace("_", " ")
            ends = (0.0, 0.9) if "nll" in kind else (0.1, 1.0)  # walls are high
            limits = (float(values.quantile(ends[0])), float(values.quantile(ends[1])))
            marks = {"components": components, "centre": centre}
            plot.loss_surface(values, x, y, **marks, limits=limits, name=words, axis=axis)
            axis.set_title(method)
    return figure


def draws(kept: dict) -> Figure:
    """Figure 3: the surest image of four classes above, the least sure one below."""
    ((data, _), *_) = kept
    test = load(data, standardise=False).test
    names = CLASSES if data == "fashion-mnist" else OBJECTS
    figure = Figure(figsize=(14, 6), layout="constrained")
    axes = figure.subplots(2, 8, width_ratios=[1, 2] * 4)
    for row, one in zip(axes, kept.values(), strict=True):
        for column, (image, probs) in enumerate(zip(one["images"], one["probs"], strict=True)):
            row[2 * column].imshow(test.inputs[image].movedim(0, -1), cmap="gray")
            row[2 * column].axis("off")
            plot.class_draws(torch.tensor(probs), class_names=names, axis=row[2 * column + 1])
    return figure


def noise(kept: dict) -> Figure:
    """Figure 8: where doubt comes from as images turn into noise."""
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    axes = figure.subplots(1, len(kept), sharey=True)
    for axis, ((data, method), one) in zip(axes, kept.items(), strict=True):
        parts, colours = ("aleatoric", "epistemic"), [colour(0), colour(1)]
        axis.stackplot(one["levels"], *(one[part] for part in parts), labels=parts, colors=colours)
        axis.set(title=f"{method}\n{data}", xlabel="level")
    axes[0].set_ylabel("mean entropy, nats")
    axes[0].legend()
    return figure


def widths(made: Runs) -> Figure | None:
    """Figure 4: error by width, mean over seeds."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axis = figure.subplots()
    for number, method in enumerate(figures_4_8.METHODS):
        rows = [(width, errors(made[f"{method}-{width}"])) for width in WIDTHS if f"{method}-{width}" in made]
        if rows:
            axis.plot(*zip(*rows, strict=True), "o-", color=colour(number), label=method)
    axis.set(xlabel="width", ylabel="test error (%)", xscale="log")
    axis.legend()
    return figure


def errors(runs: Sequence[Outcome]) -> float:
    """Mean error of some runs."""
    return sum(run.metrics["error"] for run in runs) / len(runs)


def components(made: Runs) -> Figure | None:
    """Figures 5 and 6: error, NLL and ECE of all methods and numbers of components, a point for each seed."""
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    titles = {"accuracy": "accuracy (%)", "nll": "NLL", "ece": "ECE"}
    for axis, (column, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for place, runs in enumerate(made.values()):
            axis.plot([place] * len(runs), [run.metrics[column] for run in runs], "o", color=colour(place), alpha=0.6)
        axis.set(title=title, xticks=range(len(made)))
        axis.set_xticklabels(list(made), rotation=45, fontsize=7)
    return figure


def calibration(made: Runs) -> Figure | None:
    """Figure 7: accuracy less confidence by confidence, for the first seed."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axis = figure.subplots()
    for number, (method, runs) in enumerate(made.items()):
        curve = runs[0].details["reliability"]
        gaps = [right - sure for right, sure in zip(curve["accuracy"], curve["confidence"], strict=True)]
        axis.plot(curve["confidence"], gaps, "o-", color=colour(number), label=method, markersize=3)
    axis.axhline(0, color="black", linewidth=0.5)
    axis.set(xlabel="confidence", ylabel="accuracy less confidence")
    axis.legend(fontsize=7)
    return figure


FIGURES = {
    "implicit-figure-1": cubic,
    "implicit-figure-2": planes,
    "implicit-figure-3": draws,
    "implicit-figure-8": noise,
    "implicit-figure-2-cifar10": planes,
    "implicit-figure-3-cifar10": draws,
    "implicit-figure-8-cifar10": noise,
}
#: Pictures of all seeds that are there, by name: their table and what draws them.
MEANS = {
    "figure-4": ("implicit-figure-4", widths),
    "figure-6": ("implicit-cifar10", components),
    "figure-7": ("implicit-cifar10", calibration),
}


def figures(results: Results) -> dict[str, Figure | None]:
    """Every figure, by the name of its file."""
    made: dict[str, Figure | None] = {}
    for name, draw in FIGURES.items():
        kept = details(name, results)
        made[name.removeprefix("implicit-")] = draw(kept) if kept else None
    for name, (table, draw) in MEANS.items():
        runs = runs_by_method(table, results)
        made[name] = draw(runs) if runs else None
    return made
