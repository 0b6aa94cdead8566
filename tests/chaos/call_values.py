"""Arguments of valid calls, for the campaign of bad calls: by the callable's name and the parameter's, or the latter.

A new public callable whose parameters are known here, or have defaults, needs nothing; others fail the campaign until
a line is added.
"""

import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dubito
from dubito import Categorical, DubitoWarning, Gaussian, Training, active, calibration, optim, shifts
from dubito.data import Data, Part, Scaling
from dubito.metrics import Over
from dubito.prediction import (
    BernoulliPrediction,
    CategoricalPrediction,
    CountPrediction,
    OutputPrediction,
    RealPrediction,
    StudentTPrediction,
)

ROWS = 12
QUICK = Training(epochs=1, batch_size=6)
#: Methods with settings that make them cheap; a method that is not named here is taken as registered.
CHEAP = {
    "deep-ensemble": dubito.DeepEnsemble(members=2),
    "hmc": dubito.HMC(num_samples=4, warmup=4, chains=2, tree_depth=1),
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))


INPUTS = numbers(ROWS, 4)
LABELS = torch.arange(ROWS) % 3
REALS = numbers(ROWS, 1, seed=1)
PROBS = numbers(ROWS, 3, seed=2).softmax(1)
STDS = numbers(ROWS, 1, seed=3).abs() + 0.1
IMAGES = torch.rand(ROWS, 1, 8, 8, generator=torch.Generator().manual_seed(4))
TRIL = torch.eye(3) + 0.1
VECTORS = torch.eye(4)
FOLDER = Path(tempfile.mkdtemp(prefix="dubito-calls-"))


def classes() -> CategoricalPrediction:
    return Categorical().build(None).predictive(numbers(4, ROWS, 3, seed=5))


def yes_or_no() -> BernoulliPrediction:
    return dubito.Bernoulli().build(None).predictive(numbers(4, ROWS, 1, seed=6))


def reals() -> RealPrediction:
    return RealPrediction(numbers(4, ROWS, 1, seed=7), torch.full((4, 1, 1), 0.25))


