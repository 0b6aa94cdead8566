"""A network whose parameters fit and whose forward does not is told by what it answers."""

import random
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import MAP, Categorical, MeanField, StorageError, Training
from dubito.inputs import TensorOptions
from dubito.posterior.fingerprint import described, made

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 3
QUICK = Training(epochs=1)


def network(activation: nn.Module | None = None, late: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, last = nn.Linear(4, 6), nn.Linear(6, 3)
    layers = [("a", first), ("n", nn.LayerNorm(6)), ("act", activation or nn.ReLU()), ("b", last)]
    if late:
        layers[1], layers[2] = layers[2], layers[1]
    return nn.Sequential(OrderedDict(layers))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "p"
    MeanField().fit(network(), (X, Y), Categorical(), training=QUICK).save(path)
    return path


@pytest.mark.parametrize(
    "other",
    [network(nn.Tanh()), network(nn.GELU()), network(nn.LeakyReLU(0.1)), network(nn.Identity()), network(late=True)],
)
def test_another_forward_is_noticed(saved, other):
    with pytest.raises(StorageError, match=r"of another network: .* another activation .* fingerprint=False"):
        dubito.load(saved, other)
    assert dubito.load(saved, other, fingerprint=False).predict(X).probs.isfinite().all()


def test_the_same_network_is_known_again_in_every_precision_and_leaves_all_as_it_was(saved, tmp_path):
    states = torch.get_rng_state(), random.getstate()
    posterior = dubito.load(saved, network())
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        moved = dubito.load(saved, network()).to(dtype)
        moved.save(tmp_path / "moved")
        assert dubito.load(tmp_path / "moved", network().to(dtype)).details == posterior.details
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        dubito.load(saved, network())
    finally:
        torch.set_num_threads(threads)
    now = torch.get_rng_state(), random.getstate()
    assert torch.equal(states[0], now[0]) and states[1] == now[1]


class Reader(nn.Module):
    """Tokens, a mask and numbers, under names and nested."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.words, self.head, self.scale = nn.Embedding(11, 4), nn.Linear(6, 3), scale

    def forward(self, tokens: Tensor, more: dict[str, Tensor], flag: bool) -> Tensor:
        assert tokens.dtype == torch.int64 and more["mask"].dtype == torch.bool and flag is True
        words = (self.words(tokens) * more["mask"].unsqueeze(-1)).sum(1)
        return self.head(torch.cat([words, more["numbers"].log()], 1)) * self.scale


def test_tokens_and_several_inputs_are_known(tmp_path):
    tokens = torch.randint(0, 11, (20, 5), generator=torch.Generator().manual_seed(0))
    inputs = {"tokens": tokens, "more": {"mask": tokens > 2, "numbers": X[:, :2].abs() + 0.1}, "flag": True}
    posterior = MAP().fit(Reader(), (inputs, Y), Categorical(), training=QUICK)
    posterior.save(tmp_path / "p")
    again = made(posterior.details["inputs"], TensorOptions.of(posterior.network))
    assert again["tokens"].shape == (3, 5) and again["tokens"].min() >= 0 and again["tokens"].max() <= 10
    assert again["more"]["numbers"].min() >= 0.1 and again["flag"] is True
    assert torch.equal(dubito.load(tmp_path / "p", Reader()).predict(inputs).probs, posterior.predict(inputs).probs)
    with pytest.raises(StorageError, match="of another network"):
        dubito.load(tmp_path / "p", Reader(2.0))


def test_inputs_are_the_same_for_ever():
    """Files hold the answers to just these numbers."""
    form = described(torch.tensor([[0.0, 4.0], [1.0, -4.0]]))
    assert form == {"tensor": {"shape": [2], "dtype": "float", "low": -4.0, "high": 4.0}}
    golden = [(0.6180339887498949 * n) % 1 for n in range(1, 7)]
    like = TensorOptions(torch.float64, torch.device("cpu"))
    torch.testing.assert_close(made(form, like).flatten().tolist(), [8 * value - 4 for value in golden])
    tokens = described(torch.tensor([[3, 9]]))
    assert made(tokens, like).flatten().tolist() == [round(3 + 6 * value) for value in golden]
    assert described({1: X}) is None and described((X, object())) is None


def test_a_network_that_draws_has_no_fingerprint_and_loads(tmp_path):
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + torch.randn_like(x))

    MAP().fit(Drawing(), (X, Y), Categorical(), training=QUICK).save(tmp_path / "p")
    _, content = dubito.storage.read(tmp_path / "p", "posterior")
    assert "fingerprint" not in content
    dubito.load(tmp_path / "p", Drawing())
