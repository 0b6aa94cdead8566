"""Rank-1's figures, drawn from what was run (`python -m papers pictures`): means over the seeds that are there.

Figure 1, which needs no run, is drawn from draws of the priors.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, distributions

from dubito.plot.axes import colour

from ..runner.experiment import Outcome
from ..runner.first_cells import runs_by_method
from ..runner.store import Results

TITLES = {"nll": "NLL", "accuracy": "accuracy (%)", "ece": "ECE"}
Runs = Mapping[str, Sequence[Outcome]]


def induced(count: int = 400_000) -> dict[str, Tensor]:
    """Draws of a weight w r with w ~ N(0, 1), s = 1 and r from each prior of Figure 1   [rank-1, Eq. 3]."""
    stream = torch.Generator().manual_seed(0)
    weights = torch.randn(count, generator=stream)
    uniform = torch.rand(count, generator=stream).clamp(1e-6, 1 - 1e-6)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        squares = distributions.Gamma(3.0, 3.0).sample((count,)).reciprocal()
    return {
        "r = 1": weights,
        "Normal r": weights * (1 + torch.randn(count, generator=stream)),
        "Cauchy r": weights * (1 + torch.tan(torch.pi * (uniform - 0.5))),
        "half-Cauchy r": weights * torch.tan(torch.pi * uniform / 2),
        "inverse-gamma r²": weights * squares.sqrt(),
    }


def priors(results: Results) -> Figure:
    """Figure 1: what priors on r make of a Normal weight."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots(1, 2)
    edges = torch.linspace(-6, 6, 121)
    places = (edges[1:] + edges[:-1]) / 2
    for number, (name, values) in enumerate(induced().items()):
        shares = torch.histogram(values, edges).hist / len(values) / (edges[1] - edges[0])
        for axis in axes:
            axis.plot(places, shares, color=colour(number), label=name)
    axes[0].set(xlabel="weight", ylabel="density")
    axes[1].set(xlabel="weight", yscale="log")
    axes[1].legend()
    return figure


def bars(runs: Runs, methods: Sequence[str], columns: Mapping[str, str]) -> Figure | None:
    """Metrics of some methods side by side, a point for each seed."""
    if any(name not in runs for name in methods):
        return None
    figure = Figure(figsize=(3 * len(columns), 3), layout="constrained")
    for axis, (column, title) in zip(figure.subplots(1, len(columns)), columns.items(), strict=True):
        for place, name in enumerate(methods):
            values = [outcome.metrics[column] for outcome in runs[name]]
            axis.plot([place] * len(values), values, "o", color=colour(place), alpha=0.5)
            axis.plot([place], [sum(values) / len(values)], "_", color="black", markersize=18)
        axis.set(title=title, xticks=range(len(methods)), xticklabels=methods)
    return figure


BOTH = {
    "nll": "NLL",
    "accuracy": "accuracy (%)",
    "ece": "ECE",
    "c_nll": "cNLL",
    "c_accuracy": "cA (%)",
    "c_ece": "cECE",
}


def sides(results: Results) -> Figure | None:
    """Figure 2: priors on s, r and both."""
    return bars(runs_by_method("rank1-ablations", results), ("on-s", "on-r", "both"), BOTH)


def components(results: Results) -> Figure | None:
    """Figure 3: the number of components."""
    runs = runs_by_method("rank1-ablations", results)
    named = {"k-4" if name == "both" else name: made for name, made in runs.items()}
    return bars(named, ("k-1", "k-2", "k-4", "k-8", "k-16"), BOTH)


def likelihoods(results: Results) -> Figure | None:
    """Figure 4: average against log-mixture; one component alone, all on test and on training images."""
    columns = {"nll": "test NLL", "nll_alone": "of one component", "train_nll": "training NLL"}
    return bars(runs_by_method("rank1-ablations", results), ("both", "log-mixture"), columns)


def trails(results: Results) -> Figure | None:
    """Figure 5: disagreement against accuracy and NLL, epoch by epoch."""
    runs = runs_by_method("rank1-ablations", results)
    methods = {"both": "rank-1 Normal", "batch-ensemble": "BatchEnsemble"}
    if any(name not in runs for name in methods):
        return None
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    for axis, column in zip(figure.subplots(1, 2, sharey=True), ("accuracy", "nll"), strict=True):
        for number, (name, words) in enumerate(methods.items()):
            for outcome in runs[name]:
                trail = outcome.details["trail"]
                axis.plot(trail[column], trail["diversity"], "o-", color=colour(number), label=words, alpha=0.6)
        axis.set(xlabel=TITLES[column])
        once(axis)
    figure.axes[0].set_ylabel("disagreement over error")
    return figure


def severities(results: Results) -> Figure | None:
    """Figure 7: metrics by severity of corruption, mean over all corruptions and seeds; 0 is clean."""
    runs = runs_by_method("rank1-cifar10", results)
    if not runs:
        return None
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    for axis, column in zip(figure.subplots(1, 3), TITLES, strict=True):
        for number, (name, made) in enumerate(runs.items()):
            curves = [[run.metrics[column], *run.details["severities"][column]] for run in made]
            curve = torch.tensor(curves).mean(0)
            axis.plot(range(len(curve)), curve, "o-", color=colour(number), label=name)
        axis.set(xlabel="severity", ylabel=TITLES[column])
    figure.axes[-1].legend(fontsize=7)
    return figure


def once(axis: Axes) -> None:
    """A legend that names every method once."""
    named: dict[str, Any] = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    axis.legend(list(named.values()), list(named))


FIGURES: Mapping[str, Callable[[Results], Figure | None]] = {
    "figure-1": priors,
    "figure-2": sides,
    "figure-3": components,
    "figure-4": likelihoods,
    "figure-5": trails,
    "figure-7": severities,
}


def figures(results: Results) -> dict[str, Figure | None]:
    """Every figure, by the name of its file."""
    return {name: draw(results) for name, draw in FIGURES.items()}
