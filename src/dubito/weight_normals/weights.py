"""Posteriors with independent Normals over weights, their standard deviations in one of several forms."""

from typing import Any

import torch
from torch import Tensor

from ..likelihoods import inverse_softplus
from ..posterior import Posterior, ShapeRule
from ..priors import Around
from .scales import FormedScale, OwnScale, TiedScale, TruncatedScale, WeightScale
from .ties import limit_std, matrix_shape

#: The groups of tensors that hold standard deviations of weights.
GROUPS = ("raw_std", "log_u", "log_v", "u", "v")


class NormalWeights(Posterior):
    """w ~ N(mean, σ²) for the weights in some groups of tensors, the means being the network's own.

    σ is softplus(raw_std), one per weight; U Vᵀ with U = exp(log_u) over the outputs and V = exp(log_v) over
    the inputs; or max(U Vᵀ, floor) with `u` and `v` of any sign, the floors being in `details`.

    Attributes:
        random: the parameters that are Normal.
    """

    optional_groups = GROUPS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        keys = [key for key in ("raw_std", "log_u", "u") if key in self.tensors]
        self._forms = {name: key for key in keys for name in self.group(key).names}
        self.random = tuple(name for name in self.weights() if name in self._forms)

    @property
    def normal_method(self) -> Any:
        """The settings of the Normals: those of `MeanField` or `KTied`."""
        return self.method

    @property
    def prior(self) -> Around | None:
        """The prior, where it is centred on a network's weights."""
        return getattr(self.normal_method, "prior", None)

    def normal_shapes(self) -> dict[str, ShapeRule]:
        """How the tensors of the Normals are shaped, by group."""
        weights = self.weights()

        def side(first: str, axis: int) -> ShapeRule:
            return lambda name, _: (len(self.group(first)[name]), matrix_shape(weights[name])[axis])

        if not self.random:
            raise KeyError("none of the weights has a standard deviation")
        tied = {"log_u": side("log_u", 0), "log_v": side("log_u", 1), "u": side("u", 0), "v": side("u", 1)}
        return {"raw_std": self.stacked_like_weights(), **tied}

    def weight_scale(self, name: str, shape: torch.Size | None = None) -> WeightScale:
        """The standard deviations of one parameter: in the form they are kept in, or times the posterior's scale.

        Args:
            name: the parameter's.
            shape: the parameter's, where it is known.
        """
        stored = self.stored_scale(name, shape)
        return stored if self.scale == 1 else FormedScale(stored.std * self.scale)

    def stored_scale(self, name: str, shape: torch.Size | None = None) -> WeightScale:
        """The standard deviations of one parameter without the posterior's scale; the arguments are the same."""
        form = self._forms[name]
        if form == "raw_std":
            return OwnScale(self.group("raw_std")[name])
        shape = shape or self.weights()[name].shape
        if form == "log_u":
            return TiedScale(self.group("log_u")[name], self.group("log_v")[name], shape)
        u, v, floor = self.group("u")[name], self.group("v")[name], self.details["floors"][name]
        return TruncatedScale(u, v, floor, shape)

    def standard_deviations(self) -> list[Tensor]:
        return [self.weight_scale(name).std for name in self.random]

    def holds(self, name: str) -> str:
        if name not in self.random:
            return super().holds(name)
        key, form = self._forms[name], "own std"
        if key != "raw_std":
            words = "std of rank" if key == "log_u" else "std truncated to rank"
            form = f"{words} {len(self.group(key)[name])}"
        how = self.details.get("in_training", {}).get(name)
        return f"Normal, {form}" + (f", {how}" if how else "")

    @torch.no_grad()
    def limit(self, most: float | None) -> None:
        """Set standard deviations back to the largest allowed, in place; None allows all."""
        if most is None:
            return
        if "raw_std" in self.tensors:
            for _, raw_std in self.group("raw_std").items():
                raw_std.clamp_(max=float(inverse_softplus(torch.tensor(most, dtype=torch.float64))))
        if "log_u" in self.tensors:
            for name, log_u in self.group("log_u").items():
                limit_std(log_u, self.group("log_v")[name], most)
