"""How a posterior fares under corruption: accuracy, likelihood and calibration, at every severity."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import metrics
from ..data import Data
from ..errors import ConfigError, DataError, unknown_name
from ..hints import checked
from ..posterior import MAX_ROWS, Posterior
from ..prediction import CategoricalPrediction, PredictionOptions
from ..training import RunFacts, told
from .constants import CORRUPTIONS, SEVERITIES
from .corruptions import chosen_rows, corruptions


@dataclass(frozen=True, kw_only=True)
class CorruptionResults:
    """Metrics by corruption and severity.

    Attributes:
        clean: metrics of the images as they are.
        corrupted: metrics by (name, severity).
        num_images: images in each set.
        constants: the constants' name.
    """

    clean: Mapping[str, float]
    corrupted: Mapping[tuple[str, int], Mapping[str, float]]
    num_images: int
    constants: str

    @property
    def accuracy(self) -> float:
        """cA: the mean accuracy over all corruptions and severities."""
        return self.mean("accuracy")

    @property
    def nll(self) -> float:
        """cNLL: likewise of the negative log-likelihood, in nats."""
        return self.mean("nll")

    @property
    def ece(self) -> float:
        """cECE: likewise of the expected calibration error."""
        return self.mean("ece")

    @checked
    def mean(self, measure: str, *, name: str | None = None, severity: int | None = None) -> float:
        """The mean of a metric over all sets, or over those of one corruption or severity.

        Args:
            measure: "accuracy", "nll" or "ece".
            name: of a corruption.
            severity: from 1 to 5.
        """
        for values in self.corrupted.values():
            if measure not in values:
                raise unknown_name("metric", measure, values)
        chosen = [
            values[measure]
            for (corruption, degree), values in self.corrupted.items()
            if name in (None, corruption) and severity in (None, degree)
        ]
        if not chosen:
            raise ConfigError(f"no set of images has name {name!r} and severity {severity!r}")
        return fmean(chosen)

    @checked
    def mce(self, baseline: "CorruptionResults") -> float:
        """The mean corruption error over a baseline's, 1 for the baseline itself.

        mCE = 1/|C| Σ_c Σ_s E_sc / Σ_s E⁰_sc, with E the error rates  [Hendrycks & Dietterich 2019, Section 4.1].

        Args:
            baseline: the results of another network on the same corruptions.
        """
        if set(self.corrupted) != set(baseline.corrupted):
            raise DataError("the baseline must have been evaluated on the same corruptions and severities")
        ratios = []
        for name in dict.fromkeys(name for name, _ in self.corrupted):
            error, baseline_error = (1 - results.mean("accuracy", name=name) for results in (self, baseline))
            if baseline_error == 0:
                raise DataError(f"the baseline makes no error under {name}: errors over its own have no value")
            ratios.append(error / baseline_error)
        return fmean(ratios)


@checked
def evaluate_corruptions(
    posterior: Posterior,
    data: Data | tuple[Tensor | np.ndarray, Tensor | np.ndarray],
    *,
    prepare: Callable[[Tensor], Tensor] | None = None,
    names: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    constants: str = "cifar-c",
    subset: int | None = 1000,
    num_samples: int = 32,
    seed: int = 0,
    max_rows: int = MAX_ROWS,
    progress: bool | None = None,
    linearised: bool | None = None,
    marginal: bool = False,
    per_example: bool = False,
) -> CorruptionResults:
    """Metrics on test images, clean and under every corruption.

    Images are corrupted in pixel space and then made into the network's inputs, as the training images were.

    Args:
        posterior: fitted to images of this kind.
        data: a set of images as `dubito.data.load` gives it, or a pair of images with values from 0 to 1 and labels.
        prepare: for a pair, from images to what the network reads, such as their standardisation; None for a network
            that reads values from 0 to 1. A set of images brings its own.
        names: of `CORRUPTIONS`.
        severities: from 1 to 5.
        constants: "cifar-c" or "imagenet-c".
        subset: test images to take, drawn by seed; None takes all.
        num_samples: as in `predict`.
        seed: of the subset, of the corruptions and of `predict`.
        max_rows: as in `predict`.
        progress: show a bar; None on terminals only.
        linearised: as in `predict`.
        marginal: as in `predict`.
        per_example: as in `predict`.
    """
    options = PredictionOptions(num_samples, seed, max_rows, linearised, marginal, per_example)
    posterior.predictor(options)  # refuses a form that it lacks
    images, labels, prepared = _test_images(data, prepare, subset, seed)
    sets = corruptions(images, names=names, severities=severities, constants=constants, seed=seed)

    def measured(pixels: Tensor) -> dict[str, float]:
        prediction = posterior.predictor(options)(prepared(pixels))
        if not isinstance(prediction, CategoricalPrediction):
            raise DataError(f"corruptions need a posterior over classes, got {type(prediction).__name__}")
        probs, targets = prediction.probs, labels.to(prediction.probs.device)
        return {
            "accuracy": metrics.accuracy(probs, targets),
            "nll": -float(prediction.log_prob(targets).double().mean()),
            "ece": metrics.ece(probs, targets),
        }

    facts = RunFacts(title="corruptions", total=len(names) * len(severities))
    clean, corrupted = measured(images), {}
    with told(facts, progress) as watching:
        for name, severity, pixels in sets:
            values = corrupted[name, severity] = measured(pixels)
            watching.step(len(corrupted), {name: severity, "nll": values["nll"]})
    return CorruptionResults(clean=clean, corrupted=corrupted, num_images=len(labels), constants=constants)


def _test_images(
    data: Data | tuple[Tensor | np.ndarray, Tensor | np.ndarray],
    prepare: Callable[[Tensor], Tensor] | None,
    subset: int | None,
    seed: int,
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Images with values from 0 to 1, their labels, and what makes inputs of them."""
    if not isinstance(data, Data):
        images, labels = _pair(data)
        rows = chosen_rows(len(labels), subset, seed)
        return images[rows], labels[rows], prepare or _as_they_are
    if prepare is not None:
        raise ConfigError(f"prepare is for pairs of images and labels; {data.name!r} brings its own scaling")
    if data.input_scaling is None or data.test.inputs.ndim != 4 or data.task != "classification":
        raise DataError(
            f"corruptions need images [B, C, H, W] with classes, got {data.name!r}, a task of {data.task} with inputs "
            f"{list(data.test.inputs.shape)}"
        )
    rows = chosen_rows(len(data.test.targets), subset, seed)
    pixels = data.input_scaling.undo(data.test.inputs[rows]).clamp(0, 1)
    return pixels, data.test.targets[rows], data.input_scaling.apply


def _pair(data: Any) -> tuple[Tensor, Tensor]:
    images, labels = (torch.as_tensor(values) for values in data)
    if labels.ndim != 1 or len(labels) != len(images) or labels.is_floating_point():
        raise DataError(
            f"labels must be whole numbers, one for each of {len(images)} images, got {labels.dtype}, "
            f"{list(labels.shape)}"
        )
    return images, labels


def _as_they_are(pixels: Tensor) -> Tensor:
    return pixels
