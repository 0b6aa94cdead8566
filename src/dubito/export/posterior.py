"""What a file answers with, and how its module is traced."""

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..draws import MixtureModule, PredictiveModule
from ..errors import ConfigError, NetworkError, require_count
from ..inputs import Inputs, TensorOptions, checked_inputs, map_tensors, named_tensors, rows_of, take
from ..lazy import rich_console
from ..posterior import MixturePosterior, Posterior
from ..posterior.fingerprint import made
from .files import WRITERS, quiet, write
from .fresh import FreshModule

#: Rows of a trace: no size that networks often have, since tracers take equal sizes for the same.
ROWS = 13
#: Groups of draws that hold weights written out.
WHOLE = ("draws", "deviations", "statistics")


def export(
    posterior: Posterior,
    path: str | os.PathLike[str],
    *,
    num_samples: int = 32,
    seed: int = 0,
    sampling: Literal["fixed", "fresh"] = "fixed",
    linearised: bool | None = None,
    example: Inputs = None,
    max_bytes: int = 1 << 29,
) -> None:
    """Write a posterior's predictions to a file; the arguments are those of `Posterior.export`."""
    require_count(num_samples=num_samples, max_bytes=max_bytes)
    checked_path(path)
    inputs = example_rows(posterior, example)
    options = {"seed": seed, "linearised": linearised, "sampling": sampling, "max_bytes": max_bytes}
    write_module(served(posterior, inputs, num_samples, **options), inputs, path, max_bytes)


def write_module(module: nn.Module, inputs: Inputs, path: str | os.PathLike[str], max_bytes: int = 1 << 29) -> None:
    """Trace a module from inputs to a dict of tensors for any number of rows, and write it to a file.

    Args:
        module: as `PredictiveModule` is called.
        inputs: rows that it reads.
        path: ends in .onnx or .pt2.
        max_bytes: the largest file.
    """
    target = checked_path(path)
    rows = map_tensors(lambda tensor: tensor.detach(), take(inputs, torch.arange(ROWS) % rows_of(inputs)))
    args, named = ((), dict(rows)) if isinstance(rows, Mapping) else ((rows,), {})
    shapes: Any = torch.export.ShapesCollection()
    for _, tensor in named_tensors(rows):
        shapes[tensor] = {0: torch.export.Dim.DYNAMIC}
    with torch.inference_mode(False), torch.no_grad(), quiet():
        try:
            traced = with_names(module, list(named)) if named else module
            program = torch.export.export(traced, args, named, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            raise NetworkError(
                "the network cannot be traced for any number of rows: "
                f"{reason(error)}; rewrite that part without numbers that decide, or without the number of rows"
            ) from error
        write(
            program,
            module,
            rows,
            target,
            max_bytes,
            exact=not any(isinstance(part, FreshModule) for part in module.modules()),
        )


def with_names(module: nn.Module, names: list[str]) -> nn.Module:
    """A module whose arguments are spelled out, as tracers ask, in place of any by name."""

    def forward(**named: Any) -> Any:
        return module(**named)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # pyright: ignore
    spelled = nn.Module()
    spelled.module = module
    spelled.forward = forward
    return spelled


def served(
    posterior: Posterior,
    inputs: Inputs,
    num_samples: int,
    *,
    seed: int,
    sampling: str,
    linearised: bool | None,
    max_bytes: int,
) -> nn.Module:
    """The module that answers as `predict` does with these options."""
    if sampling not in ("fixed", "fresh"):
        raise ConfigError(f'sampling must be "fixed" or "fresh", got {sampling!r}')
    if isinstance(posterior, MixturePosterior):
        share = -(-num_samples // len(posterior.components))
        options: Any = {"sampling": sampling, "linearised": linearised}
        options["max_bytes"] = max_bytes // len(posterior.components)
        parts = [served(part, inputs, share, seed=s, **options) for part, s in posterior.seeded(seed)]
        return MixtureModule(parts, posterior.component_weights)
    pushes = posterior._linearises(linearised)
    closed = posterior.closed_form(inputs, num_samples, seed) if pushes else None
    if sampling == "fresh":
        if closed is not None or posterior.num_atoms is not None:
            what = "a prediction in closed form" if closed is not None else f"{posterior.num_atoms} fixed draws"
            raise ConfigError(
                f'sampling="fresh" needs a distribution to draw from, got {what}; leave sampling out'
                + (", or pass linearised=False" if closed is not None else "")
            )
        return FreshModule(posterior, components_times(posterior, num_samples), inputs, linearised=pushes)
    if closed is not None:
        return closed
    count = posterior.num_atoms or components_times(posterior, num_samples)
    few = posterior._made(range(min(2, count)), seed, pushes)  # the first of several may be the network itself
    groups = [few.tensors[key] for key in WHOLE if key in few.tensors]
    if groups:
        told(count, sum(tensor[0].nbytes for group in groups for tensor in group.values()), max_bytes)
    fixed = posterior.sampled(num_samples, seed=seed, linearised=linearised)
    return PredictiveModule(fixed.together, fixed.likelihood, inputs)


def components_times(posterior: Posterior, num_samples: int) -> int:
    """Draws, rounded up to a multiple of the components, as in `predict`."""
    return -(-num_samples // posterior.num_components) * posterior.num_components


def told(count: int, size: int, max_bytes: int) -> None:
    """Say how large draws of weights are that must be written out; refuse what is too large."""
    if count * size > max_bytes:
        raise ConfigError(
            f"{count} draws of weights take {count * size:,} bytes, more than max_bytes={max_bytes:,}; raise it, lower "
            'num_samples, or let the graph draw: sampling="fresh"'
        )
    if count > 1:
        rich_console()(stderr=True).print(f"{count} draws of weights: {count * size:,} bytes", highlight=False)


def example_rows(posterior: Posterior, example: Inputs) -> Inputs:
    """Rows that the posterior's network reads: given ones, or noise in the form of the fit's."""
    options = TensorOptions.of(posterior.network)
    if example is not None:
        return checked_inputs(example, options)
    if posterior.details.get("inputs") is None:
        raise ConfigError(
            "this posterior does not tell what its network reads (a file of an earlier version, or a training loop of "
            "your own): pass some rows, export(..., example=x)"
        )
    return made(posterior.details["inputs"], options, ROWS)


def checked_path(path: str | os.PathLike[str]) -> Path:
    """The path of a file that can be written."""
    target = Path(path)
    if target.suffix not in WRITERS:
        raise ConfigError(f"exported files end in {' or '.join(WRITERS)}, got {target}")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent} must be a folder to write to, but there is none")
    return target


def reason(error: BaseException) -> str:
    """What a tracer says in its first words."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
