"""The Normals of a posterior's weights, for one training step or one prediction."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..likelihoods import inverse_softplus
from ..posterior import Posterior, ShapeRule
from ..precision import full_precision
from ..priors import Around, prior_std_of
from .scales import FormedScale, OwnScale, TiedScale, TrainedScale, TruncatedScale, WeightScale
from .terms import summed
from .ties import limit_std, matrix_shape

#: The groups of tensors that hold standard deviations of weights.
GROUPS = ("raw_std", "log_u", "log_v", "u", "v")


class Normals:
    """Means and scales of a posterior's Normal weights, for one caller and while no parameter changes.

    What is computed once serves all that ask: standard deviations in every draw, divergences along with draws. The
    means are the network's own weights. σ is softplus(raw_std), one per weight; U Vᵀ with U = exp(log_u) over the
    outputs and V = exp(log_v) over the inputs; or max(U Vᵀ, floor) with `u` and `v` of any sign, the floors being in
    `details`. Parameters in none of these groups of tensors are not Normal.

    Args:
        posterior: whose.
        method: the settings of the Normals; None takes the posterior's.

    Attributes:
        means: all of the network's weights, by name.
        random: the names of those that are Normal.
        prior: where it is centred on a network's weights, else None.
    """

    def __init__(self, posterior: Posterior, method: Any = None) -> None:
        self._posterior, self._method = posterior, posterior.method if method is None else method
        self.prior: Around | None = getattr(self._method, "prior", None)
        self.means = posterior.weights()
        self.device = next(iter(self.means.values())).device
        keys = [key for key in ("raw_std", "log_u", "u") if key in posterior.tensors]
        self._forms = {name: key for key in keys for name in posterior.group(key).names}
        self.random = tuple(name for name in self.means if name in self._forms)
        self._scales: dict[str, WeightScale] = {}
        self._kls: list[Tensor] = []
        self._counted: set[str] = set()

    # -- scales --------------------------------------------------------------------------------------------

    def scale(self, name: str) -> WeightScale:
        """The standard deviations of one parameter: in the form they are kept in, or times the posterior's scale."""
        scale = self._scales.get(name)
        if scale is None:
            stored, factor = self.stored(name), self._posterior.scale
            scale = self._scales[name] = stored if factor == 1 else FormedScale(stored.std * factor)
        return scale

    def stored(self, name: str) -> WeightScale:
        """The standard deviations of one parameter without the posterior's scale."""
        form, group, shape = self._forms[name], self._posterior.group, self.means[name].shape
        if form == "raw_std":
            return OwnScale(group("raw_std")[name])
        if form == "log_u":
            return TiedScale(group("log_u")[name], group("log_v")[name], shape)
        return TruncatedScale(group("u")[name], group("v")[name], self._posterior.details["floors"][name], shape)

    def stds(self) -> list[Tensor]:
        """All standard deviations."""
        return [self.scale(name).std for name in self.random]

    def holds(self, name: str) -> str:
        """What the posterior keeps for one of the parameters, in a few words."""
        key, form = self._forms[name], "own std"
        if key != "raw_std":
            words = "std of rank" if key == "log_u" else "std truncated to rank"
            form = f"{words} {len(self._posterior.group(key)[name])}"
        how = self._posterior.details.get("in_training", {}).get(name)
        return f"Normal, {form}" + (f", {how}" if how else "")

    def shapes(self) -> dict[str, ShapeRule]:
        """How the tensors of the scales are shaped, by group."""

        def side(first: str, axis: int) -> ShapeRule:
            return lambda name, _: (len(self._posterior.group(first)[name]), matrix_shape(self.means[name])[axis])

        if not self.random:
            raise KeyError("none of the weights has a standard deviation")
        tied = {"log_u": side("log_u", 0), "log_v": side("log_u", 1), "u": side("u", 0), "v": side("u", 1)}
        return {"raw_std": self._posterior.stacked_like_weights(), **tied}

    def trained(self, *keys: str) -> list[Tensor]:
        """The tensors of some groups, or of all."""
        held = [key for key in keys or GROUPS if key in self._posterior.tensors]
        return [tensor for key in held for _, tensor in self._posterior.group(key).items()]

    @torch.no_grad()
    def limit(self) -> None:
        """Set standard deviations back to the largest that the method allows, in place."""
        most: float | None = self._method.max_std
        if most is None:
            return
        raw = float(inverse_softplus(torch.tensor(most, dtype=torch.float64)))
        for raw_std in self.trained("raw_std"):
            raw_std.clamp_(max=raw)
        for log_u, log_v in zip(self.trained("log_u"), self.trained("log_v"), strict=True):
            limit_std(log_u, log_v, most)

    # -- draws and divergence ------------------------------------------------------------------------------

    def draw(self, names: Sequence[str], generator: torch.Generator | None) -> dict[str, Tensor]:
        """μ + σ ε for some parameters   [k-tied Normal, Eq. 6]."""
        with full_precision(self.device):
            return {name: self.scale(name).draw(self.means[name], generator) for name in names}

    def drawn(
        self, names: Sequence[str], generator: torch.Generator | None, *, centred: bool = False
    ) -> dict[str, Tensor]:
        """μ + σ ε, or σ ε alone where `centred`, for some parameters.

        Their divergences are computed along the way, which saves passes over memory.
        """
        terms = []
        with full_precision(self.device):
            for name in names:
                scale, mean = self.scale(name), self._from_prior(name)
                assert isinstance(scale, TrainedScale)
                terms.append(scale.draw_term(mean, self._prior_std(name), generator, centred))
            kl, draws = summed(terms) if terms else (None, [])
            if self.prior is not None and not centred:
                draws = [draw + self.prior.centre(n, draw) for n, draw in zip(names, draws, strict=True)]
        if kl is not None:
            self._kls.append(kl)
            self._counted.update(names)
        return dict(zip(names, draws, strict=True))

    def kl(self) -> Tensor:
        """Divergence of all parameters from the prior in nats."""
        rest, kls = [name for name in self.random if name not in self._counted], list(self._kls)
        if rest:
            with full_precision(self.device):
                terms = [self.scale(name).term(self._from_prior(name), self._prior_std(name)) for name in rest]
                kls.append(summed(terms)[0])
        return kls[0] if len(kls) == 1 else torch.stack(kls).sum()

    def check_prior(self) -> None:
        """Refuse a prior around a network that is not like this one."""
        if self.prior is not None:
            self.prior.check({name: self.means[name] for name in self.random})

    @property
    def factor_rate(self) -> float:
        """Multiplies the learning rate of tied factors."""
        return self._method.factor_rate

    def _prior_std(self, name: str) -> float:
        return prior_std_of(self._method.prior_std if self.prior is None else self.prior.group(name), self.means[name])

    def _from_prior(self, name: str) -> Tensor:
        """The mean as seen from the prior's."""
        mean = self.means[name]
        return mean if self.prior is None else mean - self.prior.centre(name, mean)
