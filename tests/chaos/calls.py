"""Bad calls of the whole public API: every parameter of every public callable in at least five bad ways.

Callables are found by introspection: the names of `dubito`, its public rooms, their classes and the methods of these,
posteriors and objectives. A case is a valid call with one bad argument. It must end in an error of the library's own,
or, where the value is of the right kind and only strange, in a result without NaN.
"""

import collections.abc
import dataclasses
import importlib
import inspect
import math
import random
import signal
import tempfile
import types
import typing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from fnmatch import fnmatch
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import dubito
from dubito.errors import DubitoError
from dubito.hints import Checked
from dubito.objective import Objective
from dubito.posterior import Posterior
from dubito.prediction import Prediction

from . import Report
from .call_values import CHEAP, INSTANCES, VALUES, objective, optimiser, posterior

#: Rooms all of whose names are public, beside those that `dubito` shows; of the others, settings alone are.
WHOLE = ("metrics", "distributions")
SETTINGS = ("training", "likelihoods", "curvature", "weight_normals", "prediction")
SECONDS = 30

#: What the library calls on classes of its own, with values it made: the protocol between rooms, not the user's.
CONTRACTS = (
    "Around.centre",
    "Around.check",
    "Around.known",
    "Around.penalty",
    "Categorical.axis",
    "Categorical.resolved",
    "*.of_one_form",
    "*Prediction.flat",
    "*.draw",
    "*.component_*",
    "CountPrediction.rescaled",  # refused: counts have no other units
    "*.tails",
    "*.closed_form",
    "*.draws",
    "*.drawer",
    "*.holds",
    "*.group",
    "*.generator",
    "*.survey",
    "*.train",
    "*.has_form",
    "*.block*",
    "*.normals",
    "*.root",
    "*.cover",
    "*.linearised",
    "*.readable",
    "*.replaced",
    "*.factors",
    "*.kl",
    "*.factor_kl",
    "*.noise",
    "*.law",
    "*.folded",
    "*.bias_draws",
    "*.mixture",
    "*.matrices",
    "*.distribution",
    "*.weight_scale",
    "*.load_state_dict",
    "*.score",
    "*.factor",
    "Adam.make",
    "AdamW.make",
    "SGD.make",
    "*.keep",
    "*.joined",
    "*.basis",
    "*.chosen",
    "*.facts",
    "*.seeds",
    "*.normal",
    "*.check",
    "*.tail",
    "*.mapped",
    "*.lease",
    "*.batch_loss",
    "*.outputs",
    "*.stepper",
    "*.move",
    "*.fisher",
    "*.add",
    "*.std",
    "*.precision",
    "*.initial_fisher",
    "*.draw_all",
    "*.at",
    "*.steps",
    "*.limits",
    "*.training",
    "*.pilot_training",
    "*.of_split",
    "*.applied",
    "*.digest",
    "*.resolved",
    "*.open",
    "*.begun",
    "*.first_weights",
    "*.build",
    "APS.scores",
    "LAC.scores",
    "*Residuals.scores",
    "*Residuals.intervals",
    "*.parts_in",
    "*.placed",
    "*.row_whitened",
    "*.expand",
    "*.draft",
    "*.bind",
    "*.step",
    "*Likelihood.*",
    "Tempered.*",
    "NoisyKFAC.matrix",
    "NoisyKFAC.roots",
    "VOGN.shift",
    "*.deviation",
    "*.parameter_groups",
    "dubito.protocol.recipe",
    "*.finite",
    "*.two_sided",
)
#: Calls that cost minutes or need files of the network.
COSTLY = ("dubito.compare.compare", "dubito.shifts.ood_pair", "dubito.data.load", "dubito.protocol.fit", "*.export")

#: Cases that are taken though the value is not what the hint says, and why.
ACCEPTED = {
    "dubito.calibration.paired_gain(*=with NaN)": "losses that are not all finite lose for sure, as the docstring says"
}


class Target(NamedTuple):
    """A public callable: its name, what makes the callable, and its parameters with their hints."""

    name: str
    make: Callable[[], Callable[..., Any]]
    hints: dict[str, Any]
    needed: tuple[str, ...]


class Case(NamedTuple):
    """A bad value for one parameter; `wrong` where it is not even of the right kind."""

    target: Target
    parameter: str
    label: str
    value: Any
    wrong: bool

    def __str__(self) -> str:
        return f"{self.target.name}({self.parameter}={self.label})"


# -- what is public ---------------------------------------------------------------------------------------------------


