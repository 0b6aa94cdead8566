"""Fits that work layer by layer, in fits and steps of a point estimate as the package was when the bars were set."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from dubito import BALI, MAP, Categorical, NoisyKFAC, Training  # noqa: F401 (MAP: for the other version)
from dubito.method import Method

from .bars import Bar, Other, Values, Work, base_source, benchmark, interleaved_with, ratios

#: Steps of a fit, and its rows per step.
STEPS, ROWS = 60, 64
#: A wide network, rows per step, and the steps whose cost is taken: those after the first, which factorise every time.
WIDTH, WIDE_ROWS, FIRST, LAST = 1024, 128, 8, 24
BASE_WORKS = """
from benchmarks.lean_fits import digits, wide, MAP, fit
works = {"MAP fit": fit(MAP(), *digits()), "MAP, first": wide(MAP(), 8), "MAP, all": wide(MAP(), 24)}
"""


def network(*widths: int) -> nn.Sequential:
    """An MLP."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def digits() -> tuple[Tensor, Tensor]:
    """Images of 8 x 8 and what they show."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.data / 16).float(), torch.tensor(data.target)


def fit(method: Method, x: Tensor, y: Tensor) -> Work:
    """A fit of the small network."""
    net, training = network(64, 128, 128, 10), Training(iterations=STEPS, batch_size=ROWS)
    return lambda: method.fit(net, (x, y), Categorical(), training=training, progress=False)


def wide(method: Method, steps: int) -> Work:
    """Some steps of the wide network."""
    stream = torch.Generator().manual_seed(0)
    data = torch.randn(512, WIDTH, generator=stream), torch.randint(10, (512,), generator=stream)
    net, training = network(WIDTH, WIDTH, WIDTH, 10), Training(iterations=steps, batch_size=WIDE_ROWS)
    return lambda: method.fit(net, data, Categorical(), training=training, progress=False)


@benchmark(
    {
        "BALI, default fit": Bar(5.0, "MAP fits"),
        "BALI, effective data given": Bar(None, "MAP fits"),
        "Noisy K-FAC": Bar(6.0, "MAP fits"),
        "BALI, width 1,024": Bar(8.0, "MAP steps"),
        "BALI, width 1,024, factorised at every step": Bar(None, "MAP steps"),
    }
)
def lean_fits(rounds: int) -> Values:
    """Digits by 64-128-128-10, 60 steps of 64 rows; 1024-1024-1024-10, steps of 128 rows."""
    torch.set_num_threads(1)
    given, single = BALI(effective_data=1400.0), BALI(effective_data=500.0, refactor_every=1)
    fits = {"BALI, default fit": BALI(), "BALI, effective data given": given, "Noisy K-FAC": NoisyKFAC()}
    works = {name: fit(method, *digits()) for name, method in fits.items()}
    several = {"BALI, width 1,024": BALI(effective_data=500.0), "BALI, width 1,024, factorised at every step": single}
    for name, method in several.items():
        works |= {f"{name}, first": wide(method, FIRST), f"{name}, all": wide(method, LAST)}
    other = Other(f"import torch\ntorch.set_num_threads(1)\n{BASE_WORKS}", base_source())
    seconds = interleaved_with(other, works, rounds)
    other.close()
    values = {name: ratios(seconds, name, "MAP fit") for name in fits}
    for name in several:
        spent = [_difference(seconds, case) for case in (name, "MAP")]
        values[name] = [value / unit for value, unit in zip(*spent, strict=True)]
    return values


def _difference(seconds: Values, name: str) -> list[float]:
    """What the steps after the first took."""
    return [whole - part for whole, part in zip(seconds[f"{name}, all"], seconds[f"{name}, first"], strict=True)]
