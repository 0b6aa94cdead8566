"""Rank-1 Bayesian networks: distributions over factors on the inputs and outputs of layers.

[Dusenberry et al. 2020]
"""

from dataclasses import dataclass, field
from typing import Literal

from ..errors import ConfigError, require_count, require_fraction, require_positive
from ..fitting import Start
from ..method import TrainedMethod
from ..networks import Subset
from ..node_factors import Arrangement, ComponentObjective, NodePosterior, check_arrangement, component_objective
from ..node_factors.beside import check_beside
from ..node_factors.laws import Family, NearOne, Normal, Point, Signs
from ..storage import LATER
from ..weight_normals import NormalMethod


@dataclass(frozen=True, kw_only=True)
class Rank1(TrainedMethod):
    """Weights W ∘ r sᵀ with a point estimate W and K components of distributions over r and s   [rank-1, Section 3.1].

    Args:
        components: K, the size of the mixture.
        family: the law of factors with its prior, one of `dubito.factors`.
        on: the nodes whose factors are random: "input", "output" or "both"; the others are point masses.
        additive: add r sᵀ to the weight instead of multiplying; give the family a prior mean of 0 with it.
        initial: where means start: `factors.NearOne()` or `factors.Signs()`; 1 is taken off where additive.
        initial_rate: p; standard deviations start at √(p / (1 − p)). None takes the family's, 1e-3, `Cauchy`'s 1e-6.
        bound: the largest absolute value of a draw; None sets no limit. The divergence does not know it.
        kl: "mean" over components, or their "sum" as in the authors' code, which weighs it K times as much.
        log_mixture: train on the log of the mean likelihood of the components instead of the mean of the logs.
        factor_rate: multiplies the learning rate of the factors.
        arrangement: "tile" sends the components through the network at once, "loop" one after the other; "auto"
            takes the tile where it fits into memory, and where batch norm learns.
        subset: the weights that carry factors, by names or by a predicate of (name, tensor); None takes all.
        beside: `MeanField(subset=...)` or `KTied(subset=...)` for weights that are Normal themselves in place of having
            factors, such as embeddings; all components draw them from the same Normals. Their prior is that method's.
    """

    components: int = 4
    family: Family = Normal()
    on: Literal["input", "output", "both"] = "both"
    additive: bool = False
    initial: NearOne | Signs = NearOne()
    initial_rate: float | None = None
    bound: float | None = 10.0
    kl: Literal["mean", "sum"] = "mean"
    log_mixture: bool = False
    factor_rate: float = 1.0
    arrangement: Arrangement = "auto"
    subset: Subset = None
    beside: NormalMethod | None = field(default=None, metadata=LATER)

    posterior_type = NodePosterior

    def __post_init__(self) -> None:
        require_count(components=self.components)
        if self.family.positive and (self.additive or isinstance(self.initial, Signs)):
            what = "added to weights" if self.additive else "started from random signs"
            raise ConfigError(f"{type(self.family).__name__} factors are above 0 and cannot be {what}; take Normal()")
        if self.initial_rate is not None:
            require_fraction(zero=False, initial_rate=self.initial_rate)
        require_positive(factor_rate=self.factor_rate)
        if self.bound is not None:
            require_positive(bound=self.bound)
        if self.kl not in ("mean", "sum"):
            raise ConfigError(f'kl must be "mean" or "sum", got {self.kl!r}')
        check_arrangement(self.arrangement)
        if self.beside is not None:
            check_beside(self.beside)

    @property
    def families(self) -> tuple[Family, Family]:
        """The laws of factors on input and output nodes."""
        return (self.family if self.on != "output" else Point(), self.family if self.on != "input" else Point())

    def objective(self, start: Start) -> ComponentObjective:
        rate = self.family.initial_rate if self.initial_rate is None else self.initial_rate
        std = (rate / (1 - rate)) ** 0.5  # that of dropout
        return component_objective(self, start, initial_std=std, summed=self.kl == "sum")
