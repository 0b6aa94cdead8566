"""What chains draw from: the energy of all trained weights in one vector."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...fitting import Prepared
from ...inputs import Inputs, TensorOptions, map_tensors, take, weighted
from ...likelihoods import BuiltLikelihood, CategoricalLikelihood
from ...networks import resolve, run, trainable
from ...priors import PriorStd, prior_std_of

#: The most weights, and the training rows on whose outputs chains are compared.
MOST_WEIGHTS, COMPARED = 10_000, 64


class Target:
    """The posterior's energy −log p(D | w) − log p(w), as a function of all trained weights in one vector."""

    def __init__(self, prepared: Prepared, prior_std: PriorStd) -> None:
        self.network, self.likelihood = prepared.network, prepared.likelihood
        resolve(None, self.network)  # refuses a network whose parameters are all frozen
        if self.likelihood.learns:
            raise ConfigError("HMC needs known noise; give it, as in Gaussian(std=...)")
        self.parameters: dict[str, nn.Parameter] = trainable(self.network)
        self.like = TensorOptions.of(self.network)
        self.sizes = [parameter.numel() for parameter in self.parameters.values()]
        if sum(self.sizes) > MOST_WEIGHTS:
            raise ConfigError(
                f"HMC is for networks of at most {MOST_WEIGHTS} weights, got {sum(self.sizes)}; freeze some, or take "
                "another method"
            )
        stds = [
            parameter.new_full((parameter.numel(),), prior_std_of(prior_std, parameter))
            for parameter in self.parameters.values()
        ]
        self.prior_std = torch.cat(stds).detach()
        batches = list(prepared.source.batches(1024))
        self.inputs = _joined([batch.inputs for batch in batches])
        self.targets = torch.cat([batch.targets for batch in batches])
        weights = [batch.weights for batch in batches if batch.weights is not None]
        self.weights = torch.cat(weights) * prepared.source.mean_weight if weights else None

    def start(self, generator: torch.Generator) -> Tensor:
        """A draw from the prior."""
        return self.prior_std * torch.randn(
            self.prior_std.shape, generator=generator, dtype=self.like.dtype, device=self.like.device
        )

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """The vector(s) [..., P] as parameters [..., *shape] by name."""
        pieces = weights.split(self.sizes, -1)
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        return {
            name: piece.reshape(*weights.shape[:-1], *shape)
            for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
        }

    def outputs(self, weights: Tensor, inputs: Inputs) -> Tensor:
        """What the network answers with these weights."""
        return run(self.network, self.named(weights), inputs)

    def energy(self, weights: Tensor) -> Tensor:
        """−log p(D | w) − log p(w), without its constant."""
        fit = weighted(self.likelihood.log_prob(self.outputs(weights, self.inputs), self.targets), self.weights).sum()
        return 0.5 * (weights / self.prior_std).square().sum() - fit

    @torch.no_grad()
    def answers(self, draws: Tensor) -> Tensor:
        """What each draw [S, P] says of the first training rows, [S, Q]: reals, logits, or log-probabilities."""
        inputs = take(self.inputs, slice(COMPARED))
        return torch.stack([_comparable(self.likelihood, self.outputs(draw, inputs)) for draw in draws])


def _comparable(likelihood: BuiltLikelihood, outputs: Tensor) -> Tensor:
    if isinstance(likelihood, CategoricalLikelihood):  # a constant on all logits changes nothing
        outputs = outputs.log_softmax(likelihood.settings.axis(outputs))
    return outputs.reshape(-1)


def _joined(pieces: list[Inputs]) -> Inputs:
    """Inputs of several batches as one."""
    if len(pieces) == 1:
        return pieces[0]
    collected: list[list[Tensor]] = []
    for piece in pieces:
        leaves: list[Tensor] = []
        map_tensors(_kept_in(leaves), piece)
        collected.append(leaves)
    whole = iter([torch.cat(parts) for parts in zip(*collected, strict=True)])
    return map_tensors(lambda _: next(whole), pieces[0])


def _kept_in(store: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def keep(tensor: Tensor) -> Tensor:
        store.append(tensor)
        return tensor

    return keep