def offered() -> Iterator[tuple[str, Any]]:
    """Public functions and classes with their names."""
    for name in dubito.__all__:
        yield f"dubito.{name}", getattr(dubito, name)
    for room in (*dubito._ROOMS, *WHOLE, *SETTINGS):
        module = importlib.import_module(f"dubito.{room}")
        names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
        for name in names:
            value = getattr(module, name)
            inside = getattr(value, "__module__", "").startswith(f"dubito.{room}") or hasattr(module, "__path__")
            settings = isinstance(value, type) and issubclass(value, Checked | Prediction)
            if inside and (room not in SETTINGS or (settings and not (issubclass(value, Checked) and result(value)))):
                yield f"dubito.{room}.{name}", value


def targets() -> list[Target]:
    """Every public callable once."""
    made, seen = [], set()

    def add(name: str, function: Any, make: Callable[[], Any], bound: bool = False) -> None:
        plain = inspect.unwrap(getattr(function, "__func__", function))
        if plain in seen or any(fnmatch(name, pattern) for pattern in (*CONTRACTS, *COSTLY)):
            return
        seen.add(plain)
        hints, needed = hints_of(plain, bound)
        if hints and not any(internal(hints[parameter]) for parameter in needed):
            made.append(Target(name, make, hints, needed))

    for name, value in offered():
        usable = getattr(value, "__module__", "").startswith("dubito") and callable(value)
        if not usable or (isinstance(value, type) and issubclass(value, BaseException | Warning)):
            continue
        if not isinstance(value, type):
            add(name, value, lambda value=value: value)
        elif not inspect.isabstract(value) and not issubclass(value, enum_type):
            if not result(value):
                add(
                    name,
                    value.__init__ if dataclasses.is_dataclass(value) or "__init__" in vars(value) else value,
                    lambda value=value: value,
                )
            methods_of(value, INSTANCES.get(value) or settings_instance(value), add)
    for method in dict.fromkeys(("mean-field", *CHEAP, *dubito.methods())):
        methods_of(type(posterior(method)), lambda method=method: posterior(method), add)
    methods_of(type(posterior().sampled(2)), lambda: posterior().sampled(2), add)
    methods_of(type(objective()), objective, add)
    for kind in vars(dubito.optim).values():
        if isinstance(kind, type) and not inspect.isabstract(kind):
            methods_of(kind, lambda kind=kind: optimiser(kind), add)
    return made


def result(kind: type) -> bool:
    """Whether the library makes instances and users read them: the docstring lists attributes, and not arguments."""
    return issubclass(kind, Prediction | nn.Module | Objective | tuple) or "Attributes:" in (kind.__doc__ or "")


enum_type = importlib.import_module("enum").Enum


def methods_of(kind: type, instance: Any, add: Callable[..., None]) -> None:
    """The methods that a class, or a class of ours that it derives from, has for users."""
    for name in dir(kind):
        function = inspect.getattr_static(kind, name)
        plain = function.__func__ if isinstance(function, classmethod | staticmethod) else function
        if name.startswith("_") or not inspect.isfunction(plain) or not plain.__module__.startswith("dubito"):
            continue
        owner = next(base for base in kind.__mro__ if name in vars(base))
        bound = isinstance(function, classmethod | staticmethod)
        add(
            f"{owner.__name__}.{name}",
            plain,
            lambda n=name, bound=bound: getattr(kind if bound else instance(), n),
            not isinstance(function, staticmethod),
        )


def settings_instance(kind: type) -> Callable[[], Any]:
    return lambda: kind(**arguments(Target(kind.__name__, lambda: kind, *hints_of(kind.__init__))))


