"""BatchEnsemble: K networks that share their weights up to factors on inputs and outputs [Wen et al. 2020]."""

from dataclasses import dataclass, field
from typing import ClassVar

from ..errors import require_count, require_positive
from ..fitting import Start
from ..method import TrainedMethod
from ..networks import Subset
from ..node_factors import Arrangement, ComponentObjective, NodePosterior, check_arrangement, component_objective
from ..node_factors.beside import check_beside
from ..node_factors.laws import NearOne, Point, Signs
from ..storage import LATER
from ..weight_normals import NormalMethod


@dataclass(frozen=True, kw_only=True)
class BatchEnsemble(TrainedMethod):
    """Weights W ∘ r_k s_kᵀ for K members [rank-1, Eq. 1], with W, r and s learned as points, and biases per member.

    Args:
        components: K, the number of members.
        initial: where factors start: `factors.NearOne()` or `factors.Signs()`.
        log_mixture: train on the log of the mean likelihood of the members instead of the mean of the logs.
        factor_rate: multiplies the learning rate of the factors.
        arrangement: "tile" sends the members through the network at once, "loop" one after the other; "auto"
            takes the tile where it fits into memory, and where batch norm learns.
        subset: the weights that carry factors, by names or by a predicate of (name, tensor); None takes all.
        beside: `MeanField(subset=...)` or `KTied(subset=...)` for weights that are Normal themselves in place of having
            factors, such as embeddings; all members draw them from the same Normals. Their prior is that method's.
    """

    components: int = 4
    initial: NearOne | Signs = NearOne(std=0.5)
    log_mixture: bool = False
    factor_rate: float = 0.5
    arrangement: Arrangement = "auto"
    subset: Subset = None
    beside: NormalMethod | None = field(default=None, metadata=LATER)

    posterior_type = NodePosterior
    families: ClassVar[tuple[Point, Point]] = (Point(), Point())
    bound: ClassVar[None] = None
    additive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_count(components=self.components)
        require_positive(factor_rate=self.factor_rate)
        check_arrangement(self.arrangement)
        if self.beside is not None:
            check_beside(self.beside)

    def objective(self, start: Start) -> ComponentObjective:
        return component_objective(self, start, initial_std=0.0)
