"""IVON [Shen et al. 2024] beside our methods, by its authors' package `ivon-opt`.

The package is under the GPL: it is needed by these tables alone, and neither imported nor asked for by dubito.

Its target: IVON minimises λ E_q[mean loss] + KL(q ‖ N(0, 1 / (λ δ))) with λ = `ess` and δ = `weight_decay`. With λ = N
rows and δ = 1 / (N σ²) that is the evidence bound of N(0, σ²) weights at temperature 1, the reference's posterior.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dubito import seeds
from dubito.data import Part
from dubito.errors import TrainingError

from ..runner.ivon_package import package


@dataclass(frozen=True, kw_only=True)
class Ivon:
    """IVON's settings, as its package names them.

    Args:
        prior_std: σ of the Normal prior around 0.
        lr: the first rate, which falls along half a cosine.
        hess_init: the curvature to start from: standard deviations are 1 / √(N (h + δ)).
        beta1: decay rate of the momentum.
        beta2: decay rate of the curvature.
    """

    prior_std: float
    lr: float
    hess_init: float
    beta1: float = 0.9
    beta2: float = 0.99999

    def descended(
        self, network: nn.Module, train: Part, iterations: int, batch_size: int, seed: int
    ) -> "IvonPosterior":
        """A diagonal Gaussian, from the network's weights; the network itself is trained.

        Args:
            network: where it starts.
            train: rows.
            iterations: steps.
            batch_size: rows per step.
            seed: of order and noise.
        """
        count = len(train.targets)
        optimizer = package().IVON(
            network.parameters(), lr=self.lr, ess=count, weight_decay=1 / (count * self.prior_std**2),
            hess_init=self.hess_init, beta1=self.beta1, beta2=self.beta2,
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: (1 + math.cos(math.pi * step / iterations)) / 2
        )
        network.train()
        rows, loss = torch.empty(0, dtype=torch.long), torch.zeros(())
        with seeds.forked(seed, "ivon"):
            for _ in range(iterations):
                if len(rows) < min(batch_size, count):
                    rows = torch.cat([rows, torch.randperm(count)])
                batch, rows = rows[:batch_size], rows[batch_size:]
                with optimizer.sampled_params(train=True):
                    optimizer.zero_grad()
                    loss = cross_entropy(network(train.inputs[batch]), train.targets[batch])
                    loss.backward()
                optimizer.step()
                schedule.step()
        if not loss.isfinite():
            raise TrainingError("IVON's loss is no number; lower its learning rate")
        return IvonPosterior(network.eval(), optimizer)


class IvonPosterior:
    """Trained weights and the optimizer that draws around them.

    Args:
        network: with the means.
        optimizer: with the curvature.
    """

    def __init__(self, network: nn.Module, optimizer: Any) -> None:
        self.network, self.optimizer = network, optimizer

    @torch.no_grad()
    def probs(self, inputs: Tensor, num_samples: int, seed: int = 0, max_rows: int = 1000) -> Tensor:
        """Mean class probabilities [B, C]."""
        total = torch.zeros(())
        with seeds.forked(seed, "ivon draws"):
            for _ in range(num_samples):
                with self.optimizer.sampled_params():
                    outputs = torch.cat([self.network(rows) for rows in inputs.split(max_rows)])
                    total = total + outputs.double().softmax(1)
        return total / num_samples

    @property
    def file_bytes(self) -> int:
        """Bytes of means and curvature in a file."""
        curvature = {f"hess.{i}": group["hess"] for i, group in enumerate(self.optimizer.param_groups)}
        return len(save({**self.network.state_dict(), **curvature}))
