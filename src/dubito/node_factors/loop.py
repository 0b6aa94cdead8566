"""Passes over a batch made one by one, each one's gradient taken before the next: one is in memory at a time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..devices import on_host
from ..inputs import Batch, rows_of, weighted
from ..layers.factors import Factors, NodeFactors
from ..layers.passes import asked

if TYPE_CHECKING:
    from .objective import Drawn, NodeObjective


def one_pass(objective: "NodeObjective", index: int, batch: Batch, drawn: "Drawn") -> Tensor:
    """Outputs of one pass, [n, ...]."""
    draft, chosen = objective.draft, slice(index, index + 1)
    weights, shared = objective.weights(drawn), draft.shared
    per_row: dict[str, NodeFactors] = {}
    biases = objective.biases(chosen, drawn)
    tensors = weights | {name: values[0] for name, values in biases.items() if values.ndim == 2}
    for name in draft.uses:
        factors = objective.factors(name, chosen, drawn)
        if name in shared:
            tensors[name] = draft.folded(name, weights[name], factors)
        else:
            per_row[name] = factors
    # Biases that rows share are tensors like others; those of each row's own are for the context.
    row_biases = {name: values for name, values in biases.items() if values.ndim > 2}
    context = Factors(
        per_row, row_biases, passes=1, rows=rows_of(batch.inputs), additive=draft.method.additive, patches=drawn.patches
    )
    lease = asked(draft.network, context, context.names, tensors, training=objective.modes)
    return lease.outputs(batch.inputs)


def accumulated(objective: "NodeObjective", batch: Batch, drawn: "Drawn", checked: bool) -> Tensor:
    """Negative log-likelihood, mean over passes and rows, with the gradient of each pass taken by itself."""
    roots = [*drawn.stds.values(), *drawn.beside.values()]
    leaves = [tensor.detach().requires_grad_() for tensor in roots]
    stds = dict(zip(drawn.stds, leaves, strict=False))
    beside = dict(zip(drawn.beside, leaves[len(stds) :], strict=True))
    apart = replace(drawn, stds=stds, beside=beside)
    learned: list[Tensor] = []
    parts: list[Tensor] = []
    sums: list[Tensor | None] = []
    for index in range(objective.passes):
        outputs = objective.one_pass(index, batch, apart)
        log_prob = weighted(*objective.log_prob(outputs, batch, index, checked))
        if not parts:  # not before: a likelihood may take its shape from the first outputs
            learned = [p for p in objective.draft.parameters() if p.requires_grad]
            sums = [None] * (len(learned) + len(leaves))
        part = -log_prob.mean() / objective.passes
        sums = gradients(part, [*learned, *leaves], sums)
        parts.append(part.detach())
    nll = Collected.apply(torch.stack(parts).sum(), sums, *learned, *roots)
    assert isinstance(nll, Tensor)
    return nll


def gradients(value: Tensor, tensors: Sequence[Tensor], so_far: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of a value, added to those so far; its graph is freed."""
    with torch.autocast(value.device.type, enabled=False):
        new = torch.autograd.grad(value, tensors, allow_unused=True)
    return [_added(old, gradient) for old, gradient in zip(so_far, new, strict=True)]


def _added(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    if old is None or new is None:
        return new if old is None else old
    return old + new  # not in place: autograd may hand the same tensor to several places


class Collected(Function):
    """A value whose gradients with respect to some tensors are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, known: Sequence[Tensor | None], *tensors: Tensor) -> Tensor:
        ctx.known = known
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (g,) = grads
        # As in `loss.backward()`: nothing to multiply. On a device a product costs less than the answer.
        unit = on_host(g) and bool(g == 1)
        return None, None, *(known if known is None or unit else known * g for known in ctx.known)


def half_precision() -> bool:
    """Whether gradients need the scaling that only the whole loss gets."""
    kinds = ("cpu", "cuda", "mps")
    return any(torch.is_autocast_enabled(k) and torch.get_autocast_dtype(k) is torch.float16 for k in kinds)


def free_bytes(device: torch.device) -> float:
    """Memory an accelerator has left; endless where it does not tell."""
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        return float(module.mem_get_info(device)[0])
    if hasattr(module, "recommended_max_memory"):
        return float(module.recommended_max_memory() - module.current_allocated_memory())
    return float("inf")
