"""What a network answers to fixed inputs, by which a file knows it again.

Names and shapes of parameters do not tell an activation from another, nor the order of layers. A fit keeps the form of
its inputs: shapes, dtypes, least and largest numbers, none of the rows themselves. From it the same inputs are made
whenever they are needed, without any generator, and the answers of the centre to them are stored with a posterior.
"""

from collections.abc import Mapping
from math import isfinite, prod
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from ..errors import StorageError
from ..inputs import Inputs, TensorOptions
from ..layers.shell import noise_of, seeded
from ..networks import run
from ..storage.schema import Size, conform

#: Rows of the inputs, numbers of the answer to each that are stored, and the most numbers a row may have.
ROWS, NUMBERS, LARGEST = 3, 64, 1 << 24
#: How far answers may be from the stored ones, over the largest of them: on the same kind of device, and on another
#: (whose products may be rounded to ten bits).
TOLERANCES = {torch.float64: (1e-7, 1e-4), torch.float32: (1e-3, 2e-2)}
#: Of half precision.
COARSE = (0.1, 0.1)
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
}


class Fingerprint(TypedDict):
    """What is stored: the first numbers of the answer to each row, and the kind of device that gave them."""

    outputs: list[list[float]]
    device: str


class TensorForm(TypedDict):
    """A tensor of the inputs: the shape of a row, "float" or another dtype by name, and the range of its numbers."""

    shape: list[Size]
    dtype: str
    low: float
    high: float


def described(inputs: Inputs) -> Any:
    """The form of inputs as plain values, from which `made` makes others; None where it cannot be told in them."""
    try:
        return _described(inputs)
    except (TypeError, OverflowError):
        return None


def _described(inputs: Inputs) -> Any:
    if isinstance(inputs, Tensor):
        dtype = "float" if inputs.is_floating_point() else str(inputs.dtype).removeprefix("torch.")
        low, high = (float(value) for value in torch.stack(inputs.detach().aminmax()).tolist())
        known = dtype == "float" or dtype in DTYPES
        if not known or not isfinite(high - low) or prod(inputs.shape[1:]) > LARGEST or not inputs[0].numel():
            raise TypeError("no inputs that can be made anew")
        return {"tensor": {"shape": list(inputs.shape[1:]), "dtype": dtype, "low": low, "high": high}}
    if isinstance(inputs, Mapping):
        if not all(isinstance(key, str) for key in inputs):
            raise TypeError("keys that JSON does not have")
        return {"mapping": {key: _described(value) for key, value in inputs.items()}}
    if isinstance(inputs, tuple | list):
        return [_described(value) for value in inputs]
    if inputs is None or isinstance(inputs, bool | int | float | str):
        return {"plain": inputs}
    raise TypeError("no plain value")


def made(form: Any, like: TensorOptions, rows: int = ROWS) -> Inputs:
    """Inputs of a form: the same ones wherever and whenever they are made.

    Args:
        form: what `described` gave.
        like: of the network that is to read them.
        rows: how many.
    """
    if isinstance(form, list):
        return tuple(made(part, like, rows) for part in form)
    conform(form, dict[str, Any], "the form of the inputs")
    if "mapping" in form:
        conform(form["mapping"], dict[str, Any], "the form of the inputs")
        return {key: made(part, like, rows) for key, part in form["mapping"].items()}
    if "plain" in form:
        return form["plain"]
    conform(form.get("tensor"), TensorForm, "the form of an input")
    values = form["tensor"]
    numbers = prod(values["shape"])
    if numbers > LARGEST or not (values["dtype"] == "float" or values["dtype"] in DTYPES):
        raise StorageError(f"the form of an input must be smaller, or of another dtype, got {values}")
    # Multiples of the golden ratio, less their whole parts, fill a range evenly on every machine.
    filling = (torch.arange(1, rows * numbers + 1, dtype=torch.float64) * 0.6180339887498949) % 1
    low, high = values["low"], values["high"]
    tensor = (low + (high - low) * filling).reshape(rows, *values["shape"])
    if values["dtype"] == "float":
        return tensor.to(like.dtype).to(like.device)
    return tensor.round().clamp(low, high).to(DTYPES[values["dtype"]]).to(like.device)


def fingerprint(network: nn.Module, form: Any) -> tuple[Fingerprint, Tensor] | None:
    """What the network in evaluation mode answers to inputs of a form; None where that tells nothing.

    It tells nothing where the network cannot read them, answers with what is no number, or draws noise of its own.
    """
    like = TensorOptions.of(network)
    try:
        inputs = made(form, like)
        with torch.inference_mode(False), torch.no_grad(), seeded(network, 0, "fingerprint"):
            outputs = run(network, {}, inputs)
    except StorageError:
        raise
    except Exception:  # the network's own code, and inputs it was not made for
        return None
    if noise_of(network) or outputs.ndim < 1 or len(outputs) != ROWS or not outputs.isfinite().all():
        return None
    values = outputs.detach().reshape(ROWS, -1)[:, :NUMBERS].double().cpu()
    return {"outputs": values.tolist(), "device": like.device.type}, outputs


def check_fingerprint(stored: Fingerprint, network: nn.Module, form: Any, path: Any) -> Tensor:
    """The network's answers to inputs of a form; refused where they are not the stored ones."""
    conform(stored, Fingerprint, "the fingerprint")
    answered = fingerprint(network, form)
    remedy = (
        "its parameters have the same names and shapes, but its forward differs, as with another activation or order "
        "of layers; give the network that was fitted, or, if only rounding differs, dubito.load(..., fingerprint=False)"
    )
    if answered is None:
        raise StorageError(f"{path} is of another network: this one cannot answer the fixed inputs; {remedy}")
    now, outputs = answered
    was_values, now_values = stored["outputs"], now["outputs"]
    if [len(row) for row in was_values] != [len(row) for row in now_values]:
        raise StorageError(f"{path} is of another network: it answers with other shapes; {remedy}")
    was, is_now = torch.tensor(was_values, dtype=torch.float64), torch.tensor(now_values, dtype=torch.float64)
    tolerance = TOLERANCES.get(outputs.dtype, COARSE)[stored["device"] != now["device"]]
    if was.numel() and (was - is_now).abs().max() > tolerance * max(float(was.abs().max()), 1e-6):
        raise StorageError(
            f"{path} is of another network: to fixed inputs it answered {was.flatten()[0]:.4g}, this one answers "
            f"{is_now.flatten()[0]:.4g}; {remedy}"
        )
    return outputs
