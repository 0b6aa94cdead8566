"""Every method as the reference's posterior: one prior on every weight, temperature 1, the whole divergence.

What stands apart, since it cannot have that prior: `BatchEnsemble`, `Rank1` and `Implicit` have it, as weight decay, on
the weights that their components share, and their methods' own on the factors. BALI is left out: its prior is one on
the regressions of layers. MC dropout has it in the penalty of a network whose posterior is that of its masks.
"""

from dataclasses import dataclass
from typing import Any

from dubito import (
    EFB,
    GGN,
    INF,
    KFAC,
    MAP,
    SWA,
    SWAG,
    VOGN,
    BatchEnsemble,
    DeepEnsemble,
    Diagonal,
    Implicit,
    KTied,
    Laplace,
    MCDropout,
    MeanField,
    NoisyAdam,
    NoisyKFAC,
    Rank1,
    Vadam,
)
from dubito.training import Cosine, Linear, Training

from ..settings import explicit
from .bdl_fits import Fit
from .ivon import Ivon


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A posterior, and how much work is put into each approximation of it.

    Args:
        prior_std: of the reference's Normal prior around 0.
        train_rows: training rows.
        test_rows: test rows.
        epochs: of trainings from the first weights.
        more_epochs: of those that start from the MAP fit.
        lr: of Adam from the first weights; beyond the MAP fit it is half.
        validation_rows: rows that steer the protocol.
        batch_size: rows per step.
        num_samples: draws per prediction.
        channels_last: as `Training` has it.
    """

    prior_std: float
    train_rows: int
    test_rows: int
    epochs: int
    more_epochs: int
    lr: float = 1e-3
    validation_rows: int = 0
    batch_size: int = 100
    num_samples: int = 32
    channels_last: bool = False

    @property
    def rows(self) -> dict[str, Any]:
        """What all fits have in common."""
        names = ("train_rows", "validation_rows", "test_rows", "num_samples")
        return {"point_std": self.prior_std, **{name: getattr(self, name) for name in names}}

    def training(self, epochs: int, **changes: Any) -> Training:
        """Adam along half a cosine."""
        given = {name: getattr(self, name) for name in ("batch_size", "lr", "channels_last")}
        return explicit(Training, **{**given, "epochs": epochs, "schedule": explicit(Cosine), **changes})

    def methods(self) -> dict[str, Fit]:
        """Every method under its name in the registry, and IVON."""
        point, prior = self.training(self.epochs), {"prior_std": self.prior_std}
        scratch, warm = {"point": None, **self.rows}, {"point": point, **self.rows}
        # The prior as weight decay, 1 / (σ² N).
        decayed = {
            "training": self.training(self.epochs, weight_decay=1 / (self.prior_std**2 * self.train_rows)),
            **scratch,
        }
        # Weights are gathered over the second half, at three tenths of the rate.
        linear = explicit(Linear, start=0.4, end=0.5, final=0.3)
        gathered = {"training": self.training(self.epochs, schedule=linear), **scratch}
        divergence = {"training": self.training(self.more_epochs, lr=self.lr / 2, variational_lr=1e-2), **warm}
        natural = {"training": self.training(self.more_epochs, lr=1e-2), **warm}
        # Moving averages over 100 steps.
        start = {**prior, "initial_std": 0.01}
        averages = {**start, "betas": (0.9, 0.99), "count_rows": True}
        return {
            "map": Fit(method=explicit(MAP, **prior), training=None, **warm),
            "mc-dropout": Fit(method=explicit(MCDropout, **prior), training=point, **scratch),
            "deep-ensemble": Fit(method=explicit(DeepEnsemble, **prior), training=point, **scratch),
            "swa": Fit(method=explicit(SWA, **prior), **gathered),
            "swag": Fit(method=explicit(SWAG, **prior), **gathered),
            "mean-field": Fit(method=explicit(MeanField, **prior), **divergence),
            "k-tied": Fit(method=explicit(KTied, **prior), **divergence),
            "batch-ensemble": Fit(method=explicit(BatchEnsemble), **decayed),
            "rank1": Fit(method=explicit(Rank1), **decayed),
            "implicit": Fit(method=explicit(Implicit), **decayed),
            "noisy-adam": Fit(method=explicit(NoisyAdam, **averages), **natural),
            "vadam": Fit(
                method=explicit(Vadam, correct_start=False, **averages),
                **{**natural, "training": self.training(self.more_epochs, lr=5e-3)},
            ),
            "vogn": Fit(method=explicit(VOGN, **start, betas=(0.9, 0.01)), **natural),
            "noisy-kfac": Fit(method=explicit(NoisyKFAC, **start), **natural),
            **{f"laplace-{name}": self.laplace(kind, warm) for name, kind in STRUCTURES.items()},
            "ivon": Fit(method=Ivon(**prior, **IVON), training=self.training(self.more_epochs), **warm),
        }

    def laplace(self, structure: type, warm: dict[str, Any]) -> Fit:
        """Around the MAP fit, with the prior's precision, and predictions in closed form."""
        method = explicit(
            Laplace,
            structure=explicit(structure),
            prior_precision=self.prior_std**-2,
            curvature=explicit(GGN),
            linearised=True,
        )
        return Fit(method=method, training=None, **warm)


STRUCTURES = {"diag": Diagonal, "kfac": KFAC, "efb": EFB, "inf": INF}
#: As our natural gradients: deviations start near .01, and averages are over 100 steps.
IVON = {"lr": 0.01, "hess_init": 0.5, "beta2": 0.99}
