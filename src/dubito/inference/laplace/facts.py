"""The plain facts of a Laplace posterior, as its file holds them."""

from typing import Any, NotRequired, TypedDict

from ...posterior import Details
from ...storage.schema import Count, Positive, Recorded


class BlockFacts(TypedDict, total=False):
    """What a structure chose for a block."""

    requested_rank: int
    rank: int
    size: int
    captured: float
    negative: float


class PrecisionChoice(TypedDict):
    """How validation rows chose the prior precision; see `LaplacePosterior`."""

    grid: list[Recorded]
    losses: list[Recorded]
    standard_errors: list[Recorded]
    shares: list[Recorded]
    margin: Recorded
    centre_loss: Recorded
    rows: int
    taken: Positive
    share: float
    no_uncertainty: bool


class Search(TypedDict):
    """How validation rows chose prior precision and data scale together: factors of the present ones, and losses."""

    predictive: str
    trials: int
    num_samples: int
    seed: int
    precision_factors: list[Positive]
    scale_factors: list[Positive]
    losses: list[Recorded]
    present_loss: Recorded
    loss: Recorded


class EvidenceTurns(TypedDict):
    """What the marginal likelihood did in training: prior precisions after some steps, and the best of these turns."""

    epochs: Count
    steps: list[Count]
    values: list[Recorded]
    precisions: list[dict[str, Positive]]
    best: Count


class LaplaceDetails(Details):
    """See `LaplacePosterior`."""

    blocks: list[dict[str, Any]]
    facts: dict[str, BlockFacts]
    num_data: Positive
    data_scale: Positive
    noise_factor: Positive
    prior_precision: Positive | dict[str, Positive]
    prior_distances: NotRequired[dict[str, float]]
    log_likelihood: float
    squared_errors: NotRequired[float | None]
    num_values: NotRequired[float | None]
    precision_choice: NotRequired[PrecisionChoice | None]
    search: NotRequired[Search | None]
    evidence: NotRequired[EvidenceTurns | None]
