"""Outputs of several rows together: J P⁻¹ Jᵀ between all pairs of rows and outputs, for acquisition functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from ... import seeds
from ...fitting import read
from ...inputs import Inputs, map_tensors, named_tensors, rows_of
from .covariance import Contraction, contracted, joint_covariance
from .linearised import Linearised, repeated
from .output_gradients import OutputGradients
from .shares import BlockNormals, BlockShares


@dataclass(frozen=True, eq=False)
class Joint:
    """Normal outputs of several rows together, without the noise of a likelihood.

    For reals, observations are Normal too: their covariance is `covariance` plus the noise's variance on the
    diagonal, such as `posterior.likelihood.std() ** 2`.

    Attributes:
        mean: the network's outputs, [B, ...].
        covariance: [B·E, B·E], row by row, the E outputs of a row together in their order.
    """

    mean: Tensor
    covariance: Tensor

    @property
    def variance(self) -> Tensor:
        """Of each output, [B, ...]."""
        return self.covariance.diagonal().reshape(self.mean.shape)

    def rsample(
        self, sample_shape: Sequence[int] = (), *, seed: int = 0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of all outputs together, [*sample_shape, B, ...], differentiable in mean and covariance.

        Args:
            sample_shape: how many.
            seed: the same seed, dtype and device give the same draws.
            generator: in place of the seed's.
        """
        generator = generator or seeds.generator(seed, "joint", device=self.mean.device)
        shape, size = tuple(sample_shape), self.mean.numel()
        noise = torch.randn(*shape, size, generator=generator, dtype=self.covariance.dtype, device=self.mean.device)
        return self.mean + (noise @ self.scale_tril().mT).reshape(*shape, *self.mean.shape)

    def log_prob(self, values: Tensor) -> Tensor:
        """The log-density of outputs [..., B, ...], all together."""
        normal = MultivariateNormal(self.mean.flatten(), scale_tril=self.scale_tril(), validate_args=False)
        return normal.log_prob(values.reshape(*values.shape[: values.ndim - self.mean.ndim], -1))

    def scale_tril(self) -> Tensor:
        """The lower Cholesky factor of the covariance.

        Ten roundings of its trace are added to the diagonal: with more outputs than weights it is singular.
        """
        rounding = 10 * torch.finfo(self.covariance.dtype).eps * self.covariance.trace()
        identity = torch.eye(len(self.covariance), dtype=rounding.dtype, device=rounding.device)
        return torch.linalg.cholesky(self.covariance + rounding * identity)


def joint_outputs(linearised: Linearised, inputs: Inputs, posterior: BlockNormals) -> tuple[Tensor, Tensor]:
    """Outputs [B, ...] and their covariance [B·E, B·E], with a graph where an input requires gradients.

    Gradients of all outputs at all layers' nodes are held together, Jacobians are not.

    Args:
        linearised: the network.
        inputs: checked rows.
        posterior: the distributions of the blocks.
    """
    rows, sizes = rows_of(inputs), linearised.measured(inputs)
    graph = any(tensor.requires_grad for _, tensor in named_tensors(inputs))
    copies = sizes.copies(rows)
    shares, stored = BlockShares(linearised.cover, [posterior]), {}
    total: Any = 0.0
    with linearised.reading(keep_graph=graph) as (function, record), torch.enable_grad():
        part = inputs if graph else map_tensors(Tensor.detach, inputs)
        answers = read(function, repeated(part, copies))
        done = OutputGradients(record, answers, record.tail(answers), copies, create_graph=graph)
        done.backward(done.numbers, last=not graph)
        with torch.set_grad_enabled(graph):
            for name, block in linearised.cover.blocks.items():
                if block.kronecker:
                    for (normal,), a, gradients in shares.matrices(name, done, stored):
                        total = total + joint_covariance(normal, a, torch.cat(gradients, 1))
                    continue
                variance = posterior(name)[0].variance.flatten()
                jacobian = done.jacobians(shares.cover.parts[name], slice(0, rows), variance.dtype)
                total = total + contracted(jacobian.flatten(0, 1), variance, Contraction(pairs=True))
    return done.outputs if graph else done.outputs.detach(), total
