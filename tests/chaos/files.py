"""Mutated files: posteriors of every method, checkpoints and folders of comparisons, loaded, resumed, predicted with.

A signed mutation changes content or tensors and makes every checksum fit again, as somebody with an editor and a grudge
would; a raw one changes bytes. What is allowed: an error of the library's, or the work of an unchanged file, or another
result of finite numbers. What is not: an error of another library, and NaN without a word.
"""

import copy
import json
import math
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dubito
from dubito import Bernoulli, Categorical, Gaussian, MCDropout, Training, methods, storage
from dubito.active import ActiveLearning, OutputVariance, Selection
from dubito.compare import Settings, compare
from dubito.compare.folder import Folder
from dubito.compare.predict import predict
from dubito.errors import DubitoError
from dubito.posterior import Posterior

from . import Report

#: Cases at size 1.
SIGNED, RAW, RESUMED, FOLDERS = 2400, 1500, 700, 300
#: What a value of JSON becomes.
VALUES = (None, True, -1, 0, 10**12, 10**30, 10**5000, 1e308, -1e308, float("nan"), float("inf"), "", "x", "0.weight",
          [], [1], [[]], {}, {"type": "MAP"}, {"a": 1}, 0.5, [1e6, 1e4], "rows second")  # fmt: skip
QUICK = Training(epochs=2, batch_size=16)

torch_inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
TARGETS: dict[str, tuple[Any, Tensor]] = {
    "classes": (Categorical(), torch.arange(48) % 3),
    "labels": (Bernoulli(), (torch_inputs[:, :3] > 0).long()),
    "reals": (Gaussian(), torch_inputs[:, :3] * 2),
    "standardised": (Gaussian(standardise=True), torch_inputs[:, :3] * 5 + 1),
}