class OwnLaw(dubito.OwnLikelihood):
    """Squared errors."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -(outputs - targets).square().sum(1)


@cache
def posterior(method: str = "mean-field", likelihood: str = "classes") -> Any:
    """A fitted posterior of a registered method."""
    settings = CHEAP.get(method) or dubito.methods()[method]
    outputs, targets, law = {"classes": (3, LABELS, Categorical()), "reals": (1, REALS, Gaussian())}[likelihood]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DubitoWarning)
        return settings.fit(network(outputs), (INPUTS, targets), law, training=None if method == "hmc" else QUICK)


@cache
def pilot() -> Any:
    auto = Training.auto(iterations=4, batch_size=4, priors=(None,))
    return dubito.MAP().fit(network(), (INPUTS, LABELS), Categorical(), training=auto)


@cache
def saved() -> str:
    path = FOLDER / "posterior.safetensors"
    posterior().save(path)
    return str(path)


def curve(shift: float = 0.0) -> active.Curve:
    points = [
        active.CurvePoint(
            num_labelled=n, metrics={"rmse": 1 / n + shift}, chosen=(0,), fit_seconds=0.1, acquisition_seconds=0.1
        )
        for n in (2, 4, 6)
    ]
    return active.Curve(points=tuple(points))


def data_set() -> Data:
    part = Part(IMAGES, LABELS)
    return Data(
        name="images",
        task="classification",
        train=part,
        validation=None,
        test=part,
        split=0,
        num_splits=1,
        num_outputs=3,
        num_classes=3,
        feature_names=(),
        class_names=("a", "b", "c"),
        target_name="label",
        input_scaling=None,
        target_scaling=None,
        licence="",
        source="",
        task_reason="",
    )


@cache
def image_posterior() -> Any:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    return dubito.MAP().fit(net, (IMAGES, LABELS), Categorical(), training=QUICK)


def optimiser(kind: type = optim.NoisyAdam) -> Any:
    return kind(network().parameters(), num_data=ROWS)


def objective() -> Any:
    made = dubito.MeanField().build(network(), Categorical(), ROWS)
    made.bind(INPUTS)
    return made


def results() -> shifts.CorruptionResults:
    values = {(name, 1): {"accuracy": 0.2, "nll": 0.4} for name in shifts.CORRUPTIONS}
    return shifts.CorruptionResults(
        clean={"accuracy": 0.1, "nll": 0.3}, corrupted=values, num_images=ROWS, constants="cifar"
    )


def normal() -> dubito.distributions.DiagonalNormal:
    return dubito.distributions.DiagonalNormal(numbers(3, 4), torch.rand(3, 4), num_data=10.0, prior_precision=1.0)


#: Values by parameter; "callable.parameter" goes before "parameter".
VALUES: dict[str, Any] = {
    "net": network,
    "network": network,
    "inputs": INPUTS,
    "data": (INPUTS, LABELS),
    "targets": LABELS,
    "likelihood": Categorical(),
    "validation": (INPUTS, LABELS),
    "num_data": ROWS,
    "num_samples": 2,
    "training": QUICK,
    "seed": 0,
    "path": saved,
    "posterior": posterior,
    "prediction": classes,
    "predictions": classes,
    "probs": PROBS,
    "scores": numbers(ROWS),
    "positives": torch.arange(ROWS) % 2,
    "uncertainty": numbers(ROWS),
    "correct": torch.arange(ROWS) % 2 == 0,
    "mean": REALS,
    "std": STDS,
    "lower": REALS - 1,
    "upper": REALS + 1,
    "means": numbers(4, ROWS, 1),
    "stds": numbers(4, ROWS, 1).abs() + 0.1,
    "images": IMAGES,
    "severity": 1,
    "values": numbers(ROWS),
    "over": Over.EXAMPLES,
    "method": dubito.MAP(),
    "inside": classes,
    "outside": classes,
    "metric": "rmse",
    "curves": lambda: [curve(), curve(0.1)],
    "first": lambda: [curve(), curve(0.1)],
    "second": lambda: [curve(0.2), curve(0.4)],
    "parts": lambda: [yes_or_no(), yes_or_no()],
    "level": 0.9,
    "quality": 50,
    "share": 0.1,
    "losses": numbers(ROWS),
    "reference": numbers(ROWS, seed=9),
    "scale": 1.5,
    "value": numbers(3, 4),
    "num_classes": 3,
    "in_features": 4,
    "num_features": 4,
    "depth": 10,
    "width": 1,
    "params": lambda: list(network().parameters()),
    "prior_precision": 1.0,
    "eigenvalues": torch.rand(3, 4) + 0.1,
    "rank": 2,
    "objective": objective,
    "vectors": numbers(3, 4),
    "values_a": numbers(ROWS),
    "values_b": numbers(ROWS, seed=1),
    "acquisition": active.Random(),
    "auto": lambda: Training.auto(iterations=4),
}
VALUES |= {
    **{
        f"{name}.targets": REALS
        for name in (
            "mae",
            "rmse",
            "crps_gaussian",
            "interval_coverage",
            "quantile_calibration",
            "RealPrediction.log_prob",
        )
    },
    **{
        f"{name}.targets": REALS
        for name in ("crps_mixture", "crps_mixture_per_example", "mixture_log_prob", "mixture_log_prob_per_example")
    },
    "mae.mean": REALS + 1,
    "disagreement.probs": PROBS.expand(2, ROWS, 3),
    "BernoulliPrediction.log_prob.targets": torch.arange(ROWS) % 2,
    "quantile_calibration.quantiles": numbers(2, ROWS, 1).sort(0).values,
    "quantile_calibration.levels": torch.tensor([0.2, 0.7]),
    "corrupt.name": "fog",
    "ood_pair.name": next(iter(shifts.PAIRS)),
    "make.name": "lenet",
    "mce.baseline": results,
    "mean.measure": "nll",
    "held_out.data": data_set,
    "held_out.classes": (2,),
    "evaluate_corruptions.posterior": image_posterior,
    "evaluate_corruptions.data": (IMAGES, LABELS),
    "evaluate_corruptions.names": ("fog",),
    "evaluate_corruptions.severities": (1,),
    "corruptions.names": ("fog",),
    "corruptions.severities": (1,),
    "vgg.stages": ((2,), (2,)),
    "vgg.dense": (4,),
    "ActiveLearning.steps": 1,
    "ActiveLearning.initial": 4,
    "run.pool": (INPUTS, LABELS),
    "run.test": (INPUTS, LABELS),
    "IntervalRule.fit.prediction": reals,
    "IntervalRule.fit.targets": REALS,
    "HMC.num_samples": 4,
    "predict_batches.data": INPUTS,
    "intervals.prediction": reals,
    "chosen_scale.scales": (0.5, 1.0),
    "dubito.data.load.name": "digits",
    "apply.values": INPUTS,
    "undo.values": INPUTS,
    "gradient_snr.num_batches": 3,
    "gradient_snr.batch_size": 4,
    "active_learning_curve.curves": lambda: {"a": curve()},
    "explained_variance.spectra": lambda: posterior().spectrum(),
    "std_map.std": torch.rand(3, 4) + 0.1,
    "std_map.rank": 1,
    "stds_over_training.steps": (0, 1),
    "stds_over_training.stds": {"a": (0.1, 0.2)},
    "class_draws.probs": PROBS,
    "loss_surface.values": torch.rand(3, 4),
    "loss_surface.x": torch.arange(3.0),
    "loss_surface.y": torch.arange(4.0),
    "regression_fan.prediction": reals,
    "regression_fan.inputs": INPUTS[:, 0],
    "regression_fan.targets": REALS,
    "add_param_group.param_group": lambda: {"params": [nn.Parameter(torch.zeros(2))]},
    "Pilot.prior_std": 1.0,
    "Pilot.best_step": 3,
    "Pilot.rows": ROWS,
    "Pilot.real": False,
    "Recipe.warm": False,
    "recipe.pilot": lambda: dubito.protocol.Pilot(prior_std=None, best_step=3, rows=ROWS, real=False),
    "pilot_of.point": pilot,
    "from_networks.networks": lambda: [nn.Linear(4, 3), nn.Linear(4, 3)],
    "Around.std": 1.0,
    "Labelled.data": lambda: {"x": INPUTS, "labels": LABELS},
    "Labelled.target": "labels",
    **{f"{name}.reference": PROBS for name in ("agreement", "agreement_per_example")},
    **{f"{name}.reference": PROBS for name in ("total_variation", "total_variation_per_example")},
    **{f"{name}.draws": numbers(4, ROWS) for name in ("wasserstein2", "wasserstein2_per_example")},
    **{f"{name}.reference": numbers(5, ROWS) for name in ("wasserstein2", "wasserstein2_per_example")},
    "save.path": str(FOLDER / "other.safetensors"),
    "quantile.q": 0.3,
    "rescaled.shift": 1.0,
    "rescaled.scale": 2.0,
    "tied.rank": 1,
    "update.data": (INPUTS, LABELS),
    "function.index": 0,
    "fold.index": 0,
    "component.index": 0,
    "std.draw": 0,
    "Settings.data": "digits",
    "fit_seconds.num_methods": 2,
    "predict.num_samples": 2,
    "evaluate.num_samples": 2,
    "DiagonalNormal.mean": numbers(3, 4),
    "DiagonalNormal.diagonal": torch.rand(3, 4),
    "GroupedNormal.parts": lambda: [normal(), normal()],
    "InverseWishart.dof": 6.0,
    "InverseWishart.scale_tril": TRIL.tril(),
    "InverseWishart.log_prob.value": torch.eye(3),
    "KTiedNormal.mean": numbers(3, 4),
    "KTiedNormal.log_u": numbers(2, 3),
    "KTiedNormal.log_v": numbers(2, 4),
    "GroupedNormal.log_prob.value": numbers(2, 3, 4),
    "MatrixNormalInverseWishart.given.covariance": torch.eye(4),
    "MatrixNormalInverseWishart.log_prob.value": (numbers(3, 4), torch.eye(4)),
    "updated.xx": torch.eye(3),
    "updated.xy": numbers(3, 4),
    "updated.yy": 20 * torch.eye(4),
    **{
        f"{name}.mean": numbers(3, 4)
        for name in (
            "EigenKroneckerNormal",
            "KroneckerNormal",
            "SparseInformationNormal",
            "MatrixNormal",
            "MatrixNormalInverseWishart",
        )
    },
    **{f"{name}.output_vectors": torch.eye(3) for name in ("EigenKroneckerNormal", "KroneckerNormal")},
    **{f"{name}.input_vectors": VECTORS for name in ("EigenKroneckerNormal", "KroneckerNormal")},
    "KroneckerNormal.output_eigenvalues": torch.rand(3),
    "KroneckerNormal.input_eigenvalues": torch.rand(4),
    "SparseInformationNormal.output_vectors": torch.eye(3)[:, :2],
    "SparseInformationNormal.input_vectors": VECTORS[:, :2],
    "SparseInformationNormal.eigenvalues": torch.rand(2, 2) + 0.1,
    "SparseInformationNormal.diagonal": torch.rand(3, 4),
    "MatrixNormal.row_scale_tril": TRIL.tril(),
    "MatrixNormal.column_scale_tril": torch.eye(4),
    "MatrixNormalInverseWishart.row_precision_tril": TRIL.tril(),
    "MatrixNormalInverseWishart.scale_tril": torch.eye(4),
    "MatrixNormalInverseWishart.dof": 8.0,
}

#: An instance of each class whose methods are called; subclasses may share one of theirs.
INSTANCES: dict[type, Any] = {
    CategoricalPrediction: classes,
    BernoulliPrediction: yes_or_no,
    RealPrediction: reals,
    CountPrediction: lambda: CountPrediction(REALS.abs().expand(4, ROWS, 1) + 1, REALS.abs().expand(4, ROWS, 1) + 1),
    StudentTPrediction: lambda: StudentTPrediction(
        numbers(4, ROWS, 1, seed=7), torch.full((4, 1, 1), 0.25), df=torch.full((1, 1, 1), 5.0)
    ),
    OutputPrediction: lambda: OutputPrediction(numbers(4, ROWS, 1, seed=7), OwnLaw()),
    active.Curve: curve,
    calibration.Abstention: lambda: calibration.Abstention(threshold=0.5, coverage=0.5, risk=0.1, bound=0.2),
    shifts.CorruptionResults: results,
    calibration.ConformalSets: lambda: calibration.LAC(level=0.8).fit(classes(), LABELS),
    calibration.ConformalIntervals: lambda: calibration.ScaledResiduals(level=0.8).fit(reals(), REALS),
    active.ActiveLearning: lambda: active.ActiveLearning(
        method=dubito.MAP(), acquisition=active.Random(), steps=1, initial=4, training=QUICK
    ),
    Scaling: lambda: Scaling(torch.zeros(4), torch.ones(4)),
    dubito.compare.Settings: lambda: dubito.compare.Settings(data="digits", budget=10.0),
}
