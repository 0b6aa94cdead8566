"""BALI's binary tables: Table 2 (accuracy, AUC, calibration), Figure 2 (convergence) and Figure 7 (BALI-L).

All are read from the same runs, on Spam, Telescope (MAGIC) and Diabetes. The numbers of Table 2 are missing from our
text of the paper, and the figures have none, so what is judged are its claims. Along a run, the negative log-likelihood
(NLL) of the test rows is taken after every epoch with 8 draws, and kept beside that of the steps themselves; training
rows are judged at the end.

"reach" is the first step whose test NLL is within 5 % of the run's own best: how soon it has converged. "gap" is the
NLL of test rows less that of training rows at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dubito import Bernoulli, metrics, seeds
from dubito.data import Part, load
from dubito.models import mlp

from ..runner import provenance
from ..runner.experiment import Cell, Claim, Experiment, Metric, Outcome, Scale, Table, Variant
from .class_fit import CONVERGENCE, METHODS, ClassFit, better, followed, method_of, training_of

#: Data sets with BALI-L; Diabetes is run whole, or with so many of its 253,680 rows, and named so.
LOCAL, WHOLE, PART, ROWS = ("spambase", "magic"), "diabetes-health", "diabetes-20000", 20_000
DATA = (*LOCAL, WHOLE, PART)


@dataclass(frozen=True, kw_only=True)
class Fit(ClassFit):
    """How one network is trained and judged; the defaults are those of Tables 5 and 6 for both sets.

    Args:
        num_samples: draws of the last prediction.
        train_rows: training rows that are judged at the end.
    """

    iterations: int = 20_000
    lr: float = 1e-3
    num_samples: int = 128
    train_rows: int = 10_000


DIABETES = Fit(step_size=0.25, update_rate=0.05, prior_scale=10.0, effective_share=1 / 100, iterations=30_000)
#: Table 5, by data set.
OWN = {
    "spambase": Fit(step_size=0.1, prior_scale=10.0, effective_share=1 / 4),
    "magic": Fit(step_size=0.5, prior_scale=8.0, effective_share=1 / 10),
    WHOLE: DIABETES,
    # N_eff of the whole table: a hundredth of its training rows, four fifths of 253,680.
    PART: replace(DIABETES, effective_share=253_680 / ROWS / 100),
}


def load_cell(cell: Cell) -> tuple[Part, Part]:
    """Standardised training and test rows."""
    data = load(WHOLE if cell.data == PART else cell.data, cell.split, validation=0)
    if cell.data != PART:
        return data.train, data.test
    count = round(ROWS * len(data.train.targets) / (len(data.train.targets) + len(data.test.targets)))
    train, test = (
        Part(part.inputs[:rows], part.targets[:rows]) for part, rows in ((data.train, count), (data.test, ROWS - count))
    )
    return train, test


def generate_cell(cell: Cell) -> tuple[Part, Part]:
    """Made-up rows."""
    stream = seeds.generator(cell.seed, "made-up rows", cell.data)
    inputs = torch.randn(80, 5, generator=stream)
    targets = (inputs[:, 0] > 0).float()
    return Part(inputs[:60], targets[:60]), Part(inputs[60:], targets[60:])


def run_cells(
    cells: Sequence[Cell], data: Sequence[tuple[Part, Part]], settings: Fit, steps: int | None
) -> list[Outcome]:
    """One method on splits of one table."""
    return [run_split(cell, *parts, settings, steps) for cell, parts in zip(cells, data, strict=True)]


def run_split(cell: Cell, train: Part, test: Part, settings: Fit, steps: int | None) -> Outcome:
    """One method on one split."""
    seed = seeds.derived(cell.seed, cell.data, cell.split)
    net = mlp(train.inputs.shape[1], settings.hidden, num_classes=1, activation="leaky_tanh", seed=seed)
    num_data = len(train.targets)
    posterior = provenance.fit(
        method_of(cell.method, settings, num_data),
        net,
        train,
        Bernoulli(),
        training=training_of(cell.method, settings, num_data, steps),
        validation=test,
        seed=seed,
        progress=False,
    )
    samples = settings.num_samples if steps is None else steps
    rows = slice(settings.train_rows)
    told = posterior.predict(test.inputs, samples, seed=seed)
    seen = posterior.predict(train.inputs[rows], samples, seed=seed)
    nll, train_nll = (
        -float(prediction.log_prob(targets).mean())
        for prediction, targets in ((told, test.targets), (seen, train.targets[rows]))
    )
    probs, targets = told.probs.reshape(-1), test.targets.reshape(-1)  # pyright: ignore[reportAttributeAccessIssue]
    both, labels = torch.stack([1 - probs, probs], 1), targets.long()
    reach, curves = followed(posterior.history)
    return Outcome(
        metrics={
            "accuracy": metrics.accuracy(both, labels),
            "auc": metrics.auroc(probs, targets.bool()),
            "ece": metrics.ece(both, labels),
            "nll": nll,
            "gap": nll - train_nll,
            "reach": reach,
        },
        details={"train_nll": train_nll, **curves},
    )


def scale(seconds: dict[str, float], data: Sequence[str], splits: int, smaller: str = "", **changes: int) -> Scale:
    """Every method on every set, and BALI-L on two."""
    pairs = [(name, method) for name in data for method in METHODS] + [(name, "bali-l") for name in LOCAL]
    return Scale(
        variants={
            (name, method): Variant(settings=replace(OWN[name], **changes), cpu_seconds=seconds[method])
            for name, method in pairs
        },
        splits=splits,
        smaller=smaller,
    )


EXPERIMENT = Experiment(
    paper="bali",
    name="bali-binary",
    scales={
        "small": scale(
            {"bali": 65.0, "bali-l": 120.0, "mc-dropout": 30.0, "map": 17.0},
            (*LOCAL, PART),
            splits=5,
            smaller="1,000 iterations of 1,024 rows instead of 20,000 (Diabetes: 30,000) of 2,048; 20,000 rows of "
            "Diabetes instead of 253,680",
            iterations=1000,
            batch_size=1024,
        ),
        "paper": scale(
            {"bali": 1100.0, "bali-l": 2000.0, "mc-dropout": 750.0, "map": 400.0}, (*LOCAL, WHOLE), splits=5
        ),
    },
    load=load_cell,
    generate=generate_cell,
    run=run_cells,
)
DIFFERS = "test NLL along the run by 8 draws after every epoch, instead of 128 draws after every tenth"
TABLES = (
    Table(
        name="bali-table-2",
        title="accuracy, area under the ROC curve and calibration on binary tables, two hidden layers of 256 units",
        paper="BALI, Table 2, whose numbers are missing from our text",
        plus_minus="none",
        differs="15 bins of the calibration error, whose number is not given",
        experiment=EXPERIMENT,
        metrics=(
            Metric(name="accuracy", title="accuracy", lower_is_better=False),
            Metric(name="auc", title="AUC", lower_is_better=False),
            Metric(name="ece", title="ECE", lower_is_better=True),
            Metric(name="nll", title="NLL", lower_is_better=True),
        ),
        published={},
        claims=better("is better calibrated", "ece", DATA, {"bali": "BALI"}),
    ),
    Table(
        name="bali-figure-2",
        title="how soon the NLL has converged, and how far training and test rows are apart at the end",
        paper="BALI, Figure 2 (curves without numbers)",
        plus_minus="none",
        differs=DIFFERS,
        experiment=EXPERIMENT,
        metrics=CONVERGENCE,
        published={},
        claims=better("converges in fewer iterations", "reach", DATA, {"bali": "BALI"}),
    ),
    Table(
        name="bali-figure-7",
        title="weights or outputs of layers drawn: BALI and BALI-L",
        paper="BALI, Figure 7 (curves without numbers)",
        plus_minus="none",
        differs=DIFFERS,
        experiment=EXPERIMENT,
        metrics=CONVERGENCE,
        published={},
        claims=(
            Claim(text="BALI-L learns faster", metric="reach", better="bali-l", than="bali", data=LOCAL),
            Claim(
                text="BALI-L overfits more: BALI has the smaller gap",
                metric="gap",
                better="bali",
                than="bali-l",
                data=LOCAL,
            ),
        ),
    ),
)
