"""What every metric asks of its inputs, found before work starts."""

import torch
from torch import Tensor

from dubito.errors import DataError
from dubito.hints import require_dense


def real(name: str, value: Tensor) -> Tensor:
    """`value` detached, in float32 or wider, of whole numbers in float64; refused where empty, NaN or not real."""
    if not isinstance(value, Tensor):
        raise DataError(f"{name} must be a tensor, got {type(value).__name__}; use torch.as_tensor({name})")
    require_dense(name, value)
    if value.numel() == 0:
        raise DataError(f"{name} must hold at least one value, got shape {list(value.shape)}")
    if value.isnan().any():
        raise DataError(f"{name} must not hold NaN, got {int(value.isnan().sum())} of {value.numel()} values NaN")
    # Half precision would round sums over a test set, so it is only a way to store.
    if not value.is_floating_point() and value.device.type != "mps":
        return value.detach().double()
    return value.detach().to(torch.promote_types(value.dtype, torch.float32))


def finite(name: str, value: Tensor) -> Tensor:
    """`value` as in `real`, refused also where infinite."""
    checked = real(name, value)
    if checked.isinf().any():
        raise DataError(f"{name} must be finite, got {int(checked.isinf().sum())} infinite values")
    return checked


def same_shape(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Refuse two tensors of different shapes: broadcasting [B] with [B, 1] would compare every pair."""
    if value.shape != other.shape:
        raise DataError(
            f"{name} and {other_name} must have one shape, got {list(value.shape)} and {list(other.shape)}; "
            "reshape one to the other"
        )


def probabilities(probs: Tensor) -> Tensor:
    """Class probabilities [B, C]; a vector [B] is read as the probability of class 1 of two classes."""
    checked = real("probs", probs)
    if checked.ndim == 1:
        if checked.min() < 0 or checked.max() > 1:
            raise DataError(
                f"probs of shape [B] must be probabilities of class 1, in [0, 1], got values from "
                f"{float(checked.min()):.6g} to {float(checked.max()):.6g}; apply sigmoid to logits first"
            )
        return torch.stack((1 - checked, checked), dim=-1)  # [B] -> [B, 2]
    if checked.ndim != 2 or checked.shape[1] < 2:
        raise DataError(
            f"probs must have shape [B, C] with C of at least 2, or [B] for class 1 of two, "
            f"got {list(probs.shape)}; flatten further axes, or drop a single column"
        )
    off = (checked.sum(1) - 1).abs().max()
    # A row rounded to bfloat16 misses 1 by up to 0.4 %; logits, which this is to catch, miss it by far more.
    if checked.min() < 0 or off > 0.01:
        raise DataError(
            f"each row of probs must be at least 0 and sum to 1, got a least value of "
            f"{float(checked.min()):.6g} and a sum off by {float(off):.3g}; apply softmax to logits first"
        )
    return checked


def labels(targets: Tensor, num_examples: int, num_classes: int, device: torch.device) -> Tensor:
    """Class labels [B] as int64 on `device`; refused where no whole numbers from 0 to C - 1."""
    if not isinstance(targets, Tensor):
        raise DataError(f"targets must be a tensor, got {type(targets).__name__}; use torch.as_tensor(targets)")
    require_dense("targets", targets)
    if targets.is_floating_point():
        raise DataError(
            f"targets must be whole-number class labels, got {targets.dtype}; use targets.long() if they are labels"
        )
    if targets.shape != (num_examples,):
        raise DataError(
            f"targets must have shape [{num_examples}], one label for each row of probs, got "
            f"{list(targets.shape)}; use targets.argmax(-1) if they are one-hot"
        )
    targets = targets.detach().to(device=device, dtype=torch.int64)
    if targets.min() < 0 or targets.max() >= num_classes:
        raise DataError(
            f"targets must be labels from 0 to {num_classes - 1} (the classes of probs), got labels from "
            f"{int(targets.min())} to {int(targets.max())}"
        )
    return targets


def classes(probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Checked probabilities [B, C] and labels [B]."""
    checked = probabilities(probs)
    return checked, labels(targets, checked.shape[0], checked.shape[1], checked.device)


def flags(name: str, value: Tensor, like_name: str, like: Tensor) -> Tensor:
    """Yes or no for each entry of `like`, as bool on its device, from booleans or whole numbers 0 and 1."""
    if not isinstance(value, Tensor):
        raise DataError(f"{name} must be a tensor, got {type(value).__name__}; use torch.as_tensor({name})")
    require_dense(name, value)
    if value.is_floating_point():
        raise DataError(f"{name} must be booleans or whole numbers 0 and 1, got {value.dtype}")
    same_shape(name, value, like_name, like)
    if value.dtype != torch.bool and (value.min() < 0 or value.max() > 1):
        raise DataError(
            f"{name} must hold only 0 and 1, got values from {int(value.min())} to {int(value.max())}; "
            f"compare with the label meant, as in {name} == label"
        )
    return value.detach().to(device=like.device, dtype=torch.bool)


def vector(name: str, value: Tensor) -> Tensor:
    """`value` as in `real`, refused where it is not of shape [B]."""
    checked = real(name, value)
    if checked.ndim != 1:
        raise DataError(f"{name} must have shape [B], got {list(checked.shape)}; flatten it")
    return checked
