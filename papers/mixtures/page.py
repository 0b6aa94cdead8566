"""`python -m papers.mixtures.page` writes docs/mixtures.md: what mixtures are, and how they compare."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..runner.experiment import Cell, Outcome
from ..runner.intervals import quantile
from ..runner.store import Results
from .tables import DATA, EXPERIMENT, MODES, SIZES, settings_of

PAGE = Path(__file__).parents[2] / "docs" / "mixtures.md"
MIXTURES = ("inf-4", "inf-4-shared", "kfac-4", "swag-4", "rank1-4")
#: Splits that a data set must have finished to be shown.
FEWEST = 3
#: The columns of the table.
COLUMNS = {"nll": "NLL", "calibration_error": "ECE", "auroc_total": "AUROC"}
Rows = Mapping[str, list[Outcome]]

HEAD = """# Mixtures

A deep ensemble is a mixture of points. `DeepEnsemble(of=...)` is a mixture of posteriors: any method around each of K
modes.

```python
import torch
from dubito import INF, DeepEnsemble, Gaussian, Laplace, Training
from dubito.models import mlp

torch.manual_seed(0)
x = torch.rand(200, 1) * 4 - 2
y = x.sin() + 0.1 * torch.randn(200, 1)
method = DeepEnsemble(members=3, of=Laplace(structure=INF(rank=0.5)))
training = Training(epochs=100, lr=1e-2)
net = mlp(1, (16,), num_classes=1)
posterior = method.fit(net, (x[:150], y[:150]), Gaussian(), training=training)
near, far = (posterior.predict(torch.full((1, 1), at)) for at in (0.0, 6.0))
print(f"std {float(near.std):.2f} at 0, {float(far.std):.2f} at 6")
weighted = posterior.weighted("stacking", (x[150:], y[150:]))
print(len(weighted.component_weights), "weights")
```

```text
std 0.22 at 0, 0.85 at 6
3 weights
```

- `DeepEnsemble(of=SWAG())` is MultiSWAG, `DeepEnsemble(of=Rank1())` a mixture of rank-1 posteriors; every method but
  the deep ensemble itself can stand there. Members are trained one after the other, each with a checkpoint of its own.
- `Laplace(structure=INF()).around(posterior, data)` puts a Laplace posterior around every component of a fitted
  `BatchEnsemble`, `Rank1` or `DeepEnsemble` posterior: the curvature is taken at each component's mean, for the layers
  that `subset` names, with the noise that the component has.
- Draw s belongs to component s mod K. Predictions in closed form are mixtures of the components' closed forms: means
  and variances are exact, class probabilities are the weighted mean, `function_variance` is the total variance.
- `weights="equal"`, `"evidence"` (by the marginal likelihoods, of Laplace) or `"stacking"` (those under which the
  validation rows of `fit` are likeliest); `posterior.weighted(...)` does it afterwards. Weights are stored. Evidences
  of different modes differ by many nats: "evidence" mostly picks one.
- `posterior.shared("diagonal")` lets all components of INF share one diagonal, their mean.
- `save`, `load`, `sampled`, `export`, `scaled`, `temperature_scaled`, `evaluate`, `predict_batches` and `summary` work
  as for every posterior. `posterior.components` are the K posteriors. Parameters that were frozen are held once.
- Around a component of `Rank1` or `BatchEnsemble` the weights are written out: K networks, as of a deep ensemble.

## Is it worth its bytes?"""

METHOD = """Four modes of each kind beside deep ensembles of 1 to 20 members. Deep ensembles and Laplace mixtures
stand on the same MAP members (prior N(0, 1), Adam, cosine schedule, as many epochs for all), so that they differ in
nothing but what is kept around the modes. SWAG keeps rank 2, INF rank 20, rank-1 one component per mode. A tenth of the
training rows (1,000 images or texts) choose the scale of the posterior's standard deviations and the temperature (of
reals the noise) for every row of the table, of the deep ensembles the temperature alone. Networks: MLP 64-64 for the
tables, LeNet 6-16-120-84 on 10,000 images, an LSTM of width 32 on 10,000 texts, where Laplace treats LSTM and last
layer. Out of distribution are test rows whose columns were shuffled apart, and KMNIST for Fashion-MNIST. ECE of reals
is how far 90 % intervals are from covering 90 %. Bytes are in multiples of one network.

"Equal bytes" is the smallest deep ensemble that has at least as many bytes as the mixture, or that of 20 where none
has (`*`). Differences are NLL less that of this ensemble, split by split, with 95 % intervals of Student's t; below 0
the mixture is better. The length of the trainings was settled with a look at split 0 of concrete and digits."""


