"""The implicit Bayesian network's settings and start."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ... import seeds
from ...errors import ConfigError, require_count, require_positive
from ...fitting import Start
from ...layers.declared import bias_names
from ...likelihoods import inverse_softplus
from ...method import TrainedMethod
from ...networks import Subset
from ...node_factors import Arrangement, check_arrangement, chosen_weights, surveyed, tensors_of
from ...node_factors.beside import NONE, check_beside, normal_start
from ...node_factors.laws import NearOne, Normal
from ...storage import LATER
from ...weight_normals import NormalMethod
from .objective import ROWS, ImplicitObjective
from .posterior import ImplicitPosterior


@dataclass(frozen=True, kw_only=True)
class Implicit(TrainedMethod):
    """Weights W diag(z) with a point estimate W and Normal factors z on the inputs of layers, in K components.

    Each row of a batch belongs to one component. Start it from a trained network to have the paper's two phases:
    weights first, then weights and factors together.

    Args:
        components: K, the size of the mixture.
        noise_samples: S, draws of a row's factors per step.
        prior_std: standard deviation of the Normal prior around 1.
        mean_std: standard deviation of the Normal around 1 that means start from.
        initial_std: standard deviations start at |N(initial_std, initial_spread²)|.
        initial_spread: likewise.
        kl: "mixture-mean" is the paper's, of the mean of the components, which fixes their mean and Σ σ² and
            leaves their spread free; "components" is the mean of their own divergences.
        bias_factors: let a factor per component multiply each bias, as the authors' code does.
        arrangement: "tile" sends the S draws through the network at once, "loop" one after the other; "auto"
            takes the tile where it fits into memory.
        subset: the weights whose inputs carry factors, by names or by a predicate of (name, tensor); None takes
            all.
        beside: `MeanField(subset=...)` or `KTied(subset=...)` for weights that are Normal themselves in place of having
            factors, such as embeddings; all components draw them from the same Normals. Their prior is that method's.
    """

    components: int = 4
    noise_samples: int = 1
    prior_std: float = 0.1
    mean_std: float = 0.5
    initial_std: float = 0.05
    initial_spread: float = 0.02
    kl: Literal["mixture-mean", "components"] = "mixture-mean"
    bias_factors: bool = False
    arrangement: Arrangement = "auto"
    subset: Subset = None
    beside: NormalMethod | None = field(default=None, metadata=LATER)

    posterior_type = ImplicitPosterior
    bound: ClassVar[None] = None
    additive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_count(components=self.components, noise_samples=self.noise_samples)
        require_positive(prior_std=self.prior_std, initial_std=self.initial_std)
        require_positive(zero=True, mean_std=self.mean_std, initial_spread=self.initial_spread)
        if self.kl not in ("mixture-mean", "components"):
            raise ConfigError(f'kl must be "mixture-mean" or "components", got {self.kl!r}')
        check_arrangement(self.arrangement)
        if self.beside is not None:
            check_beside(self.beside)

    @property
    def families(self) -> tuple[Normal, None]:
        """The law of factors on input nodes; output nodes have none."""
        return Normal(prior_mean=1.0, prior_std=self.prior_std), None

    def objective(self, start: Start) -> ImplicitObjective:
        network, seed = start.network, start.seed
        normal = NONE if self.beside is None else normal_start(self, start)
        facts = surveyed(start)
        uses = chosen_weights(network, self.subset, facts, embeddings=False, without=normal.names)
        tensors = tensors_of(
            network,
            uses,
            self.families,
            self.components,
            initial=NearOne(std=self.mean_std),
            initial_std=self.initial_std,
            seed=seed,
        )
        for name, raw in tensors["input_raw_std"].items():
            tensors["input_raw_std"][name] = self._raw_std(raw, seed, name)
        if self.bias_factors:
            weights = dict(network.named_parameters())
            means = {
                name: 1 + self.mean_std * noise(weights[name].new_empty(self.components), seed, "bias", name)
                for name in bias_names(network, uses, facts)
                if name not in normal.names
            }
            tensors["bias_mean"] = means
            tensors["bias_raw_std"] = {name: self._raw_std(mean, seed, name) for name, mean in means.items()}
        tensors["statistics"] = {ROWS: torch.zeros((), dtype=torch.int64, device=next(network.parameters()).device)}
        return ImplicitObjective(
            ImplicitPosterior.draft(self, network, start.likelihood, uses, tensors, facts, normal),
            noise_samples=self.noise_samples,
            mixture_mean=self.kl == "mixture-mean",
            arrangement=self.arrangement,
            num_data=start.num_data,
            modes=start.modes,
        )

    def _raw_std(self, like: Tensor, seed: int, name: str) -> Tensor:
        """softplus⁻¹ of |N(initial_std, initial_spread²)|."""
        std = (self.initial_std + self.initial_spread * noise(like, seed, "std", name)).abs()
        return inverse_softplus(std.clamp_min(1e-6))


def noise(like: Tensor, seed: int, *path: str) -> Tensor:
    """Standard Normal numbers in the shape of a tensor, the same on all devices."""
    stream = seeds.generator(seed, "implicit", *path)
    return torch.randn(like.shape, generator=stream, dtype=torch.float64).to(like)