def hints_of(function: Any, bound: bool = False) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Hints by parameter, and which have no default; what is bound is called without its first."""
    parameters = list(inspect.signature(function).parameters.values())
    if bound or (parameters and parameters[0].name == "self"):
        parameters = parameters[1:]
    fixed = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    try:
        hints = typing.get_type_hints(function)
    except NameError:
        hints = {}
    needed = tuple(p.name for p in fixed if p.default is p.empty)
    return {p.name: hints.get(p.name, p.annotation) for p in fixed}, needed


def internal(hint: Any) -> bool:
    """Whether a hint names a class that users are not offered."""
    kinds = [part for part in flat(hint) if isinstance(part, type) and part.__module__.startswith("dubito")]
    return any(kind not in public_kinds() for kind in kinds) or torch.Generator in flat(hint)


def flat(hint: Any) -> list[Any]:
    parts = typing.get_args(hint)
    return [hint, *(inner for part in parts for inner in flat(part))] if parts else [hint]


_public: set[type] = set()


def public_kinds() -> set[type]:
    if not _public:
        for _, value in offered():
            if isinstance(value, type):
                _public.update(base for base in value.__mro__ if base.__module__.startswith("dubito"))
        _public.update({Posterior, Objective})
    return _public


# -- valid and bad arguments ------------------------------------------------------------------------------------------


def arguments(target: Target) -> dict[str, Any]:
    """Those of a valid call: what has no default, what makes it cheap, and what is known of this very callable."""
    given = {}
    for parameter in target.hints:
        key = known(target.name, parameter)
        wanted = parameter in target.needed or parameter in ("num_samples", "training", "steps")
        if key is not None and (wanted or "." in key):
            given[parameter] = lookup(target.name, parameter)
    return given


def known(name: str, parameter: str) -> str | None:
    """Under which key the table has a value of a parameter."""
    parts = name.split(".")
    keys = (".".join((*parts[start:], parameter)) for start in range(len(parts) + 1))
    return next((key for key in keys if key in VALUES), None)


MISSING = object()


def lookup(name: str, parameter: str) -> Any:
    key = known(name, parameter)
    value = MISSING if key is None else VALUES[key]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return value() if inspect.isfunction(value) or hasattr(value, "cache_info") else value


def kinds_of(hint: Any) -> list[Any]:
    """The alternatives of a hint."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(hint) for kind in kinds_of(part)]
    return [type(None) if hint is None else hint]


def bad_values(hint: Any, base: Any) -> Iterator[tuple[str, Any, bool]]:
    """Bad values for a parameter: name, value, and whether it is of the wrong kind altogether."""
    kinds = kinds_of(hint)
    origins = [typing.get_origin(kind) or kind for kind in kinds]
    anything = any(
        kind in (Any, object, inspect.Parameter.empty) or isinstance(kind, typing.TypeVar | str) for kind in kinds
    )
    holds_tensors = (
        Tensor in kinds
        or isinstance(base, Tensor)
        or (isinstance(base, tuple) and any(isinstance(b, Tensor) for b in base))
    )
    if type(None) not in kinds and not (anything and base is None):
        yield "None", None, True
    yield "object()", object(), True
    yield "1j", 1j, True
    yield "nan", math.nan, True
    yield "b'ab'", b"ab", True
    if str not in kinds and typing.Literal not in origins:
        yield "'banana'", "banana", True
    else:
        yield "'banana'", "banana", typing.Literal in origins
        yield "''", "", typing.Literal in origins
        yield "7.5", 7.5, float not in kinds
    if collections.abc.Callable not in origins:
        yield "a function", lambda *_: None, True
    if int in kinds or float in kinds:
        yield "-1", -1, False
        yield "inf", math.inf, False
        yield "1e300", 1e300, False
        yield "'3'", "3", str not in kinds
        yield "[1]", [1], not any(o in (tuple, list, collections.abc.Sequence) for o in origins)
        yield "True", True, bool not in kinds
    if bool in kinds:
        yield "'yes'", "yes", str not in kinds
        yield "2", 2, not {int, float} & set(kinds)
        yield "tensor", torch.ones(2), True
    if any(
        o in (tuple, list, collections.abc.Sequence, collections.abc.Collection, collections.abc.Iterable)
        for o in origins
    ):
        yield "[]", [], False
        yield "[object()]", [object()], True
        yield "[nan]", [math.nan], True
    if any(isinstance(o, type) and issubclass(o, collections.abc.Mapping) for o in origins):
        yield "{}", {}, False
        yield "{3: object()}", {3: object()}, True
    if holds_tensors:
        yield from bad_tensors(base)
    if any(isinstance(o, type) and (o.__module__.startswith(("dubito", "torch.nn"))) for o in origins):
        yield "3", 3, not {int, float} & set(kinds)
        yield "[]", [], True
        yield "a class", next(o for o in origins if isinstance(o, type)), True
        if nn.Module in kinds:
            yield "Identity()", nn.Identity(), True