def network() -> nn.Module:
    """A small network with a statistic, a dropout layer and a parameter of each kind."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Unflatten(1, (1, 4)),
            nn.Conv1d(1, 2, 3, padding=1),
            nn.Flatten(),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(8, 3),
        )


@cache
def posteriors(every: int = 1) -> dict[str, Posterior]:
    """One of every method, or of each so-manieth, over the likelihoods in turn, and of draws made once."""
    made: dict[str, Posterior] = {}
    names = [*methods()][::every]
    chosen = {name: method for name, method in methods().items() if name in names}
    chosen |= {"own-dropout": MCDropout(rate=None)} if every == 1 else {}
    for number, (name, method) in enumerate(chosen.items()):
        kinds = [*TARGETS] if name in ("map", "laplace-kfac", "deep-ensemble") else [[*TARGETS][number % 4], "classes"]
        for kind in dict.fromkeys(kinds):
            likelihood, targets = TARGETS[kind]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                posterior = method.fit(network(), (torch_inputs, targets), likelihood, training=QUICK)
            made[f"{name} {kind}"] = posterior
    if every > 1:
        return made
    for name in ("laplace-kfac classes", "rank1 classes", "own-dropout classes", "swag classes"):
        made[f"{name} sampled"] = made[name].sampled(3)
    made["laplace-inf linearised"] = made["laplace-inf classes"].sampled(2, linearised=True)
    made["swag refreshed"] = made["swag classes"].refreshed((torch_inputs, TARGETS["classes"][1]), num_samples=2)
    return made


# -- mutations ---------------------------------------------------------------------------------------------------------


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a nest, containers among them."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    """The value at the end of a way."""
    for key in path:
        value = value[key]
    return value


def changed_content(content: Any, chance: random.Random) -> str:
    """Change one place of JSON in place; says how."""
    ways = sorted(places(content), key=str)
    depth = chance.choice(sorted({len(way) for way in ways}))
    path = chance.choice([way for way in ways if len(way) == depth])  # shallow places as often as deep ones
    holder, key = at(content, path[:-1]), path[-1]
    kind = chance.choice(("value", "value", "value", "drop", "swap", "add", "nudge"))
    if kind == "drop":
        del holder[key]
    elif kind == "swap":
        other = chance.choice(ways)
        holder[key] = copy.deepcopy(at(content, other)) if other[: len(path)] != path else None
    elif kind == "add" and isinstance(holder, dict):
        holder["added"] = chance.choice(VALUES)
    elif kind == "nudge" and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = chance.choice((holder[key] + 1, -holder[key], holder[key] * 1000, holder[key] / 7))
    else:
        holder[key] = chance.choice(VALUES)
    now = holder.get(key) if isinstance(holder, dict) else None
    shown = "a long number" if isinstance(now, int) and now > 10**40 else str(now)[:40]
    return f"{kind} {'/'.join(map(str, path))} -> {shown}"


def changed_tensors(tensors: dict[str, Tensor], chance: random.Random) -> str:
    """Change one tensor in place; says how."""
    name = chance.choice(sorted(tensors))
    tensor = tensors[name]
    kind = chance.choice(
        (
            "nan",
            "inf",
            "integers",
            "double",
            "half",
            "shape",
            "drop",
            "copy",
            "rename",
            "negative",
            "huge",
            "zero",
            "more",
        )
    )
    first = tensor.reshape(-1)
    if kind in ("nan", "inf") and tensor.is_floating_point() and tensor.numel():
        first = first.clone()
        first[chance.randrange(len(first))] = float(kind)
        tensors[name] = first.reshape(tensor.shape)
    elif kind == "drop":
        del tensors[name]
    elif kind == "copy":
        tensors[f"{name}.more"] = tensor.clone()
    elif kind == "rename":
        other = chance.choice(sorted(tensors))
        tensors[name], tensors[other] = tensors[other], tensors[name]
    elif kind in ("negative", "huge", "zero"):
        tensors[name] = tensor * {"negative": -1, "huge": 1e30 if tensor.is_floating_point() else 9, "zero": 0}[kind]
    elif kind == "shape":
        tensors[name] = chance.choice(
            (first, tensor[None], first[:1], first[:0], tensor.mT if tensor.ndim > 1 else first)
        )
    elif kind == "more":
        tensors[name] = torch.cat([first, first])
    else:
        dtype = {"integers": torch.int64, "double": torch.float64}.get(kind, torch.float16)
        tensors[name] = tensor.to(dtype)
    return f"{kind} {name}"


def signed(source: Path, target: Path, kind: str, chance: random.Random) -> str:
    """A mutated copy of a file, with checksums that fit."""
    tensors, content = storage.read(source, kind)
    of_tensors = tensors and chance.random() < 0.4
    words = changed_tensors(tensors, chance) if of_tensors else changed_content(content, chance)
    write_signed(target, kind, tensors, content)
    return words


def write_signed(target: Path, kind: str, tensors: dict[str, Tensor], content: Any) -> None:
    """Write as the library does; numbers of thousands of digits too, which Python writes only when told to."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        storage.write(target, kind, tensors, content)
    finally:
        sys.set_int_max_str_digits(before)


def raw(source: Path, target: Path, chance: random.Random) -> str:
    """A copy of a file with bytes changed."""
    data = bytearray(source.read_bytes())
    kind, place = (
        chance.choice(("flip", "flip", "cut", "insert", "repeat", "zero", "header")),
        chance.randrange(len(data)),
    )
    if kind == "flip":
        data[place] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del data[place:]
    elif kind == "insert":
        data[place:place] = chance.randbytes(chance.randrange(1, 9))
    elif kind == "repeat":
        data += data[:place]
    elif kind == "zero":
        data[place : place + 16] = bytes(len(data[place : place + 16]))
    else:
        data[:8] = chance.choice((0, 1, len(data), 1 << 20, 1 << 40, (1 << 64) - 1)).to_bytes(8, "little")
    target.write_bytes(data)
    return f"{kind} at {place}"


# -- outcomes ----------------------------------------------------------------------------------------------------------


def finite(prediction: Any) -> bool:
    """Whether a prediction holds numbers alone."""
    values = [prediction.epistemic]
    values += [prediction.mean, prediction.std] if hasattr(prediction, "std") else [prediction.probs, prediction.total]
    return all(bool(value.isfinite().all()) for value in values)


