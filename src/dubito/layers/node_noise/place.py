"""While a context is open, layers answer with node factors on their inputs and outputs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..sites import Site
from ..trace import Layout, Visit, unnested
from .first import Patches, first_convolution, is_first
from .functions import Folded
from .recurrent import cell_forward, recurrent_forward
from .values import Factor, Sides

#: Layers whose forward pass is known; a subclass with one of its own may do anything with its weight.
KNOWN = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
    nn.LSTM,
    nn.GRU,
    nn.RNN,
    nn.LSTMCell,
    nn.GRUCell,
    nn.RNNCell,
)


def by_row(site: Site, network: nn.Module, visits: Mapping[str, Visit], *, additive: bool = False) -> bool:
    """Whether every row can have its own factors there; else the rows of a pass share one draw."""
    modules = [network.get_submodule(name) for name in site.modules]
    for name, module in zip(site.modules, modules, strict=True):
        known = any(type(module).forward is kind.forward for kind in KNOWN)
        if name not in visits or not known or (additive and not isinstance(module, nn.Linear)):
            return False
        layout = visits[name].layout
        if isinstance(module, nn.RNNBase):
            alone = all(other is module for other in modules) and not module.proj_size
            if not alone or layout is not (Layout.ROWS if module.batch_first else Layout.SECOND):
                return False
        elif isinstance(module, nn.RNNCellBase):
            if layout is not Layout.ROWS or any(other is not module for other in modules):
                return False
        elif not site.hooked or layout not in (Layout.ROWS, Layout.FLAT):
            return False
    return True


@contextmanager
def factors_on(
    network: nn.Module,
    factors: Mapping[Site, Sides],
    biases: Mapping[str, Tensor],
    *,
    passes: int,
    rows: int,
    additive: bool = False,
    patches: Patches | None = None,
) -> Iterator[None]:
    """While open, layers answer (W (x ∘ s)) ∘ r + b with the factors and biases of P passes.

    Rows stand pass by pass, [P·n, ...]. Inputs of n rows are repeated by the first layers they meet.

    Args:
        network: whose forward pass changes.
        factors: on the sides of each weight.
        biases: [P, C] by parameter name, or [P, n, C]; others are the network's own, for all passes.
        passes: P.
        rows: n.
        additive: answer W x + r (sᵀ x) + b instead; for dense layers.
        patches: kept from one pass over a batch to the next, by convolutions that read the inputs.
    """
    patches = {} if patches is None else patches
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    compiled = network._compiled_call_impl is not None
    # Attention blocks read the weights of their layers directly in evaluation mode, unless one has a hook.
    guarded = not network.training
    found: dict[int, tuple[nn.Module, dict[str, tuple[Site, Sides]]]] = {}
    for site, sides in factors.items():
        for name in site.modules:
            module = network.get_submodule(name)
            own = next(key for key, p in module._parameters.items() if names.get(id(p)) == site.parameter)
            found.setdefault(id(module), (module, {}))[1][own] = site, sides
    changed: list[nn.Module] = []
    handles = []
    try:
        for module, weights in found.values():
            own = {
                key: _bias(bias, biases.get(names.get(id(bias), "")))
                for key in _bias_names(module)
                if (bias := getattr(module, key, None)) is not None
            }
            forward = _forward(module, weights, own, rows, passes, additive, patches)
            # Generators cannot be traced: what is compiled stops at these layers and goes on after them.
            vars(module)["forward"] = torch.compiler.disable(forward) if compiled else forward
            changed.append(module)
            if guarded:
                handles.append(module.register_forward_pre_hook(_heed))
        with unnested(network) if guarded else nullcontext():
            yield
    finally:
        for module in changed:
            del vars(module)["forward"]
        for handle in handles:
            handle.remove()


def _forward(
    module: nn.Module,
    weights: dict[str, tuple[Site, Sides]],
    biases: dict[str, Tensor],
    rows: int,
    passes: int,
    additive: bool,
    patches: Patches,
) -> Callable[..., Any]:
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        own = {name: sides for name, (_, sides) in weights.items()}
        make = recurrent_forward if isinstance(module, nn.RNNBase) else cell_forward
        return make(module, own, biases, rows, passes)  # pyright: ignore[reportArgumentType]
    site, sides = weights["weight"]
    if isinstance(module, nn.Embedding):
        return _embedding_forward(module, sides, rows)
    if additive:
        assert isinstance(module, nn.Linear)
        return _additive_forward(module, sides, biases.get("bias"), rows, passes)
    return _layer_forward(module, site, sides, biases.get("bias"), rows, passes, patches)


def _layer_forward(
    module: nn.Module,
    site: Site,
    sides: Sides,
    bias: Tensor | None,
    rows: int,
    passes: int,
    patches: Patches,
) -> Callable[..., Tensor]:
    """Dense layers and convolutions."""
    plain = type(module).forward

    def forward(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight = module.weight
        assert isinstance(weight, Tensor)
        if passes == 1 and not sides.per_row and _folding_is_cheaper(module, input, weight):
            folded = fold(site, weight, sides)
            return plain(With(module, folded, None if bias is None else bias[0]), input, *args, **kwargs)
        inputs, outputs = sides
        one = bias is not None and len(bias) == 1 and bias.ndim == 2
        inner = bias[0] if bias is not None and one and outputs is None else None
        if inputs is not None and inputs.per_row and passes == 1 and is_first(module, input, weight):
            y = first_convolution(module, input, inputs.tensor()[0], weight, inner, patches)
        else:
            x = input if inputs is None else inputs.on(input, rows, site.channel_axis)
            y = plain(With(module, weight, inner), x, *args, **kwargs)
        if outputs is None and inner is None and bias is not None:
            outputs = Factor(bias.new_ones(len(bias), bias.shape[-1]))
        return y if outputs is None else outputs.on(y, rows, site.channel_axis, bias)

    return forward


def _additive_forward(
    module: nn.Linear, sides: Sides, bias: Tensor | None, rows: int, passes: int
) -> Callable[[Tensor], Tensor]:
    """(W + r sᵀ) x + b = W x + r (sᵀ x) + b."""

    def forward(input: Tensor) -> Tensor:
        inputs, outputs = sides
        assert inputs is not None and outputs is not None
        along = inputs.on(input, rows, -1).sum(-1, keepdim=True)  # sᵀ x, [P·n, ..., 1]
        wide = along.expand(*along.shape[:-1], outputs.mean.shape[-1])
        change = outputs.on(wide, rows, -1, bias)
        plain = nn.functional.linear(input, module.weight)
        return change + (
            plain if len(plain) == len(change) else plain.repeat(passes, *[1] * (plain.ndim - 1))
        )

    return forward


def _embedding_forward(module: nn.Embedding, sides: Sides, rows: int) -> Callable[..., Tensor]:
    """A token's vector times the token's factor, its coordinates times theirs."""

    def forward(input: Tensor) -> Tensor:
        vectors = nn.Embedding.forward(module, input)
        inputs, outputs = sides
        if inputs is not None:
            passes = len(inputs.mean)
            tokens = input.reshape(1 if len(input) == rows else passes, rows, -1)
            scale = inputs.gathered(tokens).unsqueeze(-1)
            blocks = vectors.reshape(*tokens.shape, -1) * scale.to(vectors.dtype)
            vectors = blocks.reshape(len(input) * passes // len(tokens), *vectors.shape[1:])
        return vectors if outputs is None else outputs.on(vectors, rows, -1)

    return forward


def fold(site: Site, weight: Tensor, sides: Sides, *, additive: bool = False) -> Tensor:
    """W ∘ r sᵀ, or W + r sᵀ, of a single pass whose rows share their factors."""
    values = [None if side is None else side.tensor()[0, 0] for side in sides]
    if additive:
        assert values[0] is not None and values[1] is not None
        return site.add(weight, values[0], values[1])
    if values[0] is None or values[1] is None:
        return site.fold(weight, *values)
    inputs, outputs = values[0].reshape(site.factor_view), values[1].reshape(site.output_view)
    own = weight.reshape(site.view)
    learned = torch.is_grad_enabled() and any(t.requires_grad for t in (own, inputs, outputs))
    folded = Folded.apply(own, inputs, outputs) if learned else (own * inputs).mul_(outputs)
    assert isinstance(folded, Tensor)
    return folded.reshape(weight.shape)


def _folding_is_cheaper(module: nn.Module, input: Tensor, weight: Tensor) -> bool:
    """Whether a weight has fewer numbers than the activations on both sides of it.

    Kernels always have; and the gradient for inputs that need none is saved.
    """
    if isinstance(module, _ConvNd):
        return True
    return input.numel() * (1 + weight.shape[0] / weight.shape[1]) > weight.numel()


class With:
    """A layer as it is, but for its weight and bias, for the forward pass of its class."""

    def __init__(self, module: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
        self.module, self.weight, self.bias = module, weight, bias

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _bias_names(module: nn.Module) -> list[str]:
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return [name for name in (*module._parameters, *module._buffers) if name.startswith("bias_")]
    return ["bias"]


def _bias(own: Tensor, replaced: Tensor | None) -> Tensor:
    return own.unsqueeze(0) if replaced is None else replaced


def _heed(*_: object) -> None:
    """A hook that does nothing."""
