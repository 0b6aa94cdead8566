"""Monte Carlo dropout: Bernoulli factors on the inputs of layers [Gal & Ghahramani 2016]."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import NetworkError, require_fraction, require_positive
from ..fitting import Start
from ..inputs import Batch, Inputs, call, rows_of
from ..layers.dropout import find_dropouts, fixed_dropout, with_fixed_dropout
from ..layers.node_noise import bernoulli_factors, factors_on_inputs, per_example, read_first
from ..layers.shell import leased
from ..layers.sites import LAYERS, Site, find_sites
from ..layers.trace import Layout, trace
from ..method import TrainedMethod
from ..networks import resolve, trainable, with_flags
from ..objective import Objective
from ..posterior import Posterior
from ..priors import normal_penalty


class MCDropoutPosterior(Posterior):
    """Weights with columns dropped at random; with `rate=None` masks on the network's own dropout layers."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.sites = [Site.from_json(site) for site in self.details.get("sites", ())]
        self.shared = set(self.details.get("shared", ()))

    @property
    def layouts(self) -> dict[str, Layout]:
        """The network's own dropout layers, with how their inputs hold the rows."""
        return {name: Layout(value) for name, value in self.details.get("dropouts", {}).items()}

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Weights with dropped columns; masks on the network's own dropout layers are not weights."""
        weights = self.weights()
        for site in self.sites:
            weight = weights[site.parameter]
            factors = bernoulli_factors(site.shape, self.method.rate, weight, generator)
            weights[site.parameter] = site.fold(weight, factors)
        return weights

    def applied(
        self, index: int, generator: torch.Generator | None
    ) -> AbstractContextManager[Callable[[Inputs], Tensor]]:
        return self._masked(generator) if self.layouts else super().applied(index, generator)

    @contextmanager
    def _masked(self, generator: torch.Generator | None):
        with (
            leased(self.network) as shell,
            fixed_dropout(shell, self.layouts, mask_seed(generator)),
        ):
            yield lambda inputs: call(shell, inputs)

    def fold(self, index: int = 0, *, seed: int = 0) -> nn.Module:
        if not self.layouts:
            return super().fold(index, seed=seed)
        plain = with_fixed_dropout(self.network, self.layouts, mask_seed(self.generator(seed, index)))
        return with_flags(plain, self.trainable)

    def holds(self, name: str) -> str:
        for site in self.sites:
            if site.parameter == name:
                per_batch = ", one draw per batch in training" if name in self.shared else ""
                return f"dropout {self.method.rate:g} on {site.shape[-1]} inputs{per_batch}"
        return "point"


class MCDropoutObjective(Objective):
    """Factors per example on layer inputs; per batch where a layer's rows cannot be told apart."""

    draft: MCDropoutPosterior

    def bind(self, inputs: Inputs) -> None:
        draft, rate = self.draft, self.draft.method.rate
        if draft.details:
            return
        if rate is None:
            names = find_dropouts(draft.network)
            visits = trace(draft.network, inputs, names)
            if not visits:
                raise NetworkError(
                    f"rate=None uses the network's own dropout layers, but its forward pass calls none of {names}; "
                    "give a rate, as in MCDropout(rate=0.1), to put dropout on its layers' inputs"
                )
            draft.details = {"dropouts": {name: visit.layout.value for name, visit in visits.items()}}
            return
        modules = draft.network.named_modules(remove_duplicate=False)
        layers = [name for name, module in modules if isinstance(module, LAYERS)]
        visits = trace(draft.network, inputs, layers)
        first = read_first(visits)
        # A recurrent layer that reads the inputs still has inner layers and a recurrent kernel to perturb.
        draft.sites = [site for site in find_sites(draft.network) if not reads_inputs(site, first)]
        if not draft.sites:
            raise NetworkError(
                "dropout acts on the inputs of every layer but the first, and this network has no layer after "
                f"its first (found: {sorted(visits) or 'no layer with weights'}) whose weight is a parameter of "
                "its own; add a hidden layer, or remove parametrisations"
            )
        draft.shared = {site.parameter for site in draft.sites if not per_example(site, visits)}
        draft.details = {"sites": [site.to_json() for site in draft.sites], "shared": sorted(draft.shared)}

    def outputs(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        draft, rate, inputs = self.draft, self.draft.method.rate, batch.inputs
        if rate is None:
            return self.lease().outputs(inputs)  # its own dropout layers are at work in training mode
        rows, weights = rows_of(inputs), draft.weights()
        own_rows = slice(batch.first, batch.first + rows)
        own: dict[Site, Tensor] = {}
        folded: dict[str, Tensor] = {}
        for site in draft.sites:
            weight = weights[site.parameter]
            if site.parameter in draft.shared:
                folded[site.parameter] = site.fold(
                    weight, bernoulli_factors(site.shape, rate, weight, generator)
                )
            else:
                whole = bernoulli_factors((batch.total or rows, *site.shape), rate, weight, generator)
                own[site] = whole[own_rows]
        lease = self.lease(folded)
        lease.enter(factors_on_inputs(lease.module, own))
        return lease.outputs(inputs)

    def kl(self) -> Tensor:
        """−log p(w) up to its constant under a Normal prior; 0 under the flat one."""
        std = self.draft.method.prior_std
        if std is None:
            return super().kl()
        return normal_penalty(trainable(self.draft.network).values(), std)

    def posterior(self) -> Posterior:
        if not self.draft.details:
            raise NetworkError(
                "which layers carry dropout is learned from a batch: call loss(...) once first"
            )
        return super().posterior()


@dataclass(frozen=True, kw_only=True)
class MCDropout(TrainedMethod):
    """Dropout in training and at prediction.

    Args:
        rate: probability of dropping an input node of a layer; None uses the network's own dropout layers.
        prior_std: standard deviation of a Normal prior around 0 on all weights; None is the flat prior.
    """

    rate: float | None = 0.1
    prior_std: float | None = None

    posterior_type = MCDropoutPosterior

    def __post_init__(self) -> None:
        if self.rate is not None:
            require_fraction(rate=self.rate, zero=False)
        if self.prior_std is not None:
            require_positive(prior_std=self.prior_std)

    def objective(self, start: Start) -> MCDropoutObjective:
        resolve(None, start.network)  # refuses a network whose parameters are all frozen
        if self.rate is None and not find_dropouts(start.network):
            raise NetworkError(
                "rate=None uses the network's own dropout layers, but it has none with a rate above 0; "
                "give a rate, as in MCDropout(rate=0.1), to put dropout on its layers' inputs"
            )
        draft = MCDropoutPosterior(start.network, start.likelihood, method=self)
        return MCDropoutObjective(draft, num_data=start.num_data, modes=start.modes)


def reads_inputs(site: Site, first: set[str]) -> bool:
    """Whether the site's weight multiplies the network's own inputs."""
    inner = site.parameter.rpartition(".")[2]
    recurrent = inner.startswith("weight_h") or (inner.startswith("weight_ih_l") and inner[11:12] != "0")
    return any(name in first for name in site.modules) and not recurrent


def mask_seed(generator: torch.Generator | None) -> int:
    """A seed for masks, from the stream of a draw."""
    device = generator.device if generator is not None else "cpu"
    return int(torch.randint(2**31, (), generator=generator, device=device))
