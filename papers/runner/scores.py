"""What rows say of a prediction, and numbers of many rows as text."""

import base64

import numpy as np
import torch
from torch import Tensor

from dubito.metrics import auroc
from dubito.prediction import ClassPrediction, Prediction, RealPrediction, per_row, std_per_row


def losses_of(prediction: Prediction, targets: Tensor) -> Tensor:
    """The negative log-likelihood of every row, in double precision."""
    return -prediction.log_prob(targets).double()


def interval_scores(prediction: RealPrediction, targets: Tensor) -> dict[str, float]:
    """Coverage and mean width of 90 % intervals, and the root of the mean squared error."""
    low, high = prediction.interval(0.9)
    targets = targets.reshape(low.shape)
    inside = (low <= targets) & (targets <= high)
    return {
        "coverage_90": float(inside.double().mean()),
        "width_90": float((high - low).mean()),
        "rmse": float((prediction.mean - targets).double().square().mean().sqrt()),
    }


def total(prediction: Prediction) -> Tensor:
    """Total uncertainty of every row: entropy, or the standard deviation."""
    if isinstance(prediction, RealPrediction):
        return std_per_row(prediction.std)
    assert isinstance(prediction, ClassPrediction)
    return per_row(prediction.total)


def epistemic(prediction: Prediction) -> Tensor:
    """Epistemic uncertainty of every row: the variance of the function, or of the mean."""
    if isinstance(prediction, RealPrediction):
        return std_per_row(prediction.epistemic_std)
    assert isinstance(prediction, ClassPrediction)
    return per_row(prediction.function_variance)


def area(inside: Tensor, outside: Tensor) -> float:
    """The area under the ROC curve of a score of out-of-distribution rows."""
    labels = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).bool()
    return auroc(torch.cat([inside, outside]), labels)


def packed(values: Tensor) -> str:
    """Numbers in half precision as text."""
    return base64.b64encode(values.numpy().astype("<f2").tobytes()).decode()


def unpacked(text: str) -> np.ndarray:
    """Numbers from their text."""
    return np.frombuffer(base64.b64decode(text), "<f2").astype(float)
