"""A saved posterior as a file that reads rows in original units and answers in those of the targets."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import export as exporting
from ..loading import load
from ..storage.whole import write_text
from .new_rows import RowReader
from .predict import network_of, saved

#: What outputs mean, and in which units.
MEANINGS = {
    "probs": "probability of each class, in the order of `classes`; of yes or no that of the second",
    "total": "entropy of the prediction, nats",
    "aleatoric": "entropy that more data would not remove, nats",
    "epistemic": "entropy that more data would remove, nats",
    "function_variance": "variance of the logits over draws",
    "mean": "mean, in the target's units",
    "std": "standard deviation of the prediction, in the target's units",
    "aleatoric_std": "standard deviation of the noise, in the target's units",
    "epistemic_std": "standard deviation of the mean, in the target's units",
    "lower": "2.5 % of the prediction lie below, in the target's units",
    "upper": "2.5 % of the prediction lie above, in the target's units",
}


class InUnits(nn.Module):
    """A module behind the scaling of inputs, and before that of targets.

    Args:
        module: from scaled inputs to answers.
        reader: how rows are read.
        scaling: `shift` and `scale` of real targets, where they were scaled beside the likelihood.
        dtype: of the network.
    """

    fill: Tensor | None

    def __init__(
        self, module: nn.Module, reader: RowReader, scaling: Mapping[str, Any] | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype
        inputs = () if reader.scaling is None else reader.scaling
        fill = torch.tensor(reader.fill, dtype=torch.float64) if reader.fill else None
        self.register_buffer("fill", fill)
        self.inputs = nn.ParameterList(t.double() for t in inputs).requires_grad_(False)
        targets = () if scaling is None else (scaling["shift"], scaling["scale"])
        self.targets = nn.ParameterList(torch.tensor(t, dtype=dtype) for t in targets).requires_grad_(False)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        if self.fill is not None:
            inputs = torch.where(inputs.isnan(), self.fill, inputs)
        if len(self.inputs):
            shift, scale = self.inputs
            inputs = ((inputs - shift) / scale).to(self.dtype)
        answers = self.module(inputs)
        if not len(self.targets):
            return answers
        shift, scale = self.targets
        return {name: values * scale + (0 if name.endswith("std") else shift) for name, values in answers.items()}


def export(
    posterior: str | Path,
    path: str | Path,
    *,
    model: str | None = None,
    num_samples: int | None = None,
    seed: int | None = None,
    sampling: Literal["fixed", "fresh"] = "fixed",
    linearised: bool | None = None,
    max_bytes: int = 1 << 29,
) -> Path:
    """Export a posterior that `dubito compare` saved; gives the JSON file beside it, which says what it reads.

    Args:
        posterior: its file, in the folder that `compare` wrote.
        path: ends in .onnx or .pt2.
        model: `package.module:factory`, where the network was one of the user's own.
        num_samples: draws; None takes as many as the comparison did.
        seed: of the draws; None takes the comparison's.
        sampling: as in `Posterior.export`.
        linearised: as in `Posterior.export`.
        max_bytes: as in `Posterior.export`.
    """
    source, target = Path(posterior), exporting.checked_path(path)
    facts, _ = saved(source)
    loaded = load(source, network_of(facts["network"], model, source).build())
    reader = facts["reader"]
    dtype = next(loaded.network.parameters()).dtype
    draws = facts["num_samples"] if num_samples is None else num_samples
    options = {"sampling": sampling, "linearised": linearised, "max_bytes": max_bytes}
    stream = facts["seed"] if seed is None else seed
    rows = exporting.example_rows(loaded, None)
    served = exporting.served(loaded, rows, draws, seed=stream, **options)
    with torch.no_grad():
        names = list(served(rows))
    whole = InUnits(served, reader, facts["target_scaling"], dtype)
    example = rows if reader.scaling is None else reader.scaling.undo(rows.double())
    description = {
        "file": target.name,
        "method": type(loaded.method).__name__,
        "inputs": columns(reader),
        "target": facts["target"],
        "classes": [str(name) for name in facts["class_names"]],
        "outputs": {name: MEANINGS[name] for name in names},
        "sampling": sampling,
        "num_samples": draws,
        "seed": stream,
    }
    exporting.write_module(whole, example, target, max_bytes)
    beside = target.with_suffix(".json")
    write_text(beside, json.dumps(description, indent=1, ensure_ascii=False) + "\n")
    return beside


def columns(reader: RowReader) -> dict[str, Any]:
    """What the graph reads: one number per feature, in this order, and which column and category it stands for."""
    kind = "int64" if reader.scaling is None else "float64"
    units = "numbers of words" if reader.scaling is None else "as in the table, not scaled; NaN where missing"
    if reader.unit:
        units = "from 0 to 1"
    features = []
    for column in reader.columns:
        last = ["(other)"] * column.other + ["(missing)"] * column.flagged
        numbers = [None] * (len(column.features) - len(last))
        levels = [*(column.levels if column.kind == "category" else numbers), *last]
        known = {"column": column.name, "kind": column.kind}
        features += [
            {"name": name, **known, "category": level} for name, level in zip(column.features, levels, strict=True)
        ]
    return {"name": "inputs", "dtype": kind, "shape": ["rows", *reader.shape], "units": units, "features": features}
