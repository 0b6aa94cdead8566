"""How a posterior fares under corruption: accuracy, likelihood and calibration, at every severity."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from .. import metrics
from ..data import Data
from ..errors import ConfigError, DataError, require_count
from ..posterior import MAX_ROWS, Posterior
from ..prediction import CategoricalPrediction
from .constants import CORRUPTIONS, SEVERITIES
from .corruptions import chosen_rows, corruptions

#: The metrics of one set of images.
MEASURES = ("accuracy", "nll", "ece")


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

    def mean(self, measure: str, *, name: str | None = None, severity: int | None = None) -> float:
        """The mean of a metric over all sets, or over those of one corruption or severity.

        Args:
            measure: "accuracy", "nll" or "ece".
            name: of a corruption.
            severity: from 1 to 5.
        """
        chosen = [
            found[measure]
            for (own_name, own_severity), found in self.corrupted.items()
            if name in (None, own_name) and severity in (None, own_severity)
        ]
        if not chosen:
            raise ConfigError(f"no set of images has name {name!r} and severity {severity!r}")
        return fmean(chosen)

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
            own, other = (1 - results.mean("accuracy", name=name) for results in (self, baseline))
            if other == 0:
                raise DataError(
                    f"the baseline makes no error under {name}: errors over its own have no value"
                )
            ratios.append(own / other)
        return fmean(ratios)


def evaluate_corruptions(
    posterior: Posterior,
    data: Data,
    *,
    names: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    constants: str = "cifar-c",
    subset: int | None = 1000,
    num_samples: int = 32,
    seed: int = 0,
    max_rows: int = MAX_ROWS,
    **options: Any,
) -> CorruptionResults:
    """Metrics on a data set's test images, clean and under every corruption.

    Images are corrupted in pixel space and then scaled as the training images were.

    Args:
        posterior: fitted to this data set.
        data: a set of images, as `dubito.data.load` gives it.
        names: of `CORRUPTIONS`.
        severities: from 1 to 5.
        constants: "cifar-c" or "imagenet-c".
        subset: test images to take, drawn by seed; None takes all.
        num_samples: as in `predict`.
        seed: of the subset, of the corruptions and of `predict`.
        max_rows: as in `predict`.
        options: what else this posterior's `predict` takes.
    """
    require_count(num_samples=num_samples, max_rows=max_rows)
    if data.input_scaling is None or data.test.inputs.ndim != 4 or data.task != "classification":
        raise DataError(
            f"corruptions need images [B, C, H, W] with classes, got {data.name!r}, a task of {data.task} with inputs "
            f"{list(data.test.inputs.shape)}"
        )
    rows = chosen_rows(len(data.test.targets), subset, seed)
    images, labels = data.input_scaling.undo(data.test.inputs[rows]).clamp(0, 1), data.test.targets[rows]

    def measured(pixels: torch.Tensor) -> dict[str, float]:
        assert data.input_scaling is not None
        inputs = data.input_scaling.apply(pixels)
        prediction = posterior.predict(
            inputs, num_samples=num_samples, seed=seed, max_rows=max_rows, **options
        )
        if not isinstance(prediction, CategoricalPrediction):
            raise DataError(f"corruptions need a posterior over classes, got {type(prediction).__name__}")
        probs, targets = prediction.probs, labels.to(prediction.probs.device)
        return {
            "accuracy": metrics.accuracy(probs, targets),
            "nll": -float(prediction.log_prob(targets).double().mean()),
            "ece": metrics.ece(probs, targets),
        }

    clean = measured(images)
    found = {
        (name, severity): measured(pixels)
        for name, severity, pixels in corruptions(
            images, names=names, severities=severities, constants=constants, seed=seed
        )
    }
    return CorruptionResults(clean=clean, corrupted=found, num_images=len(labels), constants=constants)
