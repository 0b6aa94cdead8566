"""One method on one split of one table: fitted by the protocol, judged against the MAP fit it shares with the others.

The rival is the protocol's MAP fit with its temperature (classes) or noise (reals) fitted on the validation rows.
Beside the methods of the registry stands "laplace-post-hoc": `Laplace()` fitted around the MAP fit's network as given,
without validation rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from dubito import methods
from dubito.calibration import temperature_scaled
from dubito.compare.network import suited
from dubito.data import Data, Part
from dubito.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from dubito.method import Method
from dubito.posterior import Posterior
from dubito.prediction import ClassPrediction, Prediction, RealPrediction, per_row
from dubito.protocol import Recipe
from dubito.shifts import feature_shuffled
from dubito.shifts.corruptions import chosen_rows
from dubito.training import AutoTraining

from ..runner import provenance
from ..runner.experiment import Cell, Outcome
from ..runner.scores import area, epistemic, interval_scores, losses_of, packed, total
from ..runner.shared_map import Rows, fit_from, map_fit, recipes_of

#: Methods by name; the last stands around the MAP fit without validation rows.
POST_HOC = "laplace-post-hoc"
METHODS = (*methods(), POST_HOC)
LIKELIHOODS = {"classification": Categorical, "binary": Bernoulli, "regression": Gaussian}


class Ground(NamedTuple):
    """What a split is judged on.

    Attributes:
        train: training rows.
        validation: rows that steer the fit.
        test: rows to judge on.
        network: as it starts.
        likelihood: of the targets.
    """

    train: Part
    validation: Part
    test: Part
    network: nn.Module
    likelihood: Likelihood

    @property
    def rows(self) -> Rows:
        """What a fit sees."""
        return Rows(self.train, self.validation, self.network, self.likelihood)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """All that decides the numbers.

    Args:
        method: with every setting spelled out.
        auto: the protocol.
        recipes: what it makes of the method for classes and for reals, under a prior as an example, so that a change
            of a recipe makes results stale.
        num_samples: draws per prediction.
        train_rows: at most so many training rows.
        test_rows: at most so many test rows.
    """

    method: Method
    auto: AutoTraining
    recipes: tuple[Recipe, ...]
    num_samples: int = 32
    train_rows: int = 5000
    test_rows: int = 1000


def settings_of(name: str, auto: AutoTraining, **changes: Any) -> Fit:
    """The settings of a method's cells."""
    method = methods()["laplace-kfac" if name == POST_HOC else name]
    return Fit(method=method, auto=auto, recipes=recipes_of(method, auto), **changes)


def ground_of(data: Data, train_rows: int, validation_rows: int, test_rows: int, seed: int) -> Ground:
    """Rows, network and likelihood of a data set."""
    assert data.validation is not None
    validation = Part(*(tensor[:validation_rows] for tensor in data.validation))
    rows = chosen_rows(len(data.train.targets), train_rows, seed)
    train = Part(*(tensor[rows] for tensor in data.train))
    test = Part(*(tensor[:test_rows] for tensor in data.test))
    network = suited(data, data.num_outputs, None).build(seed)
    return Ground(train, validation, test, network, LIKELIHOODS[data.task]())


class Rival(NamedTuple):
    """The MAP fit of a split, and what it loses on every test row."""

    point: Posterior
    losses: Tensor


_rivals: dict[Any, tuple[Rival, list[dict[str, Any]]]] = {}


def rival_of(cell: Cell, ground: Ground, settings: Fit, auto: AutoTraining) -> Rival:
    """The MAP fit, made once for the methods of a table that one process runs."""

    def made() -> Rival:
        point = map_fit(ground.rows, auto, cell.split)
        fitted = temperature_scaled(point, ground.validation, smoothed=True)
        return Rival(point, losses_of(fitted.predict(ground.test.inputs), ground.test.targets))

    for old in [key for key in _rivals if key[0] != cell.data]:
        del _rivals[old]
    key = cell.data, cell.split, auto, settings.train_rows, settings.test_rows
    return provenance.shared(_rivals, key, made)


def run_cells(cells: Sequence[Cell], data: Sequence[Ground], settings: Fit, steps: int | None) -> list[Outcome]:
    """A method on splits of one table."""
    return [run_split(cell, ground, settings, steps) for cell, ground in zip(cells, data, strict=True)]


def run_split(cell: Cell, ground: Ground, settings: Fit, steps: int | None) -> Outcome:
    """A method on one split."""
    auto = settings.auto if steps is None else AutoTraining(**{**vars(settings.auto), "iterations": steps})
    samples = settings.num_samples if steps is None else steps
    rival = rival_of(cell, ground, settings, auto)
    posterior = fitted(cell, ground, settings, auto, rival.point)
    return judged(posterior, rival, ground, samples)


def fitted(cell: Cell, ground: Ground, settings: Fit, auto: AutoTraining, point: Posterior) -> Posterior:
    """The method's posterior."""
    if cell.method == POST_HOC:
        return provenance.fit(settings.method, point.fold(0), ground.train, point.likelihood.settings, seed=cell.split)
    return fit_from(point, settings.method, ground.rows, auto, cell.split)


def judged(posterior: Posterior, rival: Rival, ground: Ground, samples: int) -> Outcome:
    """What the test rows say, and rows whose columns were shuffled apart."""
    inputs, targets = ground.test
    prediction = posterior.predict(inputs, samples)
    apart = feature_shuffled(inputs.flatten(1), seed=0).reshape(inputs.shape)  # of images, pixels are the columns
    shuffled = posterior.predict(apart, samples)
    differences = losses_of(prediction, targets) - rival.losses
    metrics = {
        "nll": float(rival.losses.mean() + differences.mean()),
        "map_nll": float(rival.losses.mean()),
        "difference": float(differences.mean()),
        "auroc_total": area(total(prediction), total(shuffled)),
        "auroc_epistemic": area(epistemic(prediction), epistemic(shuffled)),
        "epistemic_share": share(prediction),
        **certainty(prediction, targets),
    }
    facts = posterior.details.get("protocol", {})
    choice = posterior.details.get("precision_choice")
    details = {"differences": packed(differences), "protocol": facts, "precision_choice": choice}
    return Outcome(metrics=metrics, details=details)


def share(prediction: Prediction) -> float:
    """How much of the uncertainty is epistemic: of variances, or of entropies."""
    if isinstance(prediction, RealPrediction):
        return float((prediction.epistemic / prediction.std.square()).mean())
    assert isinstance(prediction, ClassPrediction)
    return float(prediction.epistemic.mean() / prediction.total.mean())


def certainty(prediction: Prediction, targets: Tensor) -> dict[str, float]:
    """Classes: accuracy of all and of the surest 80 %; reals: coverage and mean width of 90 % intervals, and RMSE."""
    if isinstance(prediction, RealPrediction):
        return interval_scores(prediction, targets)
    assert isinstance(prediction, ClassPrediction)
    right = (prediction.labels.flatten() == targets.flatten()).double()
    surest = per_row(prediction.total).argsort()[: max(1, round(0.8 * len(right)))]
    return {"accuracy": float(right.mean()), "accuracy_surest_80": float(right[surest].mean())}