def page(results: Results | None = None) -> str:
    """The page."""
    tables = {data: rows_of(data, results or Results()) for data in DATA}
    parts = [HEAD, METHOD, verdict({data: rows for data, rows in tables.items() if rows})]
    parts += [section(data, rows) for data, rows in tables.items() if rows]
    finished = {data: min(map(len, rows.values())) if rows else 0 for data, rows in tables.items()}
    missing = [data for data in DATA if finished[data] < DATA[data] or {*settings_of(data)} - {*tables[data]}]
    if missing:
        parts.append(
            f"## Not run\n\nAll or some cells of {', '.join(missing)}. They are written; "
            + "with the data in a folder of DUBITO_DATA:\n\n```sh\n"
            + "\n".join(f"make runs RUNS=\"--only 'mixtures*{data}*'\"" for data in missing)
            + "\npython -m papers.mixtures.page\n```"
        )
    return "\n\n".join(parts) + "\n"


def rows_of(data: str, results: Results) -> dict[str, list[Outcome]]:
    """The outcomes of every row on the splits that all rows have; a row without any split is left out."""
    read = {
        name: {
            split: outcome
            for split in range(DATA[data])
            if (outcome := results.read(EXPERIMENT, "paper", Cell(data, name, split))) is not None
        }
        for name in settings_of(data)
    }
    started = {name: outcomes for name, outcomes in read.items() if len(outcomes) >= FEWEST}
    if not {*settings_of(data)} - {*MIXTURES} <= started.keys():
        return {}
    common = set.intersection(*(set(outcomes) for outcomes in started.values()))
    if len(common) < FEWEST:
        return {}
    return {name: [outcomes[split] for split in sorted(common)] for name, outcomes in started.items()}


def column(outcomes: list[Outcome], metric: str) -> np.ndarray:
    """A metric by split."""
    return np.array([outcome.metrics[metric] for outcome in outcomes])


def rival_of(rows: Rows, name: str) -> tuple[str, bool]:
    """The deep ensemble of as many bytes, and whether there is one that has them."""
    size = column(rows[name], "share_of_networks").mean()
    fitting = [f"ensemble-{members}" for members in SIZES if members >= size - 0.01]
    return (fitting[0], True) if fitting else (f"ensemble-{SIZES[-1]}", False)


def difference(rows: Rows, name: str, rival: str) -> tuple[float, float]:
    """The mean paired difference in NLL, and half of its 95 % interval."""
    values = column(rows[name], "nll") - column(rows[rival], "nll")
    error = values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(quantile(len(values)) * error)


def verdict(tables: Mapping[str, Rows]) -> str:
    """On how many data sets each mixture is better than a deep ensemble of equal bytes."""
    lines = [
        "| K = 4 of | better, and shown to be | better | worse | worse, and shown to be |",
        "|---|---|---|---|---|",
    ]
    for name in MIXTURES:
        pairs = {data: difference(rows, name, rival_of(rows, name)[0]) for data, rows in tables.items() if name in rows}
        groups: list[list[str]] = [[], [], [], []]
        for data, (mean, half) in pairs.items():
            place = (0 if mean + half < 0 else 1) if mean < 0 else (3 if mean - half > 0 else 2)
            groups[place].append(data.removeprefix("uci/"))
        lines.append(f"| {name} | {' | '.join(', '.join(group) or '–' for group in groups)} |")
    goal = f"The goal was three of five data sets; {len(tables)} have figures. NLL against equal bytes, by whether the "
    goal += "95 % interval leaves 0 out:"
    return goal + "\n\n" + "\n".join(lines)


def section(data: str, rows: Rows) -> str:
    """The table of one data set."""
    titles = " | ".join(COLUMNS.values())
    lines = [
        f"## {data}",
        "",
        f"Means over {min(map(len, rows.values()))} of {DATA[data]} splits.",
        "",
        f"| | {titles} | bytes | CPU-seconds | less ensemble-{MODES} | less equal bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, outcomes in rows.items():
        numbers = " | ".join(f"{column(outcomes, metric).mean():.3f}" for metric in COLUMNS)
        size, seconds = (column(outcomes, metric).mean() for metric in ("share_of_networks", "seconds"))
        against = " | "
        if name in MIXTURES:
            rival, fits = rival_of(rows, name)
            same, equal = (difference(rows, name, other) for other in (f"ensemble-{MODES}", rival))
            shown = [f"{mean:+.3f} ± {half:.3f}" for mean, half in (same, equal)]
            against = f"{' | '.join(shown)} ({rival}{'' if fits else '*'})"
        lines.append(f"| {name} | {numbers} | {size:.1f} | {seconds:.1f} | {against} |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
