"""Exported files answer what `predict` answers, for any number of rows; what cannot be exported is refused in words."""

import warnings
import zipfile
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dubito import (
    INF,
    Bernoulli,
    Categorical,
    ConfigError,
    DeepEnsemble,
    Diagonal,
    DubitoWarning,
    Gaussian,
    HeteroscedasticGaussian,
    KTied,
    Laplace,
    MCDropout,
    MeanField,
    NegativeBinomial,
    NetworkError,
    Poisson,
    Rank1,
    StudentT,
    Training,
    last_layer,
)
from dubito.calibration import temperature_scaled
from dubito.inputs import take
from dubito.prediction import MixturePrediction

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

QUICK = Training(epochs=2, batch_size=8, lr=1e-2)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.gru, self.head = nn.Embedding(7, 4), nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.gru(self.table(ids))[0][:, -1])


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 6), nn.Linear(2, 6), nn.Linear(6, 3)

    def forward(self, *, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(a) + self.right(b)))


def dense(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, outputs))


def dropping() -> nn.Module:
    layers = nn.Linear(4, 9), nn.ReLU(), nn.Dropout(0.4), nn.Linear(9, 8), nn.SELU(), nn.AlphaDropout(0.3)
    return nn.Sequential(*layers, nn.Linear(8, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))


X, LABELS = rows(12, 4), torch.arange(12) % 3
INPUTS = {
    "dense": (dense, X),
    "dropping": (dropping, X),
    "convolutional": (convolutional, rows(12, 1, 6, 6)),
    "recurrent": (Recurrent, torch.randint(7, (12, 3), generator=torch.Generator().manual_seed(0))),
    "named": (Pair, {"a": X, "b": rows(12, 2, seed=4)}),
    "four outputs": (partial(dense, 4), X),
    "one output": (partial(dense, 1), X),
}
COUNTS = (4 * rows(12, 3, seed=6).square()).round()
LIKELIHOODS = {
    "classes": (Categorical(), LABELS),
    "yes or no": (Bernoulli(), (rows(12, 3, seed=2) > 0).float()),
    "reals": (Gaussian(standardise=True), 100 + 30 * rows(12, 3, seed=3)),
    "correlated": (Gaussian(covariance=((1.0, 0.3, 0.0), (0.3, 0.5, 0.1), (0.0, 0.1, 0.2))), rows(12, 3, seed=3)),
    "own noise": (HeteroscedasticGaussian(), rows(12, 2, seed=3)),
    "heavy tails": (StudentT(), rows(12, 3, seed=3)),
    "Poisson": (Poisson(), COUNTS),
    "negative binomial": (NegativeBinomial(), COUNTS),
    "one heavy tail": (StudentT(), rows(12, 1, seed=3)),
    "one count": (NegativeBinomial(), COUNTS[:, :1]),
}


@cache
def fitted(method, network: str = "dense", likelihood: str = "classes"):
    make, inputs = INPUTS[network]
    settings, targets = LIKELIHOODS[likelihood]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", DubitoWarning)
        torch.manual_seed(0)
        return method.fit(make(), (inputs, targets), settings, training=QUICK), inputs


def answers(path: Path, inputs, count: int) -> dict[str, Tensor]:
    few = take(inputs, slice(count))
    if path.suffix == ".pt2":
        program = torch.export.load(path).module()
        return program(**few) if isinstance(few, dict) else program(few)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = few if isinstance(few, dict) else {"inputs": few}
    names = [output.name for output in session.get_outputs()]
    values = session.run(names, {name: tensor.numpy() for name, tensor in feeds.items()})
    return {name: torch.as_tensor(value) for name, value in zip(names, values, strict=True)}


