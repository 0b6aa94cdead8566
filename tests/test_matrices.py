"""Draws of few rows, many in one pass, are the functions of the networks that the same draws fold into."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import BALI, EFB, INF, KFAC, Categorical, Diagonal, KTied, Laplace, MeanField, Training
from dubito.distributions.two_sided import TwoSided
from dubito.matrices import BlockPosterior, DrawsOfRows
from dubito.method import Method

pytestmark = [
    pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning"),
    pytest.mark.filterwarnings("ignore:BALI treats layers that multiply:dubito.DubitoWarning"),
]

METHODS: dict[str, Method] = {
    "kfac": Laplace(structure=KFAC(), linearised=False),
    "efb": Laplace(structure=EFB(), linearised=False),
    "bali": BALI(effective_data=40.0),
    "diagonal": Laplace(structure=Diagonal(), linearised=False),
    "inf": Laplace(structure=INF(rank=4), linearised=False),
    "mean-field": MeanField(),
    "2-tied": KTied(),
}
methods = pytest.mark.parametrize("method", METHODS)
#: Those whose draws are products from both sides.
FUNCTIONAL = ("kfac", "efb", "bali")


class Turned(nn.Module):
    """A dense layer as GPT-2 writes it, on sequences whose rows and positions it lays flat."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Backwards(nn.Module):
    """Layers that are used in another order than they are held."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(9, 3), nn.Linear(8, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Twice(nn.Module):
    """A layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.inner(x).tanh()).tanh())


class Noisy(nn.Sequential):
    """A network with noise of its own, also in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.3))


class Moody(nn.Module):
    """A network that uses its second layer twice where inputs are large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 9), nn.Linear(9, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second(self.first(x).tanh()).tanh()
        return self.last(self.second(inner) if x.abs().max() > 50 else inner)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 9, bias=False), nn.Tanh(), nn.Linear(9, 3))


#: Networks whose draws at few rows are functions, and those whose draws are written out.
FUNCTIONS = {
    "dense": dense,
    "normed": lambda: nn.Sequential(nn.Linear(8, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Tanh(), nn.Linear(12, 3)
    ),
    "sequence": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), Turned(4, 9), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)),
}
WRITTEN = {"backwards": Backwards, "twice": Twice, "noisy": lambda: Noisy(nn.Linear(8, 3))}


def rows(count: int) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def fitted(method: str, network: nn.Module) -> BlockPosterior:
    x = rows(40)
    training = None if isinstance(METHODS[method], Laplace) else Training(iterations=4, batch_size=20)
    data = (x, (x[:, 0] > 0).long())
    return METHODS[method].fit(network.double(), data, Categorical(), training=training)  # pyright: ignore


@contextmanager
def counted() -> Iterator[list[TwoSided]]:
    """The roots that drew noise for functions."""
    drawing: list[TwoSided] = []
    real = TwoSided.noise

    def noise(self: TwoSided, generator: torch.Generator | None) -> Tensor:
        drawing.append(self)
        return real(self, generator)

    with mock.patch.object(TwoSided, "noise", noise):
        yield drawing


@contextmanager
def counted_passes() -> Iterator[list[int]]:
    """The draws of passes over several of them that came to an end."""
    passes: list[int] = []
    real = BlockPosterior._together

    def together(self: BlockPosterior, context: DrawsOfRows, inputs: Tensor) -> Sequence[Tensor]:
        outputs = real(self, context, inputs)
        passes.append(len(outputs))
        return outputs

    with mock.patch.object(BlockPosterior, "_together", together):
        yield passes


def folded(posterior: BlockPosterior, x: Tensor, num_samples: int, seed: int) -> Tensor:
    return torch.stack([posterior.fold(index, seed=seed)(x) for index in range(num_samples)]).detach()


@methods
@pytest.mark.parametrize("network", FUNCTIONS)
def test_functions_of_few_rows_are_those_of_the_written_weights(method: str, network: str):
    posterior, x = fitted(method, FUNCTIONS[network]()), rows(2)
    with counted() as drawing, counted_passes() as passes:
        outputs = posterior.sample_outputs(x, 5, seed=3)
    dense_layers = {"dense": 3, "normed": 2, "convolution": 1, "sequence": 2}[network]
    assert len(drawing) == (5 * dense_layers if method in FUNCTIONAL else 0)
    assert len(passes) == 1
    # The same noise in another order of products: rounding alone.
    torch.testing.assert_close(outputs, folded(posterior, x, 5, 3), rtol=1e-10, atol=1e-10)
    assert outputs.std(0).min() > 1e-4  # the draws differ


@methods
def test_draws_that_do_not_fit_one_pass_come_in_several(method: str):
    posterior, x = fitted(method, dense()), rows(2)
    once = posterior.sample_outputs(x, 7, seed=3)
    for max_rows in (2, 5, 6):
        torch.testing.assert_close(posterior.sample_outputs(x, 7, seed=3, max_rows=max_rows), once)
    torch.testing.assert_close(posterior.sample_outputs(x, 7, seed=3, max_rows=1), once)  # more rows than a pass takes


@methods
def test_many_rows_take_written_weights(method: str):
    posterior, x = fitted(method, dense()), rows(64)
    with counted_passes() as passes:
        outputs = posterior.sample_outputs(x, 3)
    assert not passes
    torch.testing.assert_close(outputs, folded(posterior, x, 3, 0))


@methods
@pytest.mark.parametrize("network", WRITTEN)
def test_networks_without_a_plain_order_of_layers_take_written_weights(method: str, network: str):
    posterior, x = fitted(method, WRITTEN[network]()), rows(2)
    with counted_passes() as passes:
        outputs = posterior.sample_outputs(x, 3)
    assert not passes
    if network == "noisy":  # noise of the network's own differs from draw to draw, as it always did
        first = posterior.sample_outputs(x, 1)
        torch.testing.assert_close(outputs[:1], first)
    else:
        torch.testing.assert_close(outputs, folded(posterior, x, 3, 0))


@methods
def test_a_network_that_goes_another_way_than_in_the_fit_takes_written_weights(method: str):
    posterior, x = fitted(method, Moody()), 100 * rows(2)
    torch.testing.assert_close(posterior.sample_outputs(x, 3), folded(posterior, x, 3, 0))


def test_sampled_covariances_are_written_out():
    method, data = BALI(effective_data=40.0, covariance="sampled"), (rows(40), (rows(40)[:, 0] > 0).long())
    training = Training(iterations=4, batch_size=20)
    posterior, x = method.fit(dense().double(), data, Categorical(), training=training), rows(2)
    torch.testing.assert_close(posterior.sample_outputs(x, 3), folded(posterior, x, 3, 0))  # pyright: ignore


@methods
def test_gradients_reach_the_inputs(method: str):
    posterior, x = fitted(method, dense()), rows(2).requires_grad_()
    posterior.sample_outputs(x, 2, keep_graph=True).sum().backward()
    gradient, x.grad = x.grad, None
    sum(posterior.fold(index)(x).sum() for index in range(2)).backward()  # pyright: ignore
    torch.testing.assert_close(gradient, x.grad)
