"""A saved posterior applied to new rows: what it says, how sure it is, and which rows are unlike training."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor

from ..data.frames import form_of, written
from ..errors import ConfigError, DataError, StorageError, unknown_name
from ..loading import load
from ..prediction import BernoulliPrediction, CategoricalPrediction, CountPrediction, Prediction, RealPrediction
from ..storage.schema import Positive, Within, conform
from .evidence import unlike
from .evidence_real import target_names
from .folder import Folder
from .network import Network
from .new_rows import RowReader


class TargetScaling(TypedDict):
    """From standardised targets to original units."""

    shift: list[float]
    scale: list[Positive]


class TaskFacts(TypedDict):
    """What a prediction reads of `task.json`."""

    target: str
    class_names: list[str]
    network: dict[str, Any]
    reader: dict[str, Any]
    target_scaling: TargetScaling | None
    num_samples: Annotated[int, Within(1, 2**20)]
    seed: int


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What a posterior says of new rows.

    Attributes:
        columns: by name, one value per row.
        differences: what the rows have otherwise than those trained on, in words.
        num_unlike: rows whose epistemic uncertainty, of classes by either score, is above what 99 % of the validation
            rows had.
        note: why no row can be unlike training, else None.
    """

    columns: dict[str, list[Any]]
    differences: tuple[str, ...]
    num_unlike: int
    note: str | None = None


def predict(
    posterior: str | Path,
    rows: str | Path,
    *,
    model: str | None = None,
    level: float = 0.95,
    num_samples: int | None = None,
    seed: int | None = None,
    keep: Sequence[str] = (),
) -> Predictions:
    """Predict for new rows with a posterior that `dubito compare` saved.

    Args:
        posterior: its file, in the folder that `compare` wrote.
        rows: a table's file, or an .npz file, with the columns of training.
        model: `package.module:factory`, where the network was one of the user's own.
        level: of intervals and sets.
        num_samples: draws; None takes as many as the comparison did.
        seed: of the draws; None takes the comparison's.
        keep: columns of the rows that stand first among the predictions', such as a key; ("all",) for all of them.
    """
    path = Path(posterior)
    facts, limits = saved(path)
    network, reader = network_of(facts["network"], model, path), facts["reader"]
    inputs, differences = reader.read(rows)
    _check_words(inputs, network, rows)
    loaded = load(path, network.build())
    prediction: Any = loaded.predict(
        inputs,
        num_samples=facts["num_samples"] if num_samples is None else num_samples,
        seed=facts["seed"] if seed is None else seed,
    )
    if facts["target_scaling"] is not None:
        # In double precision, where a large mean leaves room for a small spread.
        prediction = prediction.to(torch.float64).rescaled(*facts["target_scaling"].values())
    columns = columns_of(prediction, facts["class_names"], level, facts["target"])
    flags, note = unlike(prediction, limits).tolist(), None
    if not any(limits.values()):
        note = f"{path.stem} holds no epistemic uncertainty, so no row can be flagged as unlike training"
    columns["unlike_training"] = flags
    if keep:
        columns = {**kept_columns(Path(rows), keep, columns), **columns}
    return Predictions(columns=columns, differences=tuple(differences), num_unlike=sum(flags), note=note)


def kept_columns(path: Path, names: Sequence[str], taken: Collection[str]) -> dict[str, list[Any]]:
    """Columns of new rows as they stand in their file: of a text words, else numbers, booleans or words."""
    if form_of(path) == "npz":
        raise ConfigError(f"columns can be copied from tables, but {path} is an archive; leave --keep out")
    table = written(path)
    if tuple(names) == ("all",) and "all" not in table.columns:
        names = list(table.columns)
    for name in names:
        if name not in table.columns:
            raise unknown_name(f"column of {path}:", name, table.columns)
        if name in taken:
            raise ConfigError(
                f"column {name!r} of {path} is called as one of the predictions'; rename it, or leave it out"
            )
    plain = {name: table[name] if table[name].dtype.kind in "iufb" else table[name].astype(str) for name in names}
    return {
        name: [None if missing else value for value, missing in zip(values.tolist(), table[name].isna(), strict=True)]
        for name, values in plain.items()
    }


