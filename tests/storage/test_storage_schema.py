"""Values against types, and files whose checksums fit and whose content does not."""

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import (
    BALI,
    KFAC,
    MAP,
    SWAG,
    Categorical,
    Gaussian,
    Laplace,
    MeanField,
    Rank1,
    StorageError,
    Training,
    storage,
)
from dubito.storage.schema import Count, Positive, Recorded, Within, conform


class Facts(TypedDict):
    rank: Count
    name: NotRequired[str | None]


@dataclass(frozen=True)
class Setting:
    rate: float
    shape: tuple[int, ...] = ()


GOOD: list[tuple[Any, Any]] = [
    (3, int), (3, float), (2.5, float), ("a", str), (None, str | None), (True, bool), ([1, 2], list[int]),
    ({"a": [1.5]}, dict[str, list[float]]), ([1, "a"], tuple[int, str]), ([1, 2, 3], tuple[int, ...]),
    ("b", Literal["a", "b"]), ({"rank": 0}, Facts), ({"rank": 2, "name": None}, Facts), (float("inf"), Recorded),
    (1e-6, Positive), (Setting(0.5, (1, 2)), Setting), (7, Any),
]  # fmt: skip
BAD: list[tuple[Any, Any]] = [
    (True, int), (2.0, int), (2**63, int), (10**5000, int), ("3", float), (True, float), (float("nan"), float),
    (float("inf"), float), (10**400, float), (1, bool), (None, str), ([1, "a"], list[int]),
    ({"a": None}, dict[str, int]),
    ("ab", list[str]), ([1], tuple[int, int]), ("c", Literal["a", "b"]), (1, Literal[True]), ({}, Facts),
    ({"rank": -1}, Facts), ({"rank": 1, "more": 1}, Facts), ([], Facts), (0.0, Positive), (1e30, Positive),
    (5, Annotated[int, Within(0, 4)]), (Setting("x"), Setting), (Setting(0.5, (1.5,)), Setting), (MAP(), Setting),  # pyright: ignore
]  # fmt: skip


@pytest.mark.parametrize(("value", "hint"), GOOD)
def test_what_fits_passes(value, hint):
    conform(value, hint, "it")


@pytest.mark.parametrize(("value", "hint"), BAD, ids=range(len(BAD)))
def test_what_does_not_fit_is_refused_by_name(value, hint):
    with pytest.raises(StorageError, match="it"):
        conform(value, hint, "it")


def network(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), activation(), nn.Linear(4, 2))


X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
METHODS: dict[str, Any] = {
    "map": MAP(), "mean-field": MeanField(), "swag": SWAG(), "rank1": Rank1(), "bali": BALI(),
    "kfac": Laplace(structure=KFAC()), "noisy-kfac": dubito.NoisyKFAC(),
}  # fmt: skip


@cache
def fitted(name: str, real: bool = False) -> Any:
    targets, likelihood = (X[:, :2] * 2, Gaussian()) if real else (torch.arange(24) % 2, Categorical())
    training = Training(epochs=1, batch_size=8)
    return METHODS[name].fit(network(), (X, targets), likelihood, training=training)


