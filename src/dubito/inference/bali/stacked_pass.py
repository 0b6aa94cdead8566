"""One forward and one backward pass of a stack of networks, by `vmap` over their weights."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from ...inputs import Batch, Inputs, call, map_tensors
from ...layers.shell import leased, take
from ...layers.uses import Product
from ...likelihoods import BuiltLikelihood
from .setup import Layers


class _Judged(nn.Module):
    """A likelihood whose call is the log-density, so that its noise can be put in by name."""

    def __init__(self, likelihood: BuiltLikelihood) -> None:
        super().__init__()
        self.likelihood = likelihood

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.likelihood.log_prob(outputs, targets)


class StackedPass:
    """A pass of all replicas over a batch, and the sums of products it gives.

    Gradients at the outputs of layers are those with respect to anchors of 0 that are added there: nothing else
    asks for a gradient.

    Args:
        network: of one of them; weights are put in.
        likelihood: of one of them; noise is put in.
        found: the layers, all plain.
        last: name of the block that learns from the targets, or None.
        modes: modules by name that stay in evaluation mode while training.
    """

    def __init__(
        self,
        network: nn.Module,
        likelihood: BuiltLikelihood,
        found: Layers,
        last: str | None = None,
        modes: Mapping[str, bool] | None = None,
    ) -> None:
        self.modes = modes or {}
        self.network, self.judged, self.blocks, self.last = network, _Judged(likelihood), found.blocks, last
        self.taps = {block.name: found.taps_of(block)[0] for block in found.blocks}
        self.anchors: dict[str, Tensor] = {}
        self._present: tuple[dict[str, Tensor], Mapping[str, Tensor]] = ({}, {})
        self._shell = network
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
        with torch.enable_grad(), self._hooked():
            sums, seen = self._all(tensors, dict(noise), batch.inputs, batch.targets, self.anchors)
            total = sums.sum()
            names = list(self.anchors)
            slopes = dict(
                zip(names, torch.autograd.grad(total, [self.anchors[n] for n in names]), strict=True)
            )
        grams, cases = {}, {}
        with torch.no_grad():
            targets = batch.targets.transpose(0, 1)
            for block in self.blocks:
                own = slopes.get(block.name)
                grams[block.name], cases[block.name] = self._gram(block.name, seen[block.name], own, targets)
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
        seen: dict[str, Tensor] = {}
        self._present = seen, anchors
        take(self._shell, tensors)
        outputs = call(self._shell, inputs)
        with leased(self.judged, {f"likelihood.{name}": value for name, value in noise.items()}) as judged:
            return judged(outputs, targets).sum(), seen

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        def hook(name: str):
            def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
                seen, anchors = self._present
                if name in seen:
                    raise NotImplementedError(f"{name} is called more than once")
                seen[name] = args[0] if args else kwargs["input"]
                return output + anchors[name] if name in anchors else output

            return record

        with leased(self.network, training=self.modes) as self._shell, ExitStack() as hooks:
            for name, tap in self.taps.items():
                module = self._shell.get_submodule(tap.links[0].port.path)
                hooks.enter_context(module.register_forward_hook(hook(name), with_kwargs=True, prepend=True))
            yield

    def _anchor(self, batch: Batch) -> None:
        """Zeros in the shapes of the layers' outputs; a dry run of one row tells them."""
        rows, count = batch.targets.shape[:2]
        known = next(iter(self.anchors.values()), None)
        if known is not None and known.shape[:2] == (count, rows):
            return
        shapes: dict[str, Tensor] = {}

        def hook(name: str):
            def record(_: nn.Module, args: Any, output: Tensor) -> None:
                shapes[name] = output

            return record

        with leased(self.network, training=self.modes) as shell, ExitStack() as hooks, torch.no_grad():
            for name, tap in self.taps.items():
                module = shell.get_submodule(tap.links[0].port.path)
                hooks.enter_context(module.register_forward_hook(hook(name)))
            call(shell, map_tensors(lambda tensor: tensor[:1, 0], batch.inputs))
        self.anchors = {
            name: output.new_zeros(count, rows, *output.shape[1:]).requires_grad_()
            for name, output in shapes.items()
            if name != self.last
        }

    def _gram(
        self, name: str, inputs: Tensor, slopes: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, float]:
        """[X G]ᵀ[X G], or [X Y]ᵀ[X Y] where no gradients are given, as in `products.gram`."""
        tap = self.taps[name]
        use = tap.links[0].use
        assert isinstance(use, Product)
        count, rows = inputs.shape[:2]
        a = use.inputs(inputs.flatten(0, 1))  # [R · B, G, T, n]
        positions = a.shape[2]
        ones = [a.new_ones(*a.shape[:-1], 1)] if tap.bias is not None else []
        own = targets.reshape(count * rows, 1, 1, -1) if slopes is None else slopes.flatten(0, 1)
        last = own if slopes is None else use.outputs(own).mT
        joint = torch.cat([a, *ones, last], -1)
        joint = (
            joint.unflatten(0, (count, rows)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        )  # [R · G, B · T, w]
        sums = torch.bmm(joint.mT, joint)
        if use.order is not None:  # from the order of patches to that of weights
            inner = use.order.argsort().to(sums.device)
            index = torch.cat([inner, torch.arange(len(inner), sums.shape[-1], device=sums.device)])
            sums = sums[:, index][:, :, index]
        return sums, float(rows * positions)
