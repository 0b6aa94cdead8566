"""Rank-1's Table 4 on records that everybody may have: PhysioNet 2012 in place of MIMIC-III.

An LSTM reads 48 hours of intensive care and predicts death in hospital. Set a trains, b ends training, c tests.
The paper's numbers are of other patients and stand beside nothing here; what is judged is how the methods compare
among themselves. Each patient's probability is kept with the results, for differences paired by patient
(`patients.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dubito import MAP, BatchEnsemble, Bernoulli, DeepEnsemble, MeanField, Rank1, factors, metrics, seeds
from dubito.data import Part, load
from dubito.method import Method
from dubito.models import clinical_lstm
from dubito.prediction import BernoulliPrediction
from dubito.training import KL, EarlyStopping, Training

from ..runner import provenance
from ..runner.experiment import Cell, Claim, Experiment, Metric, Outcome, Scale, Table, Variant
from ..settings import explicit

DATA = "physionet2012"
#: Digits of the probabilities that are kept.
DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class Clinic:
    """How one method is trained and judged.

    Args:
        method: with its settings.
        hidden: width of the LSTM's state.
        lr: learning rate of Adam.
        epochs: the most there are.
        patience: epochs without a lower validation loss before training ends.
        kl_warmup: epochs over which the divergence's weight rises to 1.
        num_samples: draws at test time.
        batch_size: patients per step.
    """

    method: Method
    hidden: int = 64
    lr: float = 2e-3
    epochs: int = 15
    patience: int = 3
    kl_warmup: float = 5.0
    num_samples: int = 25
    batch_size: int = 128


@dataclass(frozen=True, kw_only=True)
class Stays:
    """Hourly series of the three sets with who died."""

    train: Part
    validation: Part
    test: Part


def load_cell(cell: Cell) -> Stays:
    """Sets a, b and c, standardised by set a."""
    data = load(DATA)
    assert data.validation is not None
    return Stays(train=data.train, validation=data.validation, test=data.test)


def generate_cell(cell: Cell) -> Stays:
    """Made-up stays."""
    stream = seeds.generator(cell.seed, "made-up stays")
    parts = [Part(torch.randn(24, 6, 86, generator=stream), torch.arange(24) % 3 // 2) for _ in range(3)]
    return Stays(train=parts[0], validation=parts[1], test=parts[2])


def run_cells(cells: Sequence[Cell], data: Sequence[Stays], settings: Clinic, steps: int | None) -> list[Outcome]:
    """Train with early stopping on set b, and judge set c."""
    return [run_cell(cell, stays, settings, steps) for cell, stays in zip(cells, data, strict=True)]


def run_cell(cell: Cell, stays: Stays, settings: Clinic, steps: int | None) -> Outcome:
    """One method with one seed."""
    training = explicit(
        Training,
        epochs=settings.epochs if steps is None else None,
        iterations=steps,
        batch_size=settings.batch_size,
        lr=settings.lr,
        kl=explicit(KL, warmup=settings.kl_warmup),
        early_stopping=explicit(EarlyStopping, patience=settings.patience, num_samples=4),
    )
    posterior = provenance.fit(
        settings.method,
        clinical_lstm(stays.train.inputs.shape[-1], settings.hidden, seed=cell.seed),
        stays.train,
        Bernoulli(),
        training=training,
        validation=stays.validation,
        seed=cell.seed,
        progress=False,
    )
    count = settings.num_samples if steps is None else steps
    prediction = posterior.predict(stays.test.inputs, count, seed=cell.seed)
    assert isinstance(prediction, BernoulliPrediction)
    probs, died = prediction.probs[:, 0].double(), stays.test.targets
    return Outcome(
        metrics={
            "nll": metrics.nll(probs, died),
            "auc_pr": metrics.average_precision(probs, died == 1),
            "ece": metrics.ece(probs, died),
        },
        details={
            "epochs": len(posterior.history),
            "parameters": posterior.num_parameters,
            "probs": [round(value, DIGITS) for value in probs.tolist()],
        },
    )


def kept_probs(outcomes: Sequence[Outcome]) -> Tensor:
    """The probabilities that outcomes of several seeds kept, [seeds, N], away from 0 and 1 as rounding left them."""
    each = torch.tensor([outcome.details["probs"] for outcome in outcomes], dtype=torch.float64)
    least = 10.0**-DIGITS / 2
    return each.clamp(least, 1 - least)


METHODS: Mapping[str, Method] = {
    "deterministic": explicit(MAP),
    "batch-ensemble": explicit(BatchEnsemble),
    "bayesian-inputs": explicit(MeanField, prior_std=0.1, subset=("lstm.weight_ih_l0",)),
    "fully-bayesian": explicit(MeanField, prior_std=0.1),
    "rank1-normal": explicit(Rank1),
    "rank1-cauchy": explicit(Rank1, family=explicit(factors.Cauchy)),
    "deep-ensemble": explicit(DeepEnsemble),
}
#: CPU-seconds of one seed, measured.
SECONDS = {
    "deterministic": 10,
    "batch-ensemble": 40,
    "bayesian-inputs": 15,
    "fully-bayesian": 15,
    "rank1-normal": 80,
    "rank1-cauchy": 80,
    "deep-ensemble": 40,
}


def variants(**changes: int | float) -> dict[tuple[str, str], Variant]:
    """All methods."""
    return {
        (DATA, name): Variant(settings=replace(Clinic(method=method), **changes), cpu_seconds=SECONDS[name])
        for name, method in METHODS.items()
    }


EXPERIMENT = Experiment(
    paper="rank1",
    name="rank1-physionet",
    scales={
        "small": Scale(variants=variants(), seeds=10, smaller="10 seeds for 25, at most 15 epochs"),
        "paper": Scale(variants=variants(epochs=100, patience=10, kl_warmup=20.0), seeds=25),
    },
    load=load_cell,
    generate=generate_cell,
    run=run_cells,
)


def claim(text: str, metric: str, better: str, than: str) -> Claim:
    """A claim on the one data set."""
    return Claim(text=text, metric=metric, better=better, than=than, data=(DATA,))


TABLES = (
    Table(
        name="rank1-table-4-physionet",
        title="death in hospital from 48 hours of intensive care, LSTM of 64 units",
        paper="rank-1 BNN, Table 4",
        plus_minus="the paper gives none",
        experiment=EXPERIMENT,
        metrics=(
            Metric(name="nll", title="NLL", lower_is_better=True),
            Metric(name="auc_pr", title="AUC-PR", lower_is_better=False),
            Metric(name="ece", title="ECE", lower_is_better=True),
        ),
        published={},
        claims=(
            claim(
                "rank-1 Normal has a lower NLL than the deterministic network", "nll", "rank1-normal", "deterministic"
            ),
            claim("rank-1 Normal has a lower NLL than BatchEnsemble", "nll", "rank1-normal", "batch-ensemble"),
            claim(
                "rank-1 Normal has a lower NLL than the fully Bayesian network", "nll", "rank1-normal", "fully-bayesian"
            ),
            claim(
                "rank-1 Cauchy has a lower NLL than the deterministic network", "nll", "rank1-cauchy", "deterministic"
            ),
            claim("deep ensembles have a lower NLL than rank-1 Normal", "nll", "deep-ensemble", "rank1-normal"),
            claim(
                "rank-1 Normal has a lower ECE than the deterministic network", "ece", "rank1-normal", "deterministic"
            ),
        ),
        differs="PhysioNet 2012 in place of MIMIC-III: other patients, hourly bins with masks in place of embedded "
        "events, a Bayesian input kernel in place of Bayesian embeddings",
    ),
)
