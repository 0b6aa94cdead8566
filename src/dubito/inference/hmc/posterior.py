"""The posterior of finished chains, and when they count as a reference."""

import math
from typing import Any

import torch
from torch import Tensor

from ...errors import TrainingError
from ...posterior import Details, Posterior, ShapeRule
from ...storage.schema import Count, Recorded, Size

#: Chains agree where R-hat is at most the first and together are worth at least the second in independent draws.
MOST_R_HAT, LEAST_DRAWS = 1.05, 100.0
#: The most transitions that may diverge, as a share of the draws: a hint at regions the chains cannot enter.
MOST_DIVERGENT = 0.01


class HMCDetails(Details):
    """Facts of chains."""

    draws: Size
    chains: Size
    r_hat: Recorded | None
    effective_sample_size: Recorded | None
    divergent: Count


class HMCPosterior(Posterior):
    """Equally likely draws of several chains; the network holds the likeliest of them.

    `details` holds the number of chains and their diagnostics: the largest R-hat and the least effective sample size
    over outputs, and the number of divergent transitions.
    """

    details_type = HMCDetails

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_atoms = self.details["draws"]

    def shapes(self) -> dict[str, ShapeRule]:
        return {"draws": self.stacked_like_weights(self.details["draws"])}

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        assert self.num_atoms is not None
        stored = self.group("draws")
        return self.weights() | {name: draws[index % self.num_atoms] for name, draws in stored.items()}

    @property
    def r_hat(self) -> float:
        """The largest ratio of the spread over all chains to that within them, 1 where they agree."""
        return _read(self.details["r_hat"])

    @property
    def effective_sample_size(self) -> float:
        """What all draws together are worth in independent ones, for the output for which it is least."""
        return _read(self.details["effective_sample_size"])

    @property
    def converged(self) -> bool:
        """Whether the chains agree, are long enough, and hardly ever diverged."""
        return not self.complaints()

    def reference(self) -> "HMCPosterior":
        """This posterior, to be taken for the truth; refused where its chains have not converged."""
        complaints = self.complaints()
        if complaints:
            raise TrainingError(
                f"these chains are no reference: {'; '.join(complaints)}; give more warmup and num_samples, several "
                "chains, or a smaller network"
            )
        return self

    def complaints(self) -> list[str]:
        """Why the chains are no reference; nothing where they are one."""
        complaints = []
        if self.details["chains"] < 2:
            complaints.append("a single chain cannot show that it has converged")
        if not self.r_hat <= MOST_R_HAT:
            complaints.append(f"R-hat is {self.r_hat:.3g}, at most {MOST_R_HAT:g} is needed")
        if not self.effective_sample_size >= LEAST_DRAWS:
            complaints.append(
                f"the effective sample size is {self.effective_sample_size:.3g}, at least {LEAST_DRAWS:g} is needed"
            )
        divergent, made = self.details["divergent"], self.details["chains"] * self.method.num_samples
        if divergent > MOST_DIVERGENT * made:
            complaints.append(f"{divergent} of {made} transitions diverged, at most {MOST_DIVERGENT:.0%} may")
        return complaints

    def holds(self, name: str) -> str:
        if name not in self.group("draws"):
            return super().holds(name)
        return f"{self.num_atoms} draws of {self.details['chains']} chains"


def _read(value: float | None) -> float:
    return math.inf if value is None else value
