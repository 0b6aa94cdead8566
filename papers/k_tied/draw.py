"""The k-tied paper's Figures 3 to 7 and 9 to 12, drawn from what was run (`python -m papers pictures`).

Curves are means over seeds in a band from the least to the largest of them, spectra and heat maps are those of the
first seed; panels that were not run are left out.
"""

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.figure import Figure

from dubito.distributions.spectrum import Spectrum
from dubito.plot import explained_variance, std_map, stds_over_training
from dubito.plot.axes import colour

from ..runner.experiment import Cell, Experiment
from ..runner.first_cells import first_cells
from ..runner.store import Results
from . import figure_3, figure_7, resnet
from .regimes import RESNET_HE, SHORT
from .tasks import LENET_DATA, LSTM_DATA, MLP_DATA, RESNET_DATA
from .trainings import METHODS

TITLES = {MLP_DATA: "MLP, MNIST", LENET_DATA: "LeNet, CIFAR-10", LSTM_DATA: "LSTM, IMDB"}


def spectra(results: Results) -> Figure | None:
    """Figure 3: shares of singular values by network, plain above and centred below."""
    panels = {TITLES[data]: layers(results, figure_3.EXPERIMENTS[data], data) for data in TITLES}
    return spectral({title: panel for title, panel in panels.items() if panel})


def resnet_spectra(results: Results, data: str) -> Figure | None:
    """Figures 5 and 12, or 9: those of a ResNet under one prior."""
    panel = layers(results, resnet.SPECTRUM, data)
    return spectral({"ResNet, CIFAR-10" + (", He prior" if data == RESNET_HE else ""): panel} if panel else {})


def layers(results: Results, experiment: Experiment, data: str) -> dict[str, Spectrum]:
    """Spectra of the first seed by layer; none unless all were run."""
    names = list(SHORT[data.removesuffix("-he")].regime.task.layers)
    keys = [(f"{data}-{name}", method) for name in names for method in ("means", "stds")]
    stored = first_cells(experiment, experiment.scale(None), keys, results)
    if not stored:
        return {}
    shares = {key: [torch.tensor(cell[kind]) for kind in ("shares", "centred_shares")] for key, cell in stored.items()}
    return {name: Spectrum(*shares[f"{data}-{name}", "means"], *shares[f"{data}-{name}", "stds"]) for name in names}


def spectral(panels: dict[str, dict[str, Spectrum]]) -> Figure | None:
    """Panels of spectra: of matrices as they are above, less the mean of their entries below."""
    if not panels:
        return None
    figure = Figure(figsize=(4.5 * len(panels), 7), layout="constrained")
    axes = figure.subplots(2, len(panels), sharey=True, squeeze=False)
    for column, (title, panel) in zip(axes.T, panels.items(), strict=True):
        for axis, centred in zip(column, (False, True), strict=True):
            explained_variance(panel, centred=centred, most=8, axis=axis)
        column[0].set_title(title)
    return figure


def heat_maps(results: Results, experiment: Experiment, names: Sequence[str]) -> Figure | None:
    """Figures 4 and 11: σ and its approximations of rank 1 and 2, in the colours of σ; a row for each layer."""
    stored = first_cells(experiment, experiment.scale(None), [(name, "stds") for name in names], results)
    if not stored:
        return None
    figure = Figure(figsize=(11, 3.2 * len(names)), layout="constrained")
    for axes, ((name, _), cell) in zip(figure.subplots(len(names), 3, squeeze=False), stored.items(), strict=True):
        std, left, right = (torch.tensor(cell["heat_map"][key]) for key in ("std", "left", "right"))
        limits = (float(std.quantile(0.01)), float(std.quantile(0.99)))
        for axis, rank in zip(axes, (None, 1, 2), strict=True):
            matrix = std if rank is None else (left[:rank].mT @ right[:rank]).clamp_min(0)
            std_map(matrix, limits=limits, axis=axis)
            axis.set_title(name if rank is None else f"rank {rank}")
    return figure


def signal(results: Results) -> Figure | None:
    """Figure 6, right: signal to noise of the second layer's σ gradients by the ratio of means, and the median."""
    runs = curves(results, MLP_DATA)
    if not runs:
        return None
    figure = Figure(figsize=(11, 4), layout="constrained")
    for axis, (key, title) in zip(
        figure.subplots(1, 2, sharey=True), (("snr", "mean E[g²] / mean Var[g]"), ("median_snr", "median")), strict=True
    ):
        along(axis, runs, key)
        axis.set(title=title, yscale="log", ylabel="SNR")
    return figure


def convergence(results: Results) -> Figure | None:
    """Figure 7: validation −ELBO by step and network."""
    panels = {title: runs for data, title in TITLES.items() if (runs := curves(results, data))}
    if not panels:
        return None
    figure = Figure(figsize=(4.5 * len(panels), 4), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, runs) in zip(axes, panels.items(), strict=True):
        along(axis, runs, "neg_elbo")
        axis.set(title=title, yscale="log", ylabel="validation −ELBO")
    return figure


def stds(results: Results) -> Figure | None:
    """Figure 10: mean σ of a ResNet's layers by step; the first seed."""
    made = figure_7.EXPERIMENTS[RESNET_DATA]
    stored = first_cells(made, made.scale(None), [(RESNET_DATA, "mean-field")], results)
    if not stored:
        return None
    (cell,) = stored.values()
    figure = Figure(figsize=(6, 4), layout="constrained")
    steps = [int(step) for step in cell["curve"]["step"]]
    annealed = made.settings(made.scale(None), Cell(RESNET_DATA, "mean-field")).marks[0]
    stds_over_training(steps, cell["mean_stds"], warmup=annealed, axis=figure.subplots())
    return figure


def curves(results: Results, data: str) -> dict[str, list[dict[str, list[float]]]]:
    """What every seed that was run saw along training, by method; none unless all methods have one."""
    made = figure_7.EXPERIMENTS[data]
    scale = made.scale(None)
    runs = {
        method: [
            dict(stored.details["curve"])
            for seed in range(made.scales[scale].seeds)
            if (stored := results.read(made, scale, Cell(data, method, 0, seed)))
        ]
        for method in METHODS
    }
    return runs if all(runs.values()) else {}


def along(axis: Any, runs: dict[str, list[dict[str, list[float]]]], key: str) -> None:
    """A line of means over seeds with a band from the least to the largest, by method."""
    for number, (method, seeds) in enumerate(runs.items()):
        steps, values = seeds[0]["step"], torch.tensor([run[key] for run in seeds])  # [seeds, looks]
        axis.fill_between(steps, values.amin(0), values.amax(0), color=colour(number), alpha=0.2, linewidth=0)
        axis.plot(steps, values.mean(0), color=colour(number), label=method)
    axis.set_xlabel("step")
    axis.legend()


def figures(results: Results) -> dict[str, Figure | None]:
    """Every figure, by the name of its file."""
    deep = [f"{RESNET_DATA}-{stage}" for stage in ("stage-2", "stage-3", "stage-4")]
    return {
        "figure-3": spectra(results),
        "figure-4": heat_maps(results, figure_3.EXPERIMENTS[LENET_DATA], [f"{LENET_DATA}-dense-1"]),
        "figure-5": resnet_spectra(results, RESNET_DATA),
        "figure-6": signal(results),
        "figure-7": convergence(results),
        "figure-9": resnet_spectra(results, RESNET_HE),
        "figure-10": stds(results),
        "figure-11": heat_maps(results, resnet.SPECTRUM, deep),
    }
