"""Metrics as pure functions over tensors; a scalar metric returns a float.

Classification takes predictions first, regression targets first. A metric that is a mean over examples has a
`..._per_example` function beside it, the input of `standard_error_over_examples` and `paired_bootstrap`.
"""

from .calibration import ReliabilityCurve, classwise_ece, ece, reliability_curve
from .classification import (
    accuracy,
    brier,
    brier_per_example,
    correct_per_example,
    nll,
    nll_per_example,
    normalised_entropy,
    normalised_entropy_per_example,
)
from .detection import auroc, average_precision, fpr95
from .diversity import Disagreement, disagreement
from .intervals import QuantileCalibration, interval_coverage, interval_width, quantile_calibration
from .reference import (
    agreement,
    agreement_per_example,
    total_variation,
    total_variation_per_example,
    wasserstein2,
    wasserstein2_per_example,
)
from .regression import (
    crps_gaussian,
    crps_mixture,
    crps_mixture_per_example,
    mae,
    mixture_log_prob,
    mixture_log_prob_per_example,
    rmse,
)
from .selective import RejectionCurve, aurc, rejection_curve
from .standard_errors import (
    Estimate,
    Over,
    PairedDifference,
    paired_bootstrap,
    standard_error_over_examples,
    standard_error_over_runs,
)

__all__ = [
    "Disagreement",
    "Estimate",
    "Over",
    "PairedDifference",
    "QuantileCalibration",
    "RejectionCurve",
    "ReliabilityCurve",
    "accuracy",
    "agreement",
    "agreement_per_example",
    "aurc",
    "auroc",
    "average_precision",
    "brier",
    "brier_per_example",
    "classwise_ece",
    "correct_per_example",
    "crps_gaussian",
    "crps_mixture",
    "crps_mixture_per_example",
    "disagreement",
    "ece",
    "fpr95",
    "interval_coverage",
    "interval_width",
    "mae",
    "mixture_log_prob",
    "mixture_log_prob_per_example",
    "nll",
    "nll_per_example",
    "normalised_entropy",
    "normalised_entropy_per_example",
    "paired_bootstrap",
    "quantile_calibration",
    "rejection_curve",
    "reliability_curve",
    "rmse",
    "standard_error_over_examples",
    "standard_error_over_runs",
    "total_variation",
    "total_variation_per_example",
    "wasserstein2",
    "wasserstein2_per_example",
]