def compare(path: Path, inputs, predict) -> None:
    for count in (1, 5, 12):
        answer, prediction = answers(path, inputs, count), predict(take(inputs, slice(count)))
        if "mean" in answer:
            ends = set() if isinstance(prediction, MixturePrediction) else {"lower", "upper"}
            assert set(answer) == {"mean", "std", "aleatoric_std", "epistemic_std"} | ends
        if "lower" in answer:
            bounds = answer.pop("lower"), answer.pop("upper")
            scale = float(prediction.std.max())  # of float32: digits of numbers of this size
            for bound, truth in zip(bounds, prediction.interval(), strict=True):
                torch.testing.assert_close(bound, truth, rtol=1e-5, atol=1e-5 * scale)
        if "mean" not in answer:
            assert set(answer) == {"probs", "total", "aleatoric", "epistemic", "function_variance"}
        for name, values in answer.items():
            torch.testing.assert_close(values, getattr(prediction, name), **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


CASES = {
    "rank-1, named inputs": (Rank1(components=2), "named", "classes", ".onnx", {}),
    "rank-1, recurrent": (Rank1(components=2), "recurrent", "classes", ".onnx", {}),
    "mean field, kernels": (MeanField(), "convolutional", "classes", ".onnx", {}),
    "ensemble, reals": (DeepEnsemble(members=2), "dense", "reals", ".onnx", {}),
    "noise that follows from the inputs": (Rank1(components=2), "four outputs", "own noise", ".onnx", {}),
    "heavy tails": (Rank1(components=2), "dense", "heavy tails", ".onnx", {}),
    "correlated noise": (MeanField(), "dense", "correlated", ".onnx", {}),
    "correlated noise, last layer": (Laplace(subset=last_layer), "dense", "correlated", ".onnx", {}),
    "counts": (Laplace(), "dense", "Poisson", ".onnx", {"linearised": False}),
    "counts with spread": (MeanField(), "dense", "negative binomial", ".pt2", {}),
    "own dropout layers": (MCDropout(rate=None), "dropping", "classes", ".onnx", {}),
    "last layer, sparse": (Laplace(structure=INF(rank=0.3), subset=last_layer), "dense", "classes", ".onnx", {}),
    "last layer, reals": (Laplace(structure=Diagonal(), subset=last_layer), "dense", "reals", ".pt2", {}),
    "last layer, yes or no": (Laplace(subset=last_layer), "dense", "yes or no", ".pt2", {}),
    "last layer, one heavy tail": (Laplace(subset=last_layer), "one output", "one heavy tail", ".onnx", {}),
    "last layer, one count": (Laplace(structure=INF(), subset=last_layer), "one output", "one count", ".pt2", {}),
    "Laplace by draws": (Laplace(), "dense", "yes or no", ".pt2", {"linearised": False}),
    "named program": (Rank1(components=2), "named", "classes", ".pt2", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_files_answer_what_predict_answers(name: str, tmp_path: Path) -> None:
    method, network, likelihood, suffix, options = CASES[name]
    posterior, inputs = fitted(method, network, likelihood)
    path = tmp_path / f"model{suffix}"
    posterior.export(path, num_samples=4, seed=3, **options)
    compare(path, inputs, lambda few: posterior.predict(few, 4, seed=3, **options))


@pytest.mark.parametrize("network", ["dense", "convolutional"])
def test_linearised_draws_are_traced(network: str, tmp_path: Path) -> None:
    """By second derivatives in the graph, against forward-mode derivatives outside of it."""
    posterior, inputs = fitted(Laplace(structure=Diagonal()), network)
    path = tmp_path / ("model.onnx" if network == "convolutional" else "model.pt2")
    posterior.export(path, num_samples=4, seed=3)
    compare(path, inputs, posterior.sampled(4, seed=3).predict)


def test_scales_and_temperatures_are_heeded(tmp_path: Path) -> None:
    posterior, inputs = fitted(Rank1(components=2))
    tempered = temperature_scaled(posterior.scaled(3.0), (inputs, LABELS), num_samples=4, seed=3)
    for number, other in enumerate([tempered, fitted(MCDropout(rate=None), "dropping")[0].scaled(0.5)]):
        path = tmp_path / f"{number}.pt2"
        other.export(path, num_samples=4, seed=3)
        compare(path, inputs, lambda few, other=other: other.predict(few, 4, seed=3))
    closed = temperature_scaled(fitted(Laplace(subset=last_layer))[0].scaled(2.0), (inputs, LABELS))
    closed.export(tmp_path / "closed.pt2")
    compare(tmp_path / "closed.pt2", inputs, closed.predict)


def test_files_tell_nothing_of_the_machine(tmp_path: Path) -> None:
    posterior, _ = fitted(Rank1(components=2))
    words = [str(Path.cwd()), str(Path.home()), "site-packages", "dubito/draws", str(tmp_path)]
    for suffix in (".onnx", ".pt2"):
        path = tmp_path / f"model{suffix}"
        posterior.export(path, num_samples=2)
        content = [path.read_bytes()]
        if suffix == ".pt2":
            with zipfile.ZipFile(path) as archive:
                content = [archive.read(name) for name in archive.namelist()]
        assert not [word for word in words for part in content if word.encode() in part]
    model = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert {(entry.domain, entry.version) for entry in model.opset_import} <= {("", 20)}
    assert not [node for node in model.graph.node if node.metadata_props or node.doc_string]


def test_factors_need_no_change_of_form(tmp_path: Path) -> None:
    """Rows [S·B, n] are read as [S, B, n] from the first layer to the last, with or without factors on a layer."""
    wide = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 5), nn.GELU(), nn.Linear(5, 3))
    posterior = Rank1(components=2).fit(wide, (X, LABELS), Categorical(), training=QUICK)
    posterior.export(tmp_path / "model.onnx", num_samples=4, seed=3)
    kinds = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert kinds.count("MatMul") == 3 and not {"Reshape", "Gemm", "Expand"} & set(kinds)
    compare(tmp_path / "model.onnx", X, lambda few: posterior.predict(few, 4, seed=3))


def test_fresh_draws_have_the_posteriors_mean_and_covariance(tmp_path: Path) -> None:
    """One linear layer: outputs are Normal, with mean W x + b and variance Σ σ² x² + σ_b², and independent."""
    x, y = rows(12, 3), rows(12, 2, seed=1)
    posterior = KTied().fit(nn.Linear(3, 2), (x, y), Gaussian(std=1.0), training=QUICK).scaled(5.0)
    path = tmp_path / "fresh.onnx"
    posterior.export(path, num_samples=1, sampling="fresh")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    row = rows(1, 3, seed=7)
    drawn = np.concatenate([session.run(["mean"], {"inputs": row.numpy()})[0] for _ in range(10_000)])
    mean = posterior.network(row)[0].detach().numpy()
    weight, bias = (std.detach() for std in posterior.standard_deviations())
    variance = (weight.square() @ row[0].square() + bias.square()).numpy()
    errors = (drawn.mean(0) - mean) / np.sqrt(variance / len(drawn))
    assert np.abs(errors).max() < 5  # standard errors: the runtime has no seed
    covariance = np.cov(drawn.T)
    assert np.diag(covariance) == pytest.approx(variance, rel=5 * np.sqrt(2 / len(drawn)))
    assert abs(covariance[0, 1]) < 5 * np.sqrt(variance.prod() / len(drawn))
    assert len(np.unique(drawn[:, 0])) > 9_900  # float32 has few enough numbers for some to meet


@pytest.mark.parametrize("method", [MeanField(), MCDropout(rate=0.5), Rank1(components=2)])
def test_fresh_draws_differ_and_agree_with_predict(method, tmp_path: Path) -> None:
    if isinstance(method, MeanField) and torch.__version__ < (2, 13):
        pytest.skip("earlier versions cannot store the loop over draws: an error says so")
    posterior, inputs = fitted(method)
    path = tmp_path / "fresh.pt2"
    posterior.export(path, num_samples=40, sampling="fresh")
    first, second = (answers(path, inputs, 12)["probs"] for _ in range(2))
    assert not torch.equal(first, second)
    drawn = posterior.sample_outputs(inputs, 400).softmax(-1)
    spread = drawn.std(0) / 40**0.5
    assert ((first - drawn.mean(0)).abs() < 6 * spread + 1e-5).all()


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.special.i1e(self.layer(x)))


