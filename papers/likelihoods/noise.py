"""The likelihood that a comparison chooses beside a Gaussian one, on tables of counts and with heavy tails.

`python -m papers.likelihoods.noise` reads elevators and protein where DUBITO_DATA says, takes doctor visits from
statsmodels (RAND's health insurance experiment), makes a table of counts, and writes `noise.json` beside it, from which
the table of `docs/likelihoods.md` comes. The same rows, network and protocol; splits 0 to 2; no test row chooses.
"""

import json
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dubito import DubitoWarning, NegativeBinomial, Poisson, methods
from dubito.compare.settings import Settings
from dubito.compare.task import Task, make_task
from dubito.prediction import RealPrediction
from dubito.training import AutoTraining

from ..runner import provenance
from ..runner.intervals import half_width
from ..settings import explicit

RESULTS = Path(__file__).with_suffix(".json")
METHODS, SPLITS, ROWS, TEST_ROWS = ("map", "swag", "laplace-kfac"), (0, 1, 2), 3000, 1000


def made_up(path: Path) -> None:
    """Counts whose mean is known, with more spread than Poisson's."""
    draws = np.random.default_rng(0)
    inputs = draws.normal(size=(4000, 5))
    rate = np.exp(1 + 0.6 * inputs[:, 0] - 0.4 * inputs[:, 1] * inputs[:, 2])
    counts = draws.poisson(rate * draws.gamma(2.0, 0.5, len(rate)))
    np.savetxt(path, np.column_stack([inputs, counts]), delimiter=",", header="a,b,c,d,e,y", comments="")


def doctor_visits(path: Path) -> None:
    """Visits of 20,190 persons and years."""
    import statsmodels.api as sm  # pyright: ignore[reportMissingImports]

    visits: Any = sm.datasets.randhie.load_pandas().data
    visits.to_csv(path, index=False)


def tables(folder: Path) -> dict[str, dict[str, Any]]:
    """Where each table is, and its target."""
    made_up(folder / "counts.csv")
    doctor_visits(folder / "visits.csv")
    return {
        "made-up counts": {"data": str(folder / "counts.csv"), "target": "y"},
        "doctor visits": {"data": str(folder / "visits.csv"), "target": "mdvis"},
        "elevators": {"data": "elevators"},
        "protein": {"data": "uci/protein"},
    }


def scores(task: Task, method: str, seed: int) -> dict[str, float]:
    """Mean CRPS of test rows in the target's units, and of reals the mean negative log-likelihood."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DubitoWarning)
        posterior = provenance.fit(
            methods()[method], task.network.build(seed), task.train, task.likelihood,
            training=explicit(AutoTraining), validation=task.validation, seed=seed, progress=False,
        )  # fmt: skip
    prediction, targets = posterior.predict(task.test.inputs[:TEST_ROWS]), task.test.targets[:TEST_ROWS]
    assert isinstance(prediction, RealPrediction)
    if task.data.target_scaling is not None:
        shift, scale = task.data.target_scaling
        prediction, targets = prediction.rescaled(shift, scale), shift + scale * targets
    crps, nll = prediction.crps(targets).double(), -prediction.log_prob(targets).double()
    return {"crps": float(crps.mean()), "nll": float(nll.mean())}


def run() -> dict[str, Any]:
    """Every table, split and method, under the chosen likelihood and under a Gaussian."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, place in tables(Path(folder)).items():
            entry: dict[str, Any] = {"chosen": [], "methods": {method: [] for method in METHODS}}
            start = time.process_time()
            for split in SPLITS:
                chosen, plain = (
                    make_task(Settings(**place, splits=(split,), rows=ROWS, seed=split, likelihood=told))
                    for told in (None, "gaussian")
                )
                entry["chosen"].append(chosen.likelihood_reason)
                entry["counts"] = isinstance(chosen.likelihood, Poisson | NegativeBinomial)
                for method, splits in entry["methods"].items():
                    splits.append({"chosen": scores(chosen, method, split), "gaussian": scores(plain, method, split)})
            entry["seconds"] = round(time.process_time() - start)
            figures[name] = entry
            print(name, entry["chosen"], entry["seconds"], flush=True)
    return figures


def less(splits: list[dict[str, dict[str, float]]], metric: str) -> str:
    """The difference to the Gaussian's, its mean over splits with Student's 95 % interval."""
    values = [entry["chosen"][metric] - entry["gaussian"][metric] for entry in splits]
    reach = half_width(values)
    return f"{np.mean(values):+.3f} ± {reach:.3f}"


def table(figures: dict[str, Any]) -> str:
    """The page's table."""
    lines = ["| table | chosen | method | CRPS, Gaussian | CRPS less | NLL less |", "|---|---|---|---|---|---|"]
    for name, entry in figures.items():
        chosen = ", ".join(dict.fromkeys(reason.split(":")[0] for reason in entry["chosen"]))
        for method, splits in entry["methods"].items():
            gaussian = float(np.mean([pair["gaussian"]["crps"] for pair in splits]))
            nll = "" if entry["counts"] else less(splits, "nll")
            lines.append(f"| {name} | {chosen} | {method} | {gaussian:.3f} | {less(splits, 'crps')} | {nll} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    done = run()
    RESULTS.write_text(json.dumps(done, indent=1) + "\n")
    print(table(done))
