"""Variances of any number of outputs: last layers of every kind against dense truth, and what a prediction may cost."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from laplace_reference import cnn, dense_covariance, labels, mlp, normal
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dubito import EFB, INF, KFAC, Bernoulli, Categorical, Diagonal, Fisher, Gaussian, Laplace
from dubito.curvature import covering
from dubito.inference.laplace import covariance, linearised, shares
from dubito.inference.laplace.output_gradients import OutputGradients
from dubito.training import Training

pytestmark = pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")

STRUCTURES = [Diagonal(), KFAC(), EFB(), INF(rank=5)]
every_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=str)


def dense_variances(posterior, inputs: Tensor) -> Tensor:
    """Diagonals of J P⁻¹ Jᵀ, [B, E]."""
    dense = dense_covariance(posterior, inputs)
    return dense.flatten(2).flatten(0, 1).diagonal().reshape(dense.shape[:2])


def variances(posterior, inputs: Tensor, max_rows: int = 1000) -> Tensor:
    _, (variance,) = posterior.linearised(inputs)(inputs, [posterior.normals], max_rows, pairs=False)
    return variance


def assert_exact(posterior, inputs: Tensor) -> None:
    truth = dense_variances(posterior, inputs)
    torch.testing.assert_close(variances(posterior, inputs), truth, rtol=1e-10, atol=1e-13)
    _, (pairs,) = posterior.linearised(inputs)(inputs, [posterior.normals], 1000, pairs=True)
    torch.testing.assert_close(pairs.diagonal(dim1=1, dim2=2), truth, rtol=1e-10, atol=1e-13)


# -- last layers ----------------------------------------------------------------------------------------------------


class After(nn.Module):
    """A small network; a function of its own comes after the last layer."""

    def __init__(self, after) -> None:
        super().__init__()
        self.body, self.head, self.after = nn.Linear(4, 5), nn.Linear(5, 4), after

    def forward(self, inputs: Tensor) -> Tensor:
        return self.after(self.head(torch.tanh(self.body(inputs))))


class Turned(nn.Module):
    """A last weight that is stored as inputs × outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight = nn.Linear(4, 5), nn.Parameter(torch.randn(5, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.body(inputs)) @ self.weight


class Twice(nn.Module):
    """The last layer is also used before, as the only other one or beside another."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.body(torch.tanh(self.shared(inputs)))))


class Skipped(nn.Module):
    """The last layer's answers go on into the outputs, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.skip = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        skipped = self.skip(inputs)
        outputs = self.head(torch.tanh(self.body(inputs)))
        outputs += skipped
        return outputs


LAST = {
    "as-it-is": lambda: After(nn.Identity()),
    "alone": lambda: nn.Linear(4, 4),
    "scaled": lambda: After(lambda y: 2 * y),
    "in-place": lambda: After(lambda y: y.mul_(2)),
    "reshaped": lambda: After(lambda y: y.unflatten(1, (2, 2))),
    "turned-around": lambda: After(lambda y: y.unflatten(1, (2, 2)).mT),
    "reversed": lambda: After(lambda y: y.flip(1)),
    "some-of-it": lambda: After(lambda y: y[:, :3]),
    "turned": Turned,
    "twice": Twice,
    "skipped": Skipped,
}


@pytest.mark.parametrize("last", LAST)
@every_structure
def test_last_layers_of_every_kind(structure, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, network = normal(12, 4), LAST[last]().double()
    shape = network(inputs).shape[1:]
    targets = labels(12 * math.prod(shape), 2).reshape(12, *shape)
    posterior = Laplace(structure=structure).fit(network, (inputs, targets), Bernoulli())
    assert_exact(posterior, inputs)
    monkeypatch.setattr(linearised, "TOGETHER", 1)
    torch.testing.assert_close(variances(posterior, inputs), dense_variances(posterior, inputs))


@pytest.mark.parametrize("last", ["as-it-is", "alone", "turned"])
def test_last_layers_too_wide_for_factors(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covering, "LARGEST_SIDE", 2)
    network = LAST[last]().double()
    posterior = Laplace(structure=KFAC()).fit(network, (normal(12, 4), labels(12, 4)), Categorical())
    assert not any(block.kronecker for block in posterior.blocks.values())
    assert_exact(posterior, normal(7, 4, seed=2))


class Pixels(nn.Module):
    """Classes for every position, by a last convolution of groups, strides or none, or by a dense layer."""

    def __init__(self, head: nn.Module, dense: bool) -> None:
        super().__init__()
        self.body, self.head, self.dense = nn.Conv2d(2, 4, 3, padding=1), head, dense

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(inputs))
        return self.head(hidden.flatten(2).mT) if self.dense else self.head(hidden)


HEADS = {
    "1-x-1": lambda: nn.Conv2d(4, 3, 1),
    "3-x-3-in-groups": lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2),
    "with-a-stride": lambda: nn.Conv2d(4, 3, 2, stride=2, bias=False),
    "dense": lambda: nn.Linear(4, 3),
}


