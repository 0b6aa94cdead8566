"""One forward and one backward pass of a stack of networks, by `vmap` over their weights."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import vmap

from ...inputs import Batch, Inputs, call, map_tensors
from ...layers import Context, Form
from ...layers.context import name_of
from ...layers.passes import asking
from ...layers.shell import leased
from ...likelihoods import BuiltLikelihood
from .setup import Topology


class _Judged(nn.Module):
    """A likelihood whose call is the log-density, so that its noise can be put in by name."""

    def __init__(self, likelihood: BuiltLikelihood) -> None:
        super().__init__()
        self.likelihood = likelihood

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.likelihood.log_prob(outputs, targets)


class _Anchored(Context):
    """Keeps the inputs and outputs of layers, and adds anchors to the outputs.

    Args:
        anchors: by the names of weights.
    """

    def __init__(self, anchors: Mapping[str, Tensor]) -> None:
        self.anchors = anchors
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}

    def use(
        self,
        form: Form,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None = None,
        *,
        active: Tensor | None = None,
    ) -> Tensor:
        output, name = super().use(form, x, weight, bias, active=active), name_of(weight)
        if name is None:
            return output
        if name in self.inputs:
            raise NotImplementedError(f"{name} is used more than once")
        self.inputs[name], self.outputs[name] = x, output
        return output + self.anchors[name] if name in self.anchors else output


class StackedPass:
    """A pass of all replicas over a batch, and the sums of products it gives.

    Gradients at the outputs of layers are those with respect to anchors of 0 that are added there: nothing else
    asks for a gradient.

    Args:
        network: of one of them; weights are put in.
        likelihood: of one of them; noise is put in.
        topology: the layers, all plain.
        last: name of the block that learns from the targets, or None.
        modes: modules by name that stay in evaluation mode while training.
    """

    def __init__(
        self,
        network: nn.Module,
        likelihood: BuiltLikelihood,
        topology: Topology,
        last: str | None = None,
        modes: Mapping[str, bool] | None = None,
    ) -> None:
        self.modes = modes or {}
        self.network, self.judged, self.blocks = network, _Judged(likelihood), topology.blocks
        self.last = next((block.weight for block in topology.blocks if block.name == last), None)
        self.parts = {block.name: topology.cover.parts[block.name][0] for block in topology.blocks}
        self.weights = [block.weight for block in topology.blocks]
        #: Zeros by the names of weights.
        self.anchors: dict[str, Tensor] = {}
        self._all = vmap(self._one, in_dims=(0, 0, 1, 1, 0), randomness="different")

    def noise_tensors(self) -> dict[str, Tensor]:
        """The likelihood's own tensors by name."""
        return dict(self.judged.likelihood.named_buffers())

    def __call__(
        self, weights: Mapping[str, Tensor], noise: Mapping[str, Tensor], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
        """The total log-likelihood, and sums of products [R · G, w, w] with their cases, by block.

        Args:
            weights: by block, [R, G, m, n].
            noise: the likelihood's tensors, [R, ...].
            batch: rows first, replicas second.
        """
        tensors: dict[str, Tensor] = {}
        for block in self.blocks:
            tensors |= block.tensors(weights[block.name])
        self._anchor(batch)
        with torch.enable_grad():
            sums, inputs = self._all(tensors, dict(noise), batch.inputs, batch.targets, self.anchors)
            total = sums.sum()
            gradients = torch.autograd.grad(total, list(self.anchors.values()))
        slopes = dict(zip(self.anchors, gradients, strict=True))
        grams, cases = {}, {}
        with torch.no_grad():
            targets = batch.targets.transpose(0, 1)
            for block in self.blocks:
                seen = inputs[block.weight], slopes.get(block.weight)
                grams[block.name], cases[block.name] = self._gram(block.name, *seen, targets)
        return total.detach(), grams, cases

    def _one(
        self,
        tensors: dict[str, Tensor],
        noise: dict[str, Tensor],
        inputs: Inputs,
        targets: Tensor,
        anchors: dict[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One replica: its log-likelihood, and what each layer read."""
        context = _Anchored(anchors)
        with asking(self.network, context, self.weights, tensors, training=self.modes) as shell:
            outputs = call(shell, inputs)
        with leased(self.judged, {f"likelihood.{name}": value for name, value in noise.items()}) as judged:
            return judged(outputs, targets).sum(), context.inputs

    def _anchor(self, batch: Batch) -> None:
        """Zeros in the shapes of the layers' outputs; a dry run of one row tells them."""
        rows, count = batch.targets.shape[:2]
        known = next(iter(self.anchors.values()), None)
        if known is not None and known.shape[:2] == (count, rows):
            return
        context = _Anchored({})
        with asking(self.network, context, self.weights, training=self.modes) as shell, torch.no_grad():
            call(shell, map_tensors(lambda tensor: tensor[:1, 0], batch.inputs))
        self.anchors = {
            name: output.new_zeros(count, rows, *output.shape[1:]).requires_grad_()
            for name, output in context.outputs.items()
            if name != self.last
        }

    def _gram(
        self, name: str, inputs: Tensor, slopes: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, float]:
        """[X G]ᵀ[X G], or [X Y]ᵀ[X Y] where no gradients are given, as in `products.gram`."""
        part, form = self.parts[name], self.parts[name].product
        assert form is not None
        count, rows = inputs.shape[:2]
        a = form.inputs(inputs.flatten(0, 1))  # [R · B, G, T, n]
        positions = a.shape[2]
        ones = [a.new_ones(*a.shape[:-1], 1)] if part.bias is not None else []
        true = targets.reshape(count * rows, 1, 1, -1)
        last = true if slopes is None else form.outputs(slopes.flatten(0, 1)).mT
        joint = torch.cat([a, *ones, last], -1)
        joint = (
            joint.unflatten(0, (count, rows)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        )  # [R · G, B · T, w]
        sums = torch.bmm(joint.mT, joint)
        if form.order is not None:  # from the order of patches to that of weights
            inner = form.order.argsort().to(sums.device)
            index = torch.cat([inner, torch.arange(len(inner), sums.shape[-1], device=sums.device)])
            sums = sums[:, index][:, :, index]
        return sums, float(rows * positions)