def test_what_cannot_be_exported_is_named_and_no_file_is_touched(tmp_path: Path) -> None:
    posterior = MeanField().fit(Odd(), (X, LABELS), Categorical(), training=QUICK)
    path = tmp_path / "model.onnx"
    path.write_bytes(b"before")
    with pytest.raises(NetworkError, match=r"i1e has no counterpart .*opset 20"):
        posterior.export(path, num_samples=2)
    with pytest.raises(ConfigError, match=r"2 draws of weights take 280 bytes, more than max_bytes=200; raise it"):
        posterior.export(path, num_samples=2, max_bytes=200)
    with pytest.raises(ConfigError, match="would have"):
        posterior.export(tmp_path / "other.pt2", num_samples=2, max_bytes=300)
    assert path.read_bytes() == b"before"
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    posterior, inputs = fitted(Rank1(components=2))
    for path, words in ((tmp_path / "model.pt", ".onnx or .pt2"), (tmp_path / "no" / "model.onnx", "folder")):
        with pytest.raises(ConfigError, match=words):
            posterior.export(path)
    path = tmp_path / "model.pt2"
    with pytest.raises(ConfigError, match='"fixed" or "fresh"'):
        posterior.export(path, sampling="new")  # pyright: ignore[reportArgumentType]
    for method, words in ((DeepEnsemble(members=2), "2 fixed draws"), (Laplace(subset=last_layer), "closed form")):
        with pytest.raises(ConfigError, match=words):
            fitted(method)[0].export(path, sampling="fresh")
    untold = posterior.sampled(2)
    del untold.details["inputs"]
    with pytest.raises(ConfigError, match="example="):
        untold.export(path)
    untold.export(path, example=inputs)
    compare(path, inputs, untold.predict)


def test_the_bytes_of_draws_are_said(tmp_path: Path, capsys) -> None:
    posterior, _ = fitted(MeanField())
    posterior.export(tmp_path / "model.pt2", num_samples=5)
    size = 5 * 4 * sum(parameter.numel() for parameter in posterior.network.parameters())
    assert f"5 draws of weights: {size:,} bytes" in capsys.readouterr().err
