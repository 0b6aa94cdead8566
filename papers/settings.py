"""Every setting of a method, of its training and of its likelihood, spelled out: the library's defaults may change.

Experiments make settings with `explicit(MeanField, prior_std=0.1)`, which names every field: those that a paper or an
experiment sets, and all others from `FROZEN`. A field that the library gains later gets a line there, and where stored
results are to go on counting, in `ADDED` or `RENAMED`.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from dubito import (
    BALI,
    EFB,
    GGN,
    HMC,
    INF,
    KFAC,
    MAP,
    PBP,
    SWA,
    SWAG,
    VOGN,
    Around,
    BatchEnsemble,
    Bernoulli,
    Categorical,
    DeepEnsemble,
    Diagonal,
    Empirical,
    Fisher,
    Flipout,
    Gaussian,
    He,
    HeteroscedasticGaussian,
    Implicit,
    KTied,
    Laplace,
    LocalReparameterised,
    MCDropout,
    MeanField,
    NegativeBinomial,
    NoisyAdam,
    NoisyKFAC,
    OnlineEvidence,
    Poisson,
    Rank1,
    Reparameterised,
    StudentT,
    Training,
    Vadam,
)
from dubito.errors import ConfigError
from dubito.factors import Cauchy, HalfCauchy, InverseGamma, LogNormal, NearOne, Normal, Point, Signs
from dubito.training import KL, SGD, Adam, AdamW, AutoTraining, Constant, Cosine, EarlyStopping, Linear, Step

Settings = TypeVar("Settings")

#: What experiments leave unsaid, by class: the library's defaults of the day the papers' results were stored.
FROZEN: Mapping[type, Mapping[str, Any]] = {
    MAP: {"prior_std": None, "prior": None},
    MCDropout: {"rate": 0.1, "prior_std": None},
    DeepEnsemble: {"members": 4, "prior_std": None, "of": None, "weights": "equal"},
    SWA: {"prior_std": None, "start": 0.5, "snapshots": 20},
    SWAG: {"prior_std": None, "start": 0.5, "snapshots": 20, "rank": 20, "scale": 1.0},
    HMC: {
        "num_samples": 500,
        "warmup": 500,
        "chains": 4,
        "prior_std": 1.0,
        "trajectory": None,
        "tree_depth": 8,
        "target_acceptance": 0.8,
        "thin": 1,
    },
    PBP: {
        "epochs": 40,
        "prior_shape": 6.0,
        "prior_rate": 6.0,
        "noise_shape": 6.0,
        "noise_rate": 6.0,
        "initial_std": 1.0,
    },
    MeanField: {
        "prior_std": 1.0,
        "initial_std": 0.01,
        "initial_spread": 0.0,
        "max_std": None,
        "estimator": Reparameterised(),
        "subset": None,
        "prior": None,
    },
    KTied: {
        "rank": 2,
        "prior_std": 1.0,
        "initial_std": 0.01,
        "initial_spread": 0.1,
        "max_std": None,
        "estimator": Reparameterised(),
        "tied": None,
        "subset": None,
        "match_rates": True,
        "prior": None,
    },
    BatchEnsemble: {
        "components": 4,
        "initial": NearOne(std=0.5),
        "log_mixture": False,
        "factor_rate": 0.5,
        "arrangement": "auto",
        "subset": None,
        "beside": None,
    },
    Rank1: {
        "components": 4,
        "family": Normal(prior_mean=1.0, prior_std=0.1),
        "on": "both",
        "additive": False,
        "initial": NearOne(std=0.1),
        "initial_rate": 0.001,
        "bound": 10.0,
        "kl": "mean",
        "log_mixture": False,
        "factor_rate": 1.0,
        "arrangement": "auto",
        "subset": None,
        "beside": None,
    },
    Implicit: {
        "components": 4,
        "noise_samples": 1,
        "prior_std": 0.1,
        "mean_std": 0.5,
        "initial_std": 0.05,
        "initial_spread": 0.02,
        "kl": "mixture-mean",
        "bias_factors": False,
        "arrangement": "auto",
        "subset": None,
        "beside": None,
    },
    BALI: {
        "step_size": 0.3,
        "update_rate": 0.2,
        "schedule": Step(at=(0.6, 0.8), by=0.2),
        "prior_scale": 40.0,
        "hidden_floor": 0.01,
        "output_floor": None,
        "effective_data": None,
        "sampling": "weight",
        "covariance": "mode",
        "momentum": 0.0,
        "refactor_every": 1,
        "initial_std": None,
        "subset": None,
    },
    NoisyAdam: {
        "prior_std": 1.0,
        "betas": (0.9, 0.999),
        "initial_std": 0.05,
        "kl_weight": 1.0,
        "extrinsic_damping": 0.0,
        "count_rows": False,
    },
    Vadam: {
        "prior_std": 1.0,
        "betas": (0.9, 0.999),
        "initial_std": 0.05,
        "kl_weight": 1.0,
        "count_rows": False,
        "correct_start": True,
    },
    VOGN: {
        "prior_std": 1.0,
        "betas": (0.9, 0.001),
        "initial_std": 0.05,
        "kl_weight": 1.0,
        "kl_start": None,
        "kl_steps": 0,
        "extrinsic_damping": 0.0,
    },
    NoisyKFAC: {"prior_std": 1.0, "beta": 0.05, "kl_weight": 1.0, "initial_std": None},
    Laplace: {
        "structure": Diagonal(),
        "prior_precision": None,
        "curvature": Fisher(draws=1),
        "subset": None,
        "batch_size": None,
        "linearised": False,
        "precision": "full",
        "prior": None,
        "evidence": None,
    },
    OnlineEvidence: {"every": 5, "burn_in": 0, "per_layer": False, "step": 1.0},
    Diagonal: {},
    KFAC: {},
    EFB: {},
    INF: {"rank": None, "max_rank": 1000, "guard": "congruence", "selection": "algorithm1"},
    Fisher: {"draws": 1},
    GGN: {},
    Empirical: {},
    He: {"gain": 1.0},
    Around: {"network": "", "std": 1.0},
    Normal: {"prior_mean": 1.0, "prior_std": 0.1},
    Cauchy: {"prior_mean": 1.0, "prior_std": 0.1},
    LogNormal: {"prior_mean": 0.0, "prior_std": 0.1},
    HalfCauchy: {"prior_scale": 1.0},
    InverseGamma: {"concentration": 3.0, "rate": 3.0},
    Point: {},
    NearOne: {"std": 0.1},
    Signs: {"probability": 0.5},
    Reparameterised: {},
    LocalReparameterised: {"layers": None},
    Flipout: {"layers": None},
    Categorical: {"class_axis": 1, "class_weights": None, "ignore_index": None, "shift": False},
    Bernoulli: {},
    Gaussian: {"std": None, "covariance": None, "standardise": False},
    HeteroscedasticGaussian: {"standardise": False},
    NegativeBinomial: {"total_count": None},
    Poisson: {},
    StudentT: {"df": None, "std": None, "standardise": False},
    Adam: {"betas": (0.9, 0.999), "eps": 1e-8},
    AdamW: {"betas": (0.9, 0.999), "eps": 1e-8},
    SGD: {"momentum": 0.9, "nesterov": True},
    Constant: {},
    Cosine: {"final": 0.0},
    Linear: {"start": 0.0, "end": 1.0, "final": 0.0},
    Step: {"at": (0.6, 0.8), "by": 0.2},
    KL: {"weight": 1.0, "warmup": 0.0, "every": "step"},
    AutoTraining: {
        "iterations": None,
        "longer": None,
        "batch_size": 64,
        "lr": 2e-3,
        "patience": 400,
        "every": 20,
        "watched": 1000,
        "priors": (None, 1.0, 0.3),
        "pilot": 0.25,
        "held_out": 0.1,
        "precision": "full",
    },
    EarlyStopping: {
        "patience": 10,
        "margin": 0.0,
        "num_samples": 8,
        "steps": None,
        "every": None,
        "start": False,
        "last": False,
    },
    Training: {
        "epochs": None,
        "iterations": None,
        "batch_size": 128,
        "lr": 1e-3,
        "variational_lr": None,
        "optimizer": Adam(betas=(0.9, 0.999), eps=1e-8),
        "schedule": Constant(),
        "variational_schedule": None,
        "warmup": 0.0,
        "weight_decay": 0.0,
        "clip_norm": None,
        "kl": KL(weight=1.0, warmup=0.0, every="step"),
        "accumulate": 1,
        "precision": "full",
        "compile": False,
        "channels_last": False,
        "early_stopping": None,
        "checkpoint_minutes": 3.0,
        "timeout": 600.0,
    },
}

#: Fields that a class gained after results were stored, with the value under which nothing changes: at that value they
#: are no part of a checksum. Class and fields by name: {"Rank1": {"new_field": None}}.
ADDED: Mapping[str, Mapping[str, Any]] = {
    "AutoTraining": {"watched": 1000, "longer": None},  # cells that longer fits would change were run again
    "BALI": {"refactor_every": 1},
    "Ours": {"longer": [2000, 8000]},  # likewise
    "Fit": {"standardise": True, "curve_rows": 0, "kernels": False},  # of BALI's images, and of the reduced CIFAR-10
    "Judged": {"shifted": True},  # of the reduced CIFAR-10
    "EarlyStopping": {"steps": None, "every": None, "start": False, "last": False},
    "DropoutSearch": {"search_epochs": None},
    "Categorical": {"class_weights": None, "ignore_index": None, "shift": False},
    "BatchEnsemble": {"beside": None},
    "DeepEnsemble": {"of": None, "weights": "equal"},
    "Implicit": {"beside": None},
    "Rank1": {"beside": None},
    "Laplace": {"precision": "full", "evidence": None},
    "NoisyAdam": {"count_rows": False},
    "Vadam": {"kl_weight": 1.0, "count_rows": False, "correct_start": True},
    "NoisyKFAC": {"initial_std": None},
    "Gaussian": {"standardise": False},
}
#: Fields that were renamed after results were stored, by class: {"Rank1": {"new_name": "old_name"}}.
RENAMED: Mapping[str, Mapping[str, str]] = {}


def explicit(kind: type[Settings], **changes: Any) -> Settings:
    """Settings with every field named.

    Args:
        kind: a class of settings.
        changes: what differs from `FROZEN`.
    """
    if kind not in FROZEN:
        raise ConfigError(f"the settings of {kind.__name__} are not spelled out; add them to papers/settings.py")
    unnamed = {field.name for field in fields(kind)} - {*FROZEN[kind], *changes}  # pyright: ignore[reportArgumentType]
    if unnamed:
        raise ConfigError(
            f"{kind.__name__} has settings that papers/settings.py does not name: {', '.join(sorted(unnamed))}; add "
            "them to FROZEN, and to ADDED with the value that leaves stored results as they were"
        )
    return kind(**{**FROZEN[kind], **changes})


def decisive(encoded: Any) -> Any:
    """Encoded settings as checksums see them: without fields added at the value that changes nothing, by old names."""
    if isinstance(encoded, list):
        return [decisive(item) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    kind = encoded.get("type")
    added, renamed = ADDED.get(str(kind), {}), RENAMED.get(str(kind), {})
    return {
        renamed.get(name, name): decisive(value)
        for name, value in encoded.items()
        if name not in added or value != added[name]
    }
