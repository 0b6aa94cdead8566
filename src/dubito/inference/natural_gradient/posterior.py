"""What natural-gradient methods leave behind: Gaussians around the network's weights, diagonal or by layers."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NotRequired

import torch
from torch import Tensor

from ...posterior import Details, Posterior, ShapeRule


class NaturalDetails(Details):
    """Facts of natural gradients: the biases of weights with factors, and those stored as inputs × outputs."""

    factored: dict[str, str | None]
    turned: NotRequired[list[str]]


class NaturalPosterior(Posterior):
    """w ~ N(mean, std²) for each weight, and matrix normals for layers with Kronecker factors.

    The tensors are standard deviations ("std") by parameter name; for a weight with factors, roots of R⁻¹ and of
    Σ⁻¹ with N/λ in them ("input_tril", "output_tril") instead, its bias being their last column.
    """

    scalable = True
    details_type, optional_groups = NaturalDetails, ("input_tril", "output_tril")

    @cached_property
    def biases(self) -> dict[str, str | None]:
        """The bias of each weight with factors."""
        return dict(self.details.get("factored", {}))

    @cached_property
    def turned(self) -> frozenset[str]:
        """The weights with factors that are stored as inputs × outputs."""
        return frozenset(self.details.get("turned", ()))

    def shapes(self) -> dict[str, ShapeRule]:
        weights = self.weights()

        def outputs(name: str, tensor: Tensor) -> tuple[int, ...]:
            groups, m, _ = tensor.shape
            return (groups, m, m)

        def inputs(name: str, tensor: Tensor) -> tuple[int, ...]:
            groups, m, _ = self.group("output_tril")[name].shape
            n, rest = divmod(weights[name].numel(), groups * m)
            n += self.biases[name] is not None
            return (groups, n, n) if not rest else ()

        return {"std": self.stacked_like_weights(), "input_tril": inputs, "output_tril": outputs}

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        weights = self.weights()
        drawn: dict[str, Tensor] = {}
        for name, std in self.group("std").items():
            drawn[name] = weights[name] + std * self._noise(std.shape, weights[name], generator)
        for name, bias in self.biases.items():
            right, left = self.group("input_tril")[name], self.group("output_tril")[name]
            groups, m, n = len(left), left.shape[-1], right.shape[-1]
            like = weights[name]
            unit = self._noise((groups, m, n), like, generator)
            # Rows of L⁻¹ and columns of C⁻ᵀ: Cov = Σ ⊗ R for L Lᵀ = R⁻¹ and C Cᵀ = Σ⁻¹
            noise = torch.linalg.solve_triangular(right, unit, upper=False, left=False)
            noise = torch.linalg.solve_triangular(left.mT, noise, upper=True)
            matrices = noise[..., : n - (bias is not None)]
            drawn[name] = like + (matrices[0].mT if name in self.turned else matrices.reshape(like.shape))
            if bias is not None:
                drawn[bias] = weights[bias] + noise[..., -1].reshape(weights[bias].shape)
        return weights | drawn

    def _noise(self, shape: Sequence[int], like: Tensor, generator: torch.Generator | None) -> Tensor:
        return self.scale * torch.randn(tuple(shape), generator=generator, dtype=like.dtype, device=like.device)

    def standard_deviations(self) -> list[Tensor]:
        return [std for _, std in self.group("std").items()]

    def holds(self, name: str) -> str:
        if name in self.group("std"):
            return "Normal, own std"
        held: set[Any] = {*self.biases, *self.biases.values()}
        return "matrix normal" if name in held else super().holds(name)
