"""Attention as four products around PyTorch's own attention: `F.multi_head_attention_forward`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .context import Context
from .kinds import Declared, NoRule, Standin, chunks, declares, kind, plain
from .linear import dense, product


@kind(F.multi_head_attention_forward)
def multi_head_attention_forward(
    at: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Of nn.MultiheadAttention, which hands it [T, N, features]: cases stand first in every product."""
    if query.ndim != 3:
        raise NoRule("its inputs have no axis of cases")
    if isinstance(bias_k, Standin) or isinstance(bias_v, Standin):
        at.without_rule(F.multi_head_attention_forward, [b for b in (bias_k, bias_v) if isinstance(b, Standin)], None)
    if options.pop("use_separate_proj_weight", False):
        weights = [options[f"{name}_proj_weight"] for name in "qkv"]
    else:
        assert in_proj_weight is not None
        weights = chunks(in_proj_weight, 3)
    options = {name: setting for name, setting in options.items() if not name.endswith("_proj_weight")}
    wanted = options.pop("need_weights", True)
    # Fused attention has no forward-mode derivatives, and gives no weights.
    options["need_weights"] = wanted or torch._C._are_functorch_transforms_active()
    inputs = zip((query, key, value), weights, chunks(in_proj_bias, 3), strict=True)
    projected = [product(at, x.transpose(0, 1), weight, bias).transpose(0, 1) for x, weight, bias in inputs]
    # PyTorch does the rest, with projections that change nothing: a product with the identity is exact.
    identity = torch.eye(embed_dim_to_check, dtype=projected[0].dtype, device=query.device)
    attended, attention = F.multi_head_attention_forward(
        projected[0],
        projected[1],
        projected[2],
        embed_dim_to_check,
        num_heads,
        None,
        None,
        plain(bias_k),
        plain(bias_v),
        add_zero_attn,
        dropout_p,
        identity,
        None,
        **options,
        use_separate_proj_weight=True,
        q_proj_weight=identity,
        k_proj_weight=identity,
        v_proj_weight=identity,
    )
    outputs = product(at, attended.transpose(0, 1), out_proj_weight, out_proj_bias)
    return outputs.transpose(0, 1), attention if wanted else None


@declares(nn.MultiheadAttention)
def attention_module(module: nn.MultiheadAttention) -> Iterator[Declared]:
    """Three projections in one weight, or apart; the fourth is a dense layer of its own."""
    function = F.multi_head_attention_forward.__name__
    if module.in_proj_weight is not None:
        size = module.embed_dim
        yield Declared("in_proj_weight", "in_proj_bias", dense(size, size), function, 3)
        return
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        yield Declared(name, "in_proj_bias", dense(*module._parameters[name].shape), function)  # pyright: ignore