def saved(path: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """What the folder of a saved posterior says of its task, and the limits that 99 % of validation rows stay below.

    Folders of earlier versions hold no limit on the variance of logits.
    """
    if not path.is_file() or path.suffix != ".safetensors":
        wrong = "is no .safetensors file" if path.exists() else "does not exist"
        raise StorageError(f"{path} {wrong}; give a posterior that `dubito compare` saved")
    folder = Folder(path.parent)
    facts, result = folder.read("task"), folder.result(path.stem)
    stored = {} if result is None else result.evidence
    names = [name for name in ("epistemic_std", "epistemic", "function_variance") if f"usual_{name}" in stored]
    limits = {name: stored[f"usual_{name}"] for name in names}
    conform(limits, dict[str, float], f"{path.stem}.json: the limits of usual rows")
    if facts is None or not limits:
        raise StorageError(
            f"{path} must lie in the folder that `dubito compare` wrote, beside task.json and {path.stem}.json; "
            "posteriors of your own are read with dubito.load"
        )
    return _checked(facts, folder.path / "task.json"), limits


def _checked(facts: dict[str, Any], path: Path) -> dict[str, Any]:
    """The facts with network and reader built from them, after checking that they belong together."""
    try:
        conform({key: facts[key] for key in TaskFacts.__annotations__}, TaskFacts, "the task")
        stored = facts["network"]
        network = Network(**{**stored, "input_shape": tuple(stored["input_shape"])})
        reader = RowReader.from_json(facts["reader"])
        conform(network, Network, "the network")
        conform(reader, RowReader, "the reader")
        classes, scaling = len(facts["class_names"]), facts["target_scaling"]
        if classes and network.num_outputs not in (classes, classes - 1):
            raise StorageError(f"{classes} names of classes do not fit {network.num_outputs} outputs")
        outputs = len(scaling["shift"]) if scaling is not None else network.num_outputs
        if network.num_outputs not in (outputs, 2 * outputs):  # of each target a mean, or a mean and its noise
            raise StorageError("the scaling of targets does not fit the network's outputs")
    except Exception as error:  # a file may hold anything
        raise StorageError(f"{path} is altered: {error}; compare anew") from error
    return {**facts, "network": network, "reader": reader}


def network_of(network: Network, model: str | None, path: Path) -> Network:
    """The network of a saved posterior: a built-in one, or the user's own, which must be given."""
    if network.factory is None:
        if model is not None:
            raise ConfigError(f"{path} was made with the built-in {network.title}; leave --model out")
        return network
    if model is None:
        raise ConfigError(f"{path} was made with a network of your own: give it with --model {network.factory}")
    return Network(factory=model, input_shape=network.input_shape, num_outputs=network.num_outputs)


def _check_words(inputs: Tensor, network: Network, rows: str | Path) -> None:
    vocabulary = network.arguments.get("vocabulary")
    if vocabulary is not None and int(inputs.max()) >= vocabulary:
        raise DataError(
            f"words in {rows} must have numbers below {vocabulary}, as in training, got {int(inputs.max())}"
        )


def columns_of(prediction: Prediction, class_names: Sequence[str], level: float, target: str) -> dict[str, list[Any]]:
    """Mean or label, both parts of its uncertainty, interval or set, a list per column; for each of several targets."""
    if isinstance(prediction, RealPrediction):
        lower, upper = prediction.interval(level)
        if isinstance(prediction, CountPrediction):
            lower, upper = lower.long(), upper.long()
        share = f"{100 * level:g}"
        values = {
            "mean": prediction.mean,
            "std": prediction.std,
            "aleatoric_std": prediction.aleatoric_std,
            "epistemic_std": prediction.epistemic_std,
            f"lower_{share}": lower,
            f"upper_{share}": upper,
        }
        return {name: column for key, value in values.items() for name, column in _outputs(key, value, target).items()}
    if isinstance(prediction, BernoulliPrediction):
        yes = _single(prediction.probs)
        probs, sets = torch.stack([1 - yes, yes], 1), prediction.sets(level).flatten(1)
    else:
        assert isinstance(prediction, CategoricalPrediction)
        probs, sets = prediction.probs, prediction.sets(level)
    names = [str(name) for name in class_names]
    chosen = [" | ".join(names[place] for place in row.nonzero().flatten().tolist()) for row in sets]
    return {
        "label": [names[place] for place in _single(prediction.labels).tolist()],
        "confidence": _shortest(_single(prediction.confidence)),
        "total": _shortest(_single(prediction.total)),
        "aleatoric": _shortest(_single(prediction.aleatoric)),
        "epistemic": _shortest(_single(prediction.epistemic)),
        "function_variance": _shortest(_single(prediction.function_variance)),
        f"set_{100 * level:g}": chosen,
        **{f"prob_{name}": _shortest(probs[:, place]) for place, name in enumerate(names)},
    }


def _single(values: Tensor) -> Tensor:
    """One number per row; [B, 1] loses its axis."""
    return values.flatten(1)[:, 0] if values.ndim > 1 else values


def _shortest(values: Tensor) -> list[float]:
    """Numbers of the fewest digits that stand for what was computed, in whatever precision; whole ones as they are."""
    return values.numpy().astype(str).astype(float).tolist() if values.is_floating_point() else values.tolist()


def _outputs(name: str, values: Tensor, target: str) -> dict[str, list[float]]:
    flat = values.flatten(1)
    if flat.shape[1] == 1:
        return {name: _shortest(flat[:, 0])}
    outputs = target_names(target, flat.shape[1])
    return {f"{name}_{output}": _shortest(flat[:, place]) for place, output in enumerate(outputs)}
