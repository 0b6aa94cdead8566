"""Outputs of several rows together: J P⁻¹ Jᵀ between all pairs of rows and outputs, for acquisition functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from ... import seeds
from ...fitting import read
from ...inputs import Inputs, map_tensors, named_tensors, rows_of, take
from .covariance import contracted, joint_covariance, slices
from .linearised import BlockNormals, Linearised, repeated
from .passes import Pass


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
        noise = torch.randn(
            *shape, size, generator=generator, dtype=self.covariance.dtype, device=self.mean.device
        )
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


def joint_outputs(
    linearised: Linearised, inputs: Inputs, posterior: BlockNormals, max_rows: int
) -> tuple[Tensor, Tensor]:
    """Outputs [B, ...] and their covariance [B·E, B·E].

    Args:
        linearised: the network.
        inputs: checked rows; the covariance has a graph where one of them requires gradients.
        posterior: the distributions of the blocks.
        max_rows: rows that go through the network at once, where there is no graph.
    """
    rows, sizes = rows_of(inputs), linearised.measured(inputs)
    graph = torch.is_grad_enabled() and any(tensor.requires_grad for _, tensor in named_tensors(inputs))
    most, _, _ = sizes.plan(rows, max_rows, pairs=True, units=True)
    if graph or rows <= most:
        return _together(linearised, inputs, posterior, max_rows, graph)
    # Gradients of all rows are too many: those of two groups at a time, for all pairs of groups.
    groups = [torch.arange(rows)[some] for some in slices(rows, most // 2)]
    means: list[Tensor] = []
    covariance = torch.zeros(())
    for number, first in enumerate(groups):
        for second in groups[number:]:
            some = first if first is second else torch.cat([first, second])
            mean, part = _together(linearised, take(inputs, some), posterior, max_rows, False)
            if not number and first is second:
                covariance = part.new_zeros(rows, sizes.outputs, rows, sizes.outputs)
            if first is second:
                means.append(mean)
            blocks = part.unflatten(1, (len(some), -1)).unflatten(0, (len(some), -1))
            covariance[some[:, None], :, some] = blocks.transpose(1, 2)
    return torch.cat(means), covariance.flatten(2).flatten(0, 1)


def _together(
    linearised: Linearised, inputs: Inputs, posterior: BlockNormals, max_rows: int, graph: bool
) -> tuple[Tensor, Tensor]:
    """The same for all rows in one forward pass."""
    rows, cover, total = rows_of(inputs), linearised.cover, 0
    sizes, stored = linearised.measured(inputs), {}
    copies = sizes.plan(rows, max(rows, max_rows), pairs=True, units=True)[2]
    with linearised.reading(keep_graph=graph) as (function, record), torch.enable_grad():
        part = inputs if graph else map_tensors(Tensor.detach, inputs)
        answers = read(function, repeated(part, copies))
        done = Pass(record, answers, record.tail(answers), copies, create_graph=graph)
        done.backward(torch.arange(sizes.outputs, device=answers.device), last=not graph)
        with torch.set_grad_enabled(graph):
            for name, block in cover.blocks.items():
                normals = posterior(name)
                if not block.kronecker:
                    total = total + _of_diagonal(linearised, name, done, normals[0].variance.flatten())
                    continue
                for (normal,), a, gradients in linearised.matrices(name, done, [normals], stored):
                    total = total + joint_covariance(normal, a, torch.cat(gradients, 1))
    covariance: Any = total
    return done.outputs if graph else done.outputs.detach(), covariance


def _of_diagonal(linearised: Linearised, name: str, done: Pass, variance: Tensor) -> Tensor:
    """The share of a parameter without factors, from each row's own gradients."""
    parts = linearised.cover.parts[name]
    columns = [
        done.parameter_gradients(parts, number, slice(0, done.total), variance.dtype)
        for number in range(len(done.caught))
    ]
    jacobian = torch.cat([column.unflatten(0, (-1, done.copies)) for column in columns], 1)
    flat = jacobian[:, : done.count].flatten(0, 1)  # [B·E, size]
    return contracted(flat * variance, flat, True)
