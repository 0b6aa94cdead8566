"""Weights stored as inputs × outputs (`torch.addmm(b, x, W)`) get the posterior of the same weights in nn.Linear."""

import pytest
import torch
from torch import Tensor, nn

from dubito import BALI, EFB, INF, KFAC, Categorical, Diagonal, Laplace, NoisyKFAC, Rank1, Training
from dubito.optim.watch import Watch


class Turned(nn.Module):
    """A dense layer as GPT-2 writes it."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.weight.detach().mT.clone())
        self.bias = nn.Parameter(like.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


METHODS = {
    "kfac": Laplace(structure=KFAC()),
    "efb": Laplace(structure=EFB()),
    "inf": Laplace(structure=INF(rank=0.5)),
    "diagonal": Laplace(structure=Diagonal()),
    "bali": BALI(effective_data=40.0),
    "noisy-kfac": NoisyKFAC(initial_std=None),  # with one, the first draw is laid out as the parameter is
    "rank1": Rank1(components=2),
}


@pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")
@pytest.mark.parametrize("method", METHODS)
def test_turned_weights_have_the_posterior_of_plain_ones(method: str) -> None:
    plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    turned = nn.Sequential(Turned(plain[0]), nn.Tanh(), Turned(plain[2])).double()
    x = torch.randn(40, 3, dtype=torch.float64)
    data, training = (x, (x[:, 0] > 0).long()), Training(iterations=6, batch_size=20, lr=1e-2)
    first, second = (METHODS[method].fit(net, data, Categorical(), training=training) for net in (plain, turned))
    for name, weight in first.weights().items():
        other = second.weights()[name]
        torch.testing.assert_close(other.mT if weight.ndim == 2 else other, weight)
    count = 3000
    draws = [torch.stack([p.draw(s, p.generator(0, s))["0.weight"] for s in range(count)]) for p in (first, second)]
    # Noise meets the weights in another order where the method draws by entries, so moments are compared.
    mean, variance = draws[0].mean(0), draws[0].var(0)
    error = (variance / count).sqrt() + 1e-12
    assert ((draws[1].mean(0).mT - mean) / error).abs().max() < 6.5  # two means, 15 weights
    ratio = draws[1].var(0).mT / variance
    assert ratio.sub(1).abs().max() < 0.2, ratio


def test_rows_squares_and_factors_of_turned_weights() -> None:
    plain = nn.Linear(3, 4).double()
    turned, x = Turned(plain), torch.randn(6, 3, dtype=torch.float64)
    seen = []
    for layer in (plain, turned):
        watch = Watch(layer.parameters())
        with watch.open():
            layer(x).square().mean(1).sum().backward()
        squares = watch.squares(layer.weight)
        seen.append((squares if layer is plain else squares.mT, *watch.factors(layer.weight)))
        assert watch.turned(layer.weight) == (layer is turned)
    for first, second in zip(*seen, strict=True):
        torch.testing.assert_close(first, second)
