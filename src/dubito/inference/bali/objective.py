"""BALI's objective: a posterior under training, whose layers are regressions."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...curvature import Block
from ...inputs import Batch
from ...likelihoods import GaussianLikelihood
from ...objective import Objective
from ...training import Plan, Processes, Training
from .layer import Layer, Prior
from .posterior import BALIPosterior
from .setup import Topology
from .stepper import BALIStepper

if TYPE_CHECKING:
    from .choose import Choice
    from .method import BALI


class BALIObjective(Objective):
    """The network with weights drawn from its layers' posteriors.

    Args:
        draft: the posterior under training.
        topology: its layers.
        target_std: of the targets, per output, where the last layer learns from them; else None.
        inferred_noise: whether the likelihood's noise is the last layer's Σ.
        num_data: the number of training rows.
        modes: modules by name that stay in evaluation mode while training.
    """

    draft: BALIPosterior
    asks = True
    #: Makes the update rule.
    steppers: Callable[..., BALIStepper] = BALIStepper

    def __init__(
        self,
        draft: BALIPosterior,
        topology: Topology,
        *,
        target_std: Tensor | None,
        inferred_noise: bool,
        num_data: float,
        modes: Mapping[str, bool] | None,
    ) -> None:
        super().__init__(draft, num_data=num_data, modes=modes)
        self.topology, self.target_std, self.inferred_noise = topology, target_std, inferred_noise
        self.final: BALIStepper | None = None
        self.choice: Choice | None = None
        draft.tensors.requires_grad_(False)
        for block in topology.blocks:
            for name in block.parameters:
                draft.network.get_parameter(name).requires_grad_(False)

    @property
    def last(self) -> str | None:
        """Name of the block that learns from the targets themselves."""
        return self.topology.last if self.target_std is not None else None

    def layer(self, block: Block) -> Layer:
        """What is known of a block at the start; its factors are the posterior's own tensors."""
        draft = self.draft
        target_std = self.target_std if block.name == self.last else None
        mean = block.matrix(draft.weights()).detach()
        layer = Layer.start(block.name, prior_of(draft.method, self.topology, block, target_std, mean), mean)
        layer.input_tril = draft.group("input_tril")[block.weight].data
        layer.output_tril = draft.group("output_tril")[block.weight].data
        return layer

    def set_priors(self, method: "BALI", layers: Mapping[str, Layer]) -> None:
        """Give layers the priors of other settings."""
        for block in self.topology.blocks:
            layer = layers[block.name]
            target_std = self.target_std if block.name == self.last else None
            layer.prior = prior_of(method, self.topology, block, target_std, layer.mean)

    def take(self, method: "BALI", layers: Mapping[str, Layer]) -> None:
        """Go on with other settings."""
        assert method.effective_data is not None
        self.set_priors(method, layers)
        self.draft.method = method
        self.draft.details["effective_data"] = dict.fromkeys(
            self.draft.details["effective_data"], method.effective_data
        )

    def beside(self) -> list[Tensor]:
        """What the optimiser trains."""
        return [parameter for group in self.parameter_groups(1.0) for parameter in group["params"]]

    def outputs(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        return self.lease(self.draft.draw(0, generator)).outputs(batch.inputs)

    def stepper(self, training: Training, plan: Plan, processes: Processes, seed: int) -> BALIStepper:
        self.final = self.steppers(self, training, plan, processes, seed)
        return self.final

    @torch.no_grad()
    def commit(self, layers: Mapping[str, Layer]) -> None:
        """Put the layers' means into the network, and the last one's noise into the likelihood."""
        for block in self.topology.blocks:
            for name, value in block.tensors(layers[block.name].mean).items():
                self.draft.network.get_parameter(name).copy_(value)
        if self.last is not None:
            self.put_noise(layers[self.last].output_tril)

    def put_noise(self, output_tril: Tensor) -> None:
        """Put the last layer's noise into the likelihood, where it is inferred."""
        if self.inferred_noise:
            put_noise(self.draft.likelihood, output_tril[0])


def prior_of(method: "BALI", topology: Topology, block: Block, target_std: Tensor | None, like: Tensor) -> Prior:
    """The prior of a block: scaled inputs but for first layers, and U_0 in units of the targets' variance."""
    scale = 1.0 if block.name in topology.first else block.columns**-0.5  # s of Eq. 12
    assert method.effective_data is not None and method.output_floor is not None
    floor = like.new_full((block.groups, block.rows), method.hidden_floor)
    if target_std is not None:
        floor = (method.output_floor * target_std.square()).to(like).expand(block.groups, block.rows)
    return Prior(
        precision=1 / (scale**2 * method.prior_scale),
        floor=floor,
        data=like.new_full((block.groups,), method.effective_data),
    )


def put_noise(likelihood: Any, tril: Tensor) -> None:
    """Set the likelihood's noise to a covariance with the factor `tril` [C, C]."""
    assert isinstance(likelihood, GaussianLikelihood)
    if likelihood.scale_tril is not None:
        likelihood.scale_tril.copy_(tril)
    else:
        assert likelihood.noise_std is not None
        likelihood.noise_std.copy_(tril.reshape(likelihood.noise_std.shape))
