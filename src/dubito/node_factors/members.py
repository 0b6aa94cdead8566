"""The components of a posterior on the nodes, apart: each as a posterior, and how much they disagree."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..errors import ConfigError
from ..hints import checked
from ..inputs import Inputs
from ..metrics import Disagreement, disagreement
from ..networks import duplicate
from ..posterior import MAX_ROWS
from ..prediction import BernoulliPrediction, CategoricalPrediction
from ..weight_normals import GROUPS

if TYPE_CHECKING:
    from .posterior import NodePosterior

P = TypeVar("P", bound="NodePosterior")


class Components(Sequence[Any]):
    """The components of a posterior, each made when asked for."""

    def __init__(self, posterior: "NodePosterior") -> None:
        self.posterior = posterior

    def __len__(self) -> int:
        return self.posterior.num_components

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [component(self.posterior, number) for number in range(len(self))[index]]
        return component(self.posterior, range(len(self))[index])


@checked
def component(posterior: P, index: int) -> P:
    """Component `index` as a posterior of its own."""
    network = duplicate(posterior.network)
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for name, others in posterior.other_biases.items():  # the first component's are the network's own
            parameters[name].copy_(others[index - 1] if index else parameters[name])
    tensors = {
        key: {
            name: (tensor if key in ("statistics", *GROUPS) else tensor[index : index + 1]).clone()
            for name, tensor in posterior.group(key).items()
        }
        for key in posterior.tensors
        if key != "biases"
    }
    single = type(posterior)(
        network,
        duplicate(posterior.likelihood),
        method=replace(posterior.method, components=1),
        tensors=tensors,
        details=posterior.details,
        history=posterior.history,
        trainable=posterior.trainable,
    )
    return single.finished()


@checked
@torch.no_grad()
def diversity(
    posterior: "NodePosterior", inputs: Inputs, targets: Tensor | Sequence[int], *, num_samples: int = 32, seed: int = 0
) -> Disagreement:
    """Share of rows on which two components predict different classes, over their mean error rate.

    Args:
        posterior: of at least two components.
        inputs: what the network reads.
        targets: the labels.
        num_samples: draws in all, as in `predict`.
        seed: as in `predict`.
    """
    components = posterior.num_components
    if components < 2:
        raise ConfigError("diversity compares components, and this posterior has one; fit with components=2 or more")
    members = []
    samples = posterior.num_atoms or -(-num_samples // components) * components
    outputs = list(posterior._outputs(inputs, samples, seed, MAX_ROWS))
    for index in range(components):
        prediction = posterior.likelihood.predictive(outputs[index::components])
        if not isinstance(prediction, CategoricalPrediction | BernoulliPrediction):
            raise ConfigError(f"diversity is about classes, got {type(prediction).__name__}")
        probs = prediction.probs
        single = probs.ndim == 2 and isinstance(prediction, BernoulliPrediction)
        members.append(probs[:, 0] if single else probs)
    return disagreement(torch.stack(members), torch.as_tensor(targets))