def put(*path: Any, value: Any):
    def change(tensors: dict[str, Tensor], content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


def tensor(name: str, make):
    def change(tensors: dict[str, Tensor], content: Any) -> None:
        tensors[name] = make(tensors[name])

    return change


def renamed(tensors: dict[str, Tensor], content: Any) -> None:
    content["method"] = {"type": "MAP", "prior_std": None}


def extra_group(tensors: dict[str, Tensor], content: Any) -> None:
    content["structure"]["more"] = ["0.weight"]
    tensors["more.0.weight"] = torch.zeros(4, 3)


def without(key: str):
    def change(tensors: dict[str, Tensor], content: Any) -> None:
        for name in content["structure"].pop(key):
            del tensors[f"{key}.{name}"]

    return change


def with_nan(values: Tensor) -> Tensor:
    values = values.clone()
    values.view(-1)[-1] = float("nan")
    return values


FORGED: list[tuple[str, Any, str]] = [
    ("mean-field", renamed, "has no place in a posterior of MAP"),
    ("map", put("method", "type", value="MeanField"), "."),
    ("mean-field", extra_group, "has no place"),
    ("mean-field", without("raw_std"), "standard deviation"),
    ("rank1", without("biases"), "lacks its tensors 'biases'"),
    ("swag", without("deviations"), "lacks its tensors 'deviations'"),
    ("mean-field", tensor("raw_std.0.weight", with_nan), "NaN or infinity"),
    ("mean-field", tensor("network.0.weight", with_nan), "NaN or infinity"),
    ("map", tensor("network.1.running_var", with_nan), "NaN or infinity"),
    ("map", tensor("network.1.running_var", torch.neg), "must not be negative"),
    ("swag", tensor("variance.0.weight", lambda t: t - 1), "must not be negative"),
    ("mean-field", tensor("network.0.weight", Tensor.long), "torch.int64"),
    ("mean-field", tensor("network.0.weight", Tensor.double), "several dtypes"),
    ("mean-field", tensor("raw_std.0.weight", Tensor.long), "floating-point"),
    ("mean-field", tensor("raw_std.0.weight", lambda t: t[:1]), r"must have shape \(4, 3\), got \(1, 3\)"),
    ("bali", tensor("input_tril.0.weight", lambda t: t[:, :2, :2]), "must have shape"),
    ("noisy-kfac", tensor("input_tril.0.weight", lambda t: t[:, :2, :2]), "must have shape"),
    ("kfac", tensor("input_vectors.0.weight", lambda t: t[:, :2]), "must have shape"),
    ("rank1", tensor("input_mean.0.weight", lambda t: t[:2]), "must have shape"),
    ("kfac", put("details", "blocks", 0, "rows", value=10**9), "does not fit the shape"),
    ("kfac", put("details", "blocks", 0, "weight", value="none"), "."),
    ("kfac", put("details", "prior_precision", value=0.0), "prior_precision"),
    ("kfac", put("details", "data_scale", value=1e308), "data_scale"),
    ("kfac", put("details", value=1), "details"),
    ("kfac", put("structure", value=-1), "structure"),
    ("kfac", put("details", "survey", "uses", 0, "form", "rows", value=10**6), "does not fit its shape"),
    ("kfac", put("details", "survey", "uses", 0, "layout", value="sideways"), "cannot be read"),
    ("rank1", put("details", "uses", 0, "weight", value="none"), "does not have"),
    ("rank1", put("method", "components", value=10**9), "must have shape"),
    ("swag", put("details", "rank", value=10**12), "must have shape"),
    ("map", put("history", value=True), "history"),
    ("map", put("extra", value=1e308), "extra"),
    ("map", put("num_noise_components", value=7), "components"),
    ("map", put("added", value=1), "unknown 'added'"),
    ("map", put("likelihood", "class_axis", value=5), "the likelihood"),
    ("map", put("details", "inputs", "tensor", "shape", value=[10**6, 10**6]), "form of an input"),
    ("map", put("fingerprint", "outputs", 0, value=[9.0, 9.0]), "of another network"),
]


@pytest.mark.filterwarnings("ignore:the network is no better than a constant", "ignore:BALI treats layers")
@pytest.mark.parametrize(("name", "change", "words"), FORGED, ids=range(len(FORGED)))
def test_content_that_does_not_fit_is_refused(tmp_path, name: str, change, words: str):
    path = tmp_path / "p"
    fitted(name).save(path)
    tensors, content = storage.read(path, "posterior")
    change(tensors, content)
    storage.write(path, "posterior", tensors, content)
    with pytest.raises(StorageError, match=words):
        dubito.load(path, network())


@pytest.mark.parametrize(
    "change",
    [
        tensor("likelihood.raw_std", lambda t: t.new_ones(5)),
        tensor("likelihood.raw_std", with_nan),
        put("num_noise_components", value=3),
        lambda tensors, content: tensors.pop("likelihood.raw_std"),
        lambda tensors, content: tensors.update({"likelihood.noise_std": torch.ones(2)}),
        lambda tensors, content: tensors.update({"likelihood.scale": torch.ones(2)}),
        put("likelihood", value={"type": "Categorical", "class_axis": 1}),
        put("likelihood", "std", value="wide"),
    ],
)
def test_noise_that_is_none_is_refused(tmp_path, change):
    fitted("map", True).save(tmp_path / "p")
    tensors, content = storage.read(tmp_path / "p", "posterior")
    change(tensors, content)
    storage.write(tmp_path / "p", "posterior", tensors, content)
    with pytest.raises(StorageError):
        dubito.load(tmp_path / "p", network())


def test_a_mask_of_infinities_is_no_fault(tmp_path):
    class Masked(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.mask.softmax(0)

    posterior = MAP().fit(Masked(), (X, torch.arange(24) % 2), Categorical(), training=Training(epochs=1))
    posterior.save(tmp_path / "p")
    again = dubito.load(tmp_path / "p", Masked())
    assert torch.equal(again.predict(X).probs, posterior.predict(X).probs)


CHECKPOINTS: list[tuple[Any, str]] = [
    (put("progress", "epoch", value=7), "7 epochs"),
    (put("progress", "step", value="x"), "step"),
    (put("progress", "rows", value=0), "contradicts"),
    (put("progress", "sums", value=[1.0]), "contradicts"),
    (put("progress", "best_step", value=10**9), "best state"),
    (put("progress", value={}), "."),
    (put("stepper", value=[]), "stepper"),
    (put("stepper", "optimizer", value=3), "optimizer"),
    (tensor("stepper/0.exp_avg", lambda t: t[:1]), r"not \(\(4, 3\)"),
    (tensor("stepper/0.exp_avg", with_nan), "NaN"),
    (tensor("draft/network.0.weight", with_nan), "NaN"),
    (tensor("draft/network.0.weight", Tensor.double), "float64"),
    (lambda tensors, content: tensors.pop("stepper/0.step"), "lacks a tensor 'step'"),
    (lambda tensors, content: tensors.pop("draft/network.0.weight"), "lacks a tensor"),
    (lambda tensors, content: tensors.update({"more/a": torch.ones(1)}), "belong to nothing"),
    (lambda tensors, content: content.pop("progress"), "lacks 'progress'"),
]


@pytest.mark.parametrize(("change", "words"), CHECKPOINTS, ids=range(len(CHECKPOINTS)))
def test_checkpoints_that_no_run_left_are_refused(tmp_path, checkpoint, change, words: str):
    tensors, content = storage.read(checkpoint, "checkpoint")
    change(tensors, content)
    storage.write(tmp_path / "c", "checkpoint", tensors, content)
    with pytest.raises(StorageError, match=words):
        resumed(tmp_path / "c")


def resumed(path) -> Any:
    training = Training(epochs=3, batch_size=8)
    return MAP().fit(network(), (X, torch.arange(24) % 2), Categorical(), training=training, checkpoint=path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """After the second of three steps of the second epoch."""
    from dubito.training import loop

    class Stopped(Exception):
        pass

    path, before, saves = tmp_path_factory.mktemp("run") / "c", loop.Loop._save_if_due, []

    def save(run: loop.Loop) -> None:
        saves.append(run._save())
        if len(saves) == 5:
            raise Stopped

    loop.Loop._save_if_due = save
    try:
        with pytest.raises(Stopped):
            resumed(path)
    finally:
        loop.Loop._save_if_due = before
    return path
