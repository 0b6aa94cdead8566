"""k-tied Normal, Figures 3 and 4: spectra of means and standard deviations, and heat maps of the latter."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.distributions.spectrum import centred, explained, truncate

from ..runner.experiment import Cell, Claim, Experiment, Metric, Outcome, Scale, Table, Variant
from . import regimes, table_2, trainings
from .regimes import PAPER, SHORT
from .tasks import LENET_DATA, LSTM_DATA, MLP_DATA, Rows
from .trainings import Regime

#: Singular values whose shares are kept beside the metrics.
KEPT = 20
#: Rows and columns of a heat map, evenly spaced: the whole matrices are too large to keep.
SIDE = 64


@dataclass(frozen=True, kw_only=True)
class Look:
    """A layer of a trained mean field.

    Args:
        layer: in the paper's words.
        regime: the training.
    """

    layer: str
    regime: Regime


def spectra(cells: Sequence[Cell], data: Sequence[Rows], settings: Look, steps: int | None) -> list[Outcome]:
    """Shares of variance of the first singular values of one layer's means or standard deviations."""
    outcomes, regime = [], settings.regime
    for cell, loaded in zip(cells, data, strict=True):
        posterior = trainings.trained(regime, regime.task.rows(loaded), cell.seed, steps)
        name = regime.task.layers[settings.layer]
        std = posterior.weight_scale(name).std
        means = cell.method == "means"
        matrix = (posterior.weights()[name] if means else std).detach().flatten(1)
        plain, rest = explained(matrix), explained(centred(matrix))
        shares = {
            "rank_1": float(plain[0]),
            "rank_2": float(plain[:2].sum()),
            "centred_rank_1": float(rest[0]),
            "centred_rank_2": float(rest[:2].sum()),
        }
        details = {
            "shares": plain[:KEPT].tolist(),
            "centred_shares": rest[:KEPT].tolist(),
            "mean_std": float(std.mean()),
            "coefficient_of_variation": float(centred(std).std() / std.mean()),
        }
        if not means and cell.seed == 0:
            details["heat_map"] = heat_map(std)
        outcomes.append(Outcome(metrics=shares, details=details))
    return outcomes


def heat_map(std: Tensor) -> dict[str, list]:
    """Some entries of σ [outputs, inputs], and the factors of its approximation of rank 2 there  [Figure 4]."""
    matrix = std.detach().flatten(1).double()
    left, right = truncate(matrix, 2)
    rows, columns = (torch.linspace(0, size - 1, min(size, SIDE)).round().long() for size in matrix.shape)
    parts = {"std": matrix[rows][:, columns], "left": left[:, rows], "right": right[:, columns]}
    return {name: [[float(f"{value:.4g}") for value in line] for line in part.tolist()] for name, part in parts.items()}


def variants(data: str, regime: Regime) -> dict[tuple[str, str], Variant]:
    """Every layer's means and standard deviations; the training is paid by Table 2."""
    return {
        (f"{data}-{layer}", method): Variant(settings=Look(layer=layer, regime=regime), cpu_seconds=5.0)
        for layer in regime.task.layers
        for method in ("means", "stds")
    }


def shared_work(cell: Cell) -> tuple:
    """The trained mean field, which Table 2 has too."""
    return ("-".join(cell.data.split("-")[:2]), cell.seed)


def experiment(name: str, scales: dict[str, Scale]) -> Experiment:
    """Layers of one network, or of a few."""
    return trainings.experiment(name, scales, spectra, shared_work)


def scales(data: str) -> dict[str, Scale]:
    """Three runs in CPU-minutes, and the paper's size."""
    short = SHORT[data]
    return {
        "small": Scale(variants=variants(data, short.regime), seeds=3, smaller=short.smaller),
        "paper": Scale(variants=variants(data, PAPER[data]), seeds=3),
    }


EXPERIMENTS = {
    MLP_DATA: experiment("ktied-spectrum", {"paper": Scale(variants=variants(MLP_DATA, regimes.CONVERGED), seeds=3)}),
    LENET_DATA: experiment("ktied-spectrum-lenet", scales(LENET_DATA)),
    LSTM_DATA: experiment("ktied-spectrum-lstm", scales(LSTM_DATA)),
}
METRICS = (
    Metric(name="rank_1", title="first", lower_is_better=False),
    Metric(name="rank_2", title="first two", lower_is_better=False),
    Metric(name="centred_rank_1", title="first, centred", lower_is_better=False),
    Metric(name="centred_rank_2", title="first two, centred", lower_is_better=False),
)


CENTRED = "centred: of the matrix less the mean of its entries"


def claims(data: Sequence[str]) -> tuple[Claim, ...]:
    """Standard deviations are nearer to low rank than means."""
    return tuple(
        Claim(
            text=f"standard deviations are nearer to low rank than means, by {words}",
            metric=metric,
            better="stds",
            than="means",
            data=tuple(data),
        )
        for metric, words in (("rank_2", "the first two"), ("centred_rank_2", "the first two, centred"))
    )


def table(data: str, suffix: str, where: str) -> Table:
    """Figure 3's panel of one network."""
    words, ours = table_2.WORDS[data]
    made = EXPERIMENTS[data]
    return Table(
        name=f"ktied-figure-3{suffix}",
        title=f"variance explained by the first singular values of means and standard deviations, {words}",
        paper=f"k-tied Normal, Figure 3, {where} (a picture, without numbers)",
        plus_minus="none",
        differs=f"{ours}; {regimes.converged(data)}{regimes.differs(data)}; {CENTRED}",
        experiment=made,
        metrics=METRICS,
        published={},
        claims=claims(list(dict.fromkeys(layer for layer, _ in made.scales["paper"].variants))),
    )


TABLES = (
    table(MLP_DATA, "", "left"),
    table(LENET_DATA, "-lenet", "centre, and the heat maps of Figure 4"),
    table(LSTM_DATA, "-lstm", "right"),
)