def bad_tensors(base: Any) -> Iterator[tuple[str, Any, bool]]:
    """A base value of tensors with one of them made strange; pairs once on each side."""
    sides = range(len(base)) if isinstance(base, tuple) else [None]
    for side in sides:
        tensor = base if side is None else base[side]
        if not isinstance(tensor, Tensor):
            continue
        floating = tensor.is_floating_point()
        first = tuple(0 for _ in tensor.shape)
        nan = tensor.clone().double() if not floating else tensor.clone()
        nan[first] = math.nan
        infinite = nan.nan_to_num(nan=math.inf)
        changes = {
            "sparse": (tensor.to_sparse(), True),
            "complex": (tensor + 1j, True),
            "meta": (tensor.to("meta"), True),
            "nested": (torch.nested.nested_tensor([tensor.float()]), True),
            "with NaN": (nan, True),
            "with inf": (infinite, False),
            "empty": (tensor[:0], False),
            "one axis more": (tensor[None].expand(2, *tensor.shape), False),
            "scalar": (tensor.reshape(-1)[0], False),
            "one row less": (tensor[:-1], False),
            "a list of words": (["a", "b"], True),
            "objects": (np.array([object(), object()]), True),
            "huge": (tensor.double() * 1e38 if floating else tensor + 2**40, False),
            "negative": (-tensor.float().abs() - 1 if tensor.dtype == torch.bool else -tensor.abs() - 1, False),
            "boolean": (tensor > 0, False),
            "half": (tensor.half(), False),
        }
        for label, (value, wrong) in changes.items():
            if side is not None:
                value = (*base[:side], value, *base[side + 1 :])
                label = f"[{side}] {label}"
            yield label, value, wrong


def cases(target: Target) -> list[Case]:
    """All bad calls of a callable."""
    bad = []
    for parameter, hint in target.hints.items():
        base = lookup(target.name, parameter)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nested tensors are a prototype
            values = list(bad_values(hint, None if base is MISSING else base))
        for label, value, wrong in values:
            optional = label == "None" and parameter not in target.needed and hint is Any
            if not optional:
                bad.append(Case(target, parameter, label, value, wrong))
    return bad


# -- verdicts ---------------------------------------------------------------------------------------------------------


def verdict(case: Case) -> tuple[str, str | None]:
    """How a call ended, and what is wrong with that."""
    given = arguments(case.target) | {case.parameter: case.value}
    try:
        result = called(case.target, given)
    except DubitoError:
        return "own error", None
    except Exception as error:
        return "foreign error", f"{case}: {type(error).__name__}: {str(error)[:120]}"
    if holds_nan(result) and not holds_nan(called(case.target, arguments(case.target))):
        return "NaN", f"{case}: NaN in the result"
    if case.wrong and not any(fnmatch(str(case), pattern) for pattern in ACCEPTED):
        return "taken", f"{case}: taken for good"
    return "documented acceptance" if case.wrong else "accepted, no NaN", None


def called(target: Target, given: dict[str, Any]) -> Any:
    """The result of a call, generators run to their end; a call that does not end is an error."""
    with limited(target.name), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        function = target.make()
        dispatched = [given[name] for name in target.needed] if hasattr(function, "dispatch") else []
        result = function(*dispatched) if dispatched else function(**given)
        if isinstance(result, Iterator):
            result = [piece for piece, _ in zip(result, range(3), strict=False)]
        return result


@contextmanager
def limited(name: str) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"{name} did not end in {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def holds_nan(result: Any, depth: int = 3) -> bool:
    """Whether what a call gave holds a NaN that a user would see."""
    if isinstance(result, Tensor):
        return bool(result.isnan().any()) if result.is_floating_point() and result.device.type != "meta" else False
    if isinstance(result, float):
        return math.isnan(result)
    if isinstance(result, Prediction):
        return any(bool(np.isnan(array).any()) for array in result.to_numpy().values() if array.dtype.kind == "f")
    if isinstance(result, nn.Module):
        return any(holds_nan(tensor.detach()) for tensor in result.state_dict().values())
    if not depth:
        return False
    if isinstance(result, dict):
        return any(holds_nan(value, depth - 1) for value in result.values())
    if isinstance(result, tuple | list):
        return any(holds_nan(value, depth - 1) for value in result)
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return any(holds_nan(getattr(result, item.name), depth - 1) for item in dataclasses.fields(result))
    return False


def valid(target: Target) -> str | None:
    """What is wrong with a valid call of a callable: None where it works."""
    try:
        called(target, arguments(target))
    except Exception as error:
        return f"{target.name}: no valid call ({error!r:.120}); add a line to call_values.py"
    return None


def run(size: float, seed: int, counts: Counter[str] | None = None) -> Report:
    """All callables; of each a part of its cases."""
    report, stream = Report(), random.Random(seed)
    counts = Counter() if counts is None else counts
    with tempfile.TemporaryDirectory() as folder, chdir(folder):  # "banana" is a good path to save to
        for target in targets():
            problem = valid(target)
            if problem is not None:
                report.count("no valid call", problem)
                continue
            drawn = [case for case in cases(target) if stream.random() < size]
            counts[target.name] += len(drawn)
            for case in drawn:
                report.count(*verdict(case))
    if size >= 1:
        for name, number in counts.items():
            print(f"{number:6d} {name}", flush=True)
    return report