@pytest.mark.parametrize("head", HEADS)
@every_structure
def test_dense_outputs(structure, head: str) -> None:
    inputs, network = normal(3, 2, 4, 4), Pixels(HEADS[head](), head == "dense").double()
    targets = torch.zeros_like(network(inputs))
    for subset in (None, ["head"]):
        method = Laplace(structure=structure, subset=subset)
        assert_exact(method.fit(network, (inputs, targets), Bernoulli()), inputs)


def test_more_outputs_than_one_pass_could_keep() -> None:
    inputs = normal(3, 1, 20, 20)
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Tanh(), nn.Conv2d(2, 3, 1)).double()
    targets = labels(1200).reshape(3, 20, 20)
    posterior = Laplace(structure=KFAC()).fit(network, (inputs, targets), Categorical())
    prediction = posterior.predict(inputs[:1], linearised=True)
    variance = dense_variances(posterior, inputs[:1]).reshape(1, 3, 20, 20)
    probs = (network(inputs[:1]).detach() / (1 + math.pi * variance / 8).sqrt()).softmax(1)
    torch.testing.assert_close(prediction.probs, probs)


@pytest.mark.parametrize("network", ["mlp", "pixels"])
def test_a_last_layer_needs_no_backward_pass(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = mlp() if network == "mlp" else Pixels(nn.Conv2d(4, 3, 1), False).double()
    inputs = normal(12, 4) if network == "mlp" else normal(12, 2, 4, 4)
    targets = labels(12) if network == "mlp" else labels(12 * 16).reshape(12, 4, 4)
    last = ["2"] if network == "mlp" else ["head"]
    posterior = Laplace(structure=KFAC(), subset=last).fit(net, (inputs, targets), Categorical())

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a backward pass")

    monkeypatch.setattr(OutputGradients, "backward", refused)
    monkeypatch.setattr(torch.autograd, "backward", refused)
    torch.testing.assert_close(variances(posterior, inputs), dense_variances(posterior, inputs))


# -- pieces ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["BUDGET", "TOGETHER", "CHUNK", "max_rows"])
@pytest.mark.parametrize("size", [1, 1 << 11])
@every_structure
def test_pieces_change_nothing(structure, size: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = normal(9, 2, 6, 5)
    network = nn.Sequential(nn.BatchNorm2d(2), *cnn(5)).double()
    posterior = Laplace(structure=structure).fit(network, (inputs, labels(9, 5)), Categorical())
    expected = variances(posterior, inputs)
    if name != "max_rows":
        for module in (linearised, covariance, shares):
            monkeypatch.setattr(module, name, size, raising=False)
    torch.testing.assert_close(variances(posterior, inputs, size if name == "max_rows" else 1000), expected)
    torch.testing.assert_close(expected, dense_variances(posterior, inputs), rtol=1e-10, atol=1e-13)


def test_sizes_are_known_before() -> None:
    posterior = Laplace().fit(cnn(), (normal(9, 2, 6, 5), labels(9)), Categorical())
    read = posterior.linearised(normal(1, 2, 6, 5))
    sizes = read.measured(normal(1, 2, 6, 5))
    # 3 × 6 positions of 12 inputs and a bias, 2 × 5 positions of two groups of 8, 60 inputs and a bias
    assert sizes.answers == 4 * 3 * 6 + 6 * 2 * 5 + 3
    assert sizes.inputs == 3 * 6 * 13 + 2 * 5 * 2 * 9 + 61
    assert sizes.outputs == sizes.tail == 3 and not sizes.closed
    rows, together, copies = sizes.plan(100, 1000, pairs=False, units=False)
    assert (rows, together) == (100, 3) and copies == 3
    assert sizes.plan(100, 100, pairs=False, units=False)[2] == 1


def test_copies_of_rows_are_counted_by_the_whole_network() -> None:
    inputs, network = normal(9, 2, 6, 5), cnn()
    whole = Laplace().fit(network, (inputs, labels(9)), Categorical())
    last = Laplace(subset=["5"]).fit(network, (inputs, labels(9)), Categorical())
    sizes = last.linearised(inputs).measured(inputs)
    assert sizes.network >= 4 * 3 * 6 + 6 * 2 * 5 + 3 > sizes.answers == 3
    assert sizes.closed and sizes.copies(1) == 1
    assert whole.linearised(inputs).measured(inputs).copies(1) == 3


class Largest(TorchDispatchMode):
    """The largest tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        for tensor in answer if isinstance(answer, tuple | list) else (answer,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return answer


class Reads(TorchFunctionMode):
    """How often numbers are read by the host."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        names = ("item", "tolist", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__", "equal")
        self.count += getattr(func, "__name__", "") in names
        return func(*args, **(kwargs or {}))


@every_structure
def test_nothing_of_size_outputs_squared_per_row_and_at_most_one_number_read(structure) -> None:
    inputs, count = torch.randn(20, 8), 300
    posterior = Laplace(structure=structure).fit(mlp(count, 8).float(), (inputs, labels(20, count)), Categorical())
    read = posterior.linearised(inputs)
    read(inputs, [posterior.normals], 1000, pairs=False)  # what is made once
    with Largest() as made, Reads() as reads:
        read(inputs, [posterior.normals], 1000, pairs=False)
    assert made.numbers <= max(covariance.CHUNK, len(inputs) * count * 9)
    assert made.numbers < len(inputs) * count**2
    assert reads.count == isinstance(structure, INF)


def test_several_threads_predict_what_one_does() -> None:
    inputs = normal(16, 2, 6, 5).float()
    posterior = Laplace(structure=INF(rank=5)).fit(cnn().float(), (inputs, labels(16)), Categorical())

    def work(job: int) -> Tensor:
        return posterior.predict(inputs[: job % 4 + 1], linearised=True).probs

    with ThreadPoolExecutor(8) as threads:
        crowd = list(threads.map(work, range(32)))
    assert all(torch.equal(probs, work(job)) for job, probs in enumerate(crowd))


# -- small differences ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mlp, cnn])
@pytest.mark.parametrize("guard", ["congruence", "clamp"])
def test_sums_of_squares_are_the_same(make, guard, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = normal(12, *((4,) if make is mlp else (2, 6, 5)))
    method = Laplace(structure=INF(rank=5, guard=guard))
    posterior = method.fit(make(), (inputs, labels(12)), Categorical())
    monkeypatch.setattr(covariance, "CANCELLED", math.inf)  # takes every row again
    assert_exact(posterior, inputs)


@pytest.mark.parametrize("scales", [(1.0, 1e-6), (1e6, 1.0), (1e6, 1e-6)], ids=str)
@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")
def test_variances_are_never_negative(scales: tuple[float, float]) -> None:
    inputs = normal(120, 6).float()
    targets = 2 * inputs[:, :1] + 0.1 * normal(120, 1, seed=3).float()
    network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    data = inputs * scales[0], targets * scales[1]
    # Drawn labels: at (1e6, 1e-6) the exact curvature over τ is beyond float64, which the factorisation says.
    posterior = Laplace(structure=INF(), curvature=Fisher()).fit(
        network, data, Gaussian(), training=Training(epochs=2, batch_size=32)
    )
    prediction = posterior.predict(data[0], linearised=True)
    truth = posterior.double().predict(data[0].double(), linearised=True)
    assert (prediction.epistemic > 0).all()
    torch.testing.assert_close(prediction.epistemic.double(), truth.epistemic, rtol=1e-3, atol=0)
    assert prediction.std.isfinite().all()


def test_what_float32_loses_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # One weight vector, known ten thousand times better than its prior says: less than 1e-3 is left of a difference.
    inputs = normal(50, 3).float()
    posterior = Laplace(structure=INF(rank=1.0), prior_precision=0.1).fit(
        nn.Linear(3, 1, bias=False), (inputs, inputs.sum(1, keepdim=True)), Gaussian(std=0.2)
    )
    precise = []
    formed = covariance._SquaresKernel.formed

    def counted(self, *args):
        precise.append(1)
        return formed(self, *args)

    monkeypatch.setattr(covariance._SquaresKernel, "formed", counted)
    found = posterior.predict(inputs, linearised=True).epistemic[:, 0].double()
    assert precise
    matrix = posterior.normals("weight")[0].precision_matrix.double()
    expected = torch.einsum("bi,ij,bj->b", inputs.double(), torch.linalg.inv(matrix), inputs.double())
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)