def judged(report: Report, words: str, work: Callable[[], bool | None]) -> None:
    """Count how a case ended: refused, finite numbers, or what must not be."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sound = work()
    except DubitoError:
        report.count("own error")
    except Exception as error:
        report.count("foreign error", f"{words}: {type(error).__name__}: {str(error)[:160]}")
    else:
        report.count("finite numbers") if sound else report.count("silent NaN", f"{words}: silent NaN")


def predicted(path: Path, linearised: bool) -> bool:
    """Load, and predict in every form that the posterior has."""
    posterior = dubito.load(path, network())
    forms: list[dict[str, Any]] = [{}]
    sampled = "sampled" in posterior.details
    forms += [
        {form: True} for form in ("linearised", "marginal", "per_example") if posterior.has_form(form) and not sampled
    ]
    chosen = forms if linearised else forms[:1]
    posterior.summary()
    return all(finite(posterior.predict(torch_inputs[:5], 4, **form)) for form in chosen)


def run_posteriors(folder: Path, size: float, chance: random.Random, report: Report) -> None:
    """Signed and raw mutations of posteriors."""
    files = []
    for number, (name, posterior) in enumerate(posteriors(1 if size > 0.1 else 4).items()):
        path = folder / f"{number}.safetensors"
        posterior.save(path)
        assert predicted(path, True)
        files.append((name, path))
    target = folder / "mutated.safetensors"
    for case in range(round(SIGNED * size)):
        name, path = files[case % len(files)]
        words = f"signed {name}: {signed(path, target, 'posterior', chance)}"
        judged(report, words, lambda: predicted(target, True))
    for case in range(round(RAW * size)):
        name, path = files[case % len(files)]
        words = f"raw {name}: {raw(path, target, chance)}"
        judged(report, words, lambda: predicted(target, False))


# -- checkpoints -------------------------------------------------------------------------------------------------------


class Stop(Exception):
    """Ends a run on the way."""


def runs() -> dict[str, Callable[[Path], Any]]:
    """What keeps checkpoints, as a call with a path that gives a posterior, or a curve."""
    every: dict[str, Callable[[Path], Any]] = {}
    for number, (name, method) in enumerate(methods().items()):
        if name.startswith("laplace") or name == "deep-ensemble":
            continue
        likelihood, targets = TARGETS[[*TARGETS][number % 3]]

        def fit(path: Path, method: Any = method, likelihood: Any = likelihood, targets: Any = targets) -> Any:
            data = torch_inputs, targets
            return method.fit(network(), data, likelihood, training=QUICK, checkpoint=path)

        every[name] = fit
    every["swag, momentum"] = lambda path: dubito.SWAG(start=0.2).fit(
        network(),
        (torch_inputs, TARGETS["classes"][1]),
        Categorical(),
        training=Training(epochs=3, batch_size=16, optimizer=dubito.training.SGD(momentum=0.9), lr=0.01),
        checkpoint=path,
    )
    every["validation"] = lambda path: dubito.MeanField().fit(
        network(),
        (torch_inputs, TARGETS["classes"][1]),
        Categorical(),
        training=Training(epochs=3, batch_size=16, early_stopping=dubito.training.EarlyStopping(patience=2)),
        validation=(torch_inputs, TARGETS["classes"][1]),
        checkpoint=path,
    )
    every["active"] = lambda path: ActiveLearning(
        method=dubito.MAP(),
        acquisition=OutputVariance(),
        selection=Selection(size=2),
        steps=2,
        initial=6,
        training=Training(epochs=1),
        num_samples=2,
    ).run(
        network(),
        (torch_inputs, TARGETS["reals"][1]),
        (torch_inputs[:4], TARGETS["reals"][1][:4]),
        Gaussian(),
        checkpoint=path,
    )
    return every


def interrupted(work: Callable[[Path], Any], path: Path, saves: int) -> None:
    """A checkpoint that a run left on the way: after its first writes."""
    module, before, count = dubito.storage, storage.write, 0

    def write(*args: Any) -> None:
        nonlocal count
        before(*args)
        count += 1
        if count == saves:
            raise Stop

    module.write = write  # pyright: ignore
    try:
        work(path)
    except Stop:
        pass
    finally:
        module.write = before


def run_checkpoints(folder: Path, size: float, chance: random.Random, report: Report) -> None:
    """Signed mutations of checkpoints, resumed."""
    files = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, (name, work) in enumerate([*runs().items()][:: 1 if size > 0.1 else 4]):
            path = folder / f"checkpoint-{number}"
            stopped_at_epochs(work, path)
            files.append((name, work, path))
    target = folder / "mutated-checkpoint"
    for case in range(round(RESUMED * size)):
        name, work, path = files[case % len(files)]
        kind = "active learning" if name == "active" else "checkpoint"
        words = f"checkpoint {name}: {signed(path, target, kind, chance)}"

        def resumed(work: Callable[[Path], Any] = work) -> bool:
            result = work(target)
            return not hasattr(result, "predict") or finite(result.predict(torch_inputs[:5], 2))

        judged(report, words, resumed)


def stopped_at_epochs(work: Callable[[Path], Any], path: Path) -> None:
    """A checkpoint in the middle: saved at every step, stopped after the third."""
    from dubito.training import loop

    before = loop.Loop._save_if_due
    loop.Loop._save_if_due = loop.Loop._save  # pyright: ignore
    try:
        interrupted(work, path, 4)
    finally:
        loop.Loop._save_if_due = before


# -- comparisons -------------------------------------------------------------------------------------------------------


def comparison(folder: Path) -> tuple[Path, Path]:
    """The folder of a small comparison, and a file of new rows."""
    rows, out = folder / "rows.csv", folder / "comparison"
    lines = [f"{x:.3f},{y:.3f},{'ab'[int(x + y > 0)]}" for x, y, *_ in torch_inputs.tolist()]
    rows.write_text("\n".join(["first,second,kind", *lines]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(Settings(data=str(rows), target="kind", training=QUICK, num_samples=4), ["map", "rank1"], out=out)
    return out, rows


def run_folders(folder: Path, size: float, chance: random.Random, report: Report) -> None:
    """A comparison's task and results, edited without and with a checksum that fits, and predicted with."""
    out, rows = comparison(folder)
    task, method = out / "task.json", out / "rank1.json"
    whole = {path: path.read_text() for path in (task, method)}

    def told() -> bool:
        predictions = predict(out / "rank1.safetensors", rows)
        numbers = [value for column in predictions.columns.values() for value in column if isinstance(value, float)]
        return all(map(math.isfinite, numbers))

    assert told()
    for case in range(round(FOLDERS * size)):
        path = (task, method)[case % 2]
        content = json.loads(whole[path])
        fits = case % 4 < 2
        body = {key: value for key, value in content.items() if key not in ("format", "sha256")} if fits else content
        words = f"folder {path.name}: {'signed ' if fits else ''}{changed_content(body, chance)}"
        try:
            if fits:
                Folder(out).write(path.stem, body)
            else:
                path.write_text(json.dumps(body))
        except (ValueError, DubitoError):  # a number of thousands of digits
            path.write_text("[" * 100_000)
        if not fits and json.loads(whole[path]) != body:  # whatever was edited is noticed
            refused = Report()
            judged(refused, words, told)
            ended = "own error" if refused.outcomes["own error"] else "edit not noticed"
            report.count(ended, None if ended == "own error" else words)
        else:
            judged(report, words, told)
        path.write_text(whole[path])


def run(size: float = 1.0, seed: int = 0) -> Report:
    """Mutate posteriors, checkpoints and comparisons."""
    report, chance = Report(), random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="dubito-files-"))
    try:
        run_posteriors(folder, size, chance, report)
        run_checkpoints(folder, size, chance, report)
        run_folders(folder, size, chance, report)
    finally:
        shutil.rmtree(folder)
    return report
