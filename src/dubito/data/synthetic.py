"""The synthetic sets of the papers. Draw i of a set is a stream of its own; the test part is a fresh draw.

The papers define the training points alone; `TEST_ROWS` further points of the same law make the test part.
"""

from collections.abc import Callable

import numpy as np

from dubito.errors import require_extra

from .registry import Pair, Raw

TEST_ROWS = 1000

Law = Callable[[np.random.Generator, int], Pair]


def drawn(name: str, law: Law, default: int) -> Callable[[int, int | None], Raw]:
    """The builder of a set of `default` points that follow `law`."""

    def build(split: int, num_data: int | None) -> Raw:
        from dubito import seeds  # with PyTorch, which the list of data sets does without

        rows = default if num_data is None else num_data
        train, test = (
            law(np.random.default_rng(seeds.derived(split, name, part)), count)
            for part, count in (("train", rows), ("test", TEST_ROWS))
        )
        names = ("x",) if train[0].shape[1] == 1 else ("x1", "x2")
        return Raw(train=train, test=test, feature_names=names)

    return build


def sinc(stream: np.random.Generator, rows: int) -> Pair:
    """f(x) = b·sin(ax)/(ax) + c, a = 20, b = 2, c = −1; x ~ U(−1, 1), noise 0.1 [BALI, App. H.1]."""
    x = stream.uniform(-1, 1, (rows, 1))
    clean = 2 * np.sinc(20 * x / np.pi) - 1  # numpy's sinc(t) is sin(πt)/(πt), defined at 0
    return x, clean + stream.normal(0, 0.1, (rows, 1))


def sines_trend(stream: np.random.Generator, rows: int) -> Pair:
    """f(x) = a·sin(2πx) + b·sin(4πx) + c·x, a = b = 0.3, c = 1, noise 0.02 [BALI, App. H.1].

    x is uniform over [−1, −0.25] and [0.25, 1], which are equally long: a magnitude and a sign.
    """
    x = stream.uniform(0.25, 1, (rows, 1)) * stream.choice([-1.0, 1.0], (rows, 1))
    clean = 0.3 * np.sin(2 * np.pi * x) + 0.3 * np.sin(4 * np.pi * x) + x
    return x, clean + stream.normal(0, 0.02, (rows, 1))


def two_moons(stream: np.random.Generator, rows: int) -> Pair:
    """Two half circles with noise 0.2 on the inputs, one class each [BALI, Section 5.1, App. H.1]."""
    datasets = require_extra("sklearn.datasets", "cli", "'two-moons'")
    inputs, classes = datasets.make_moons(n_samples=rows, noise=0.2, random_state=int(stream.integers(2**32)))
    return np.asarray(inputs), np.asarray(classes)


def cubic(stream: np.random.Generator, rows: int) -> Pair:
    """Cubic: x ~ U(−4, 4), y ~ N(x³, 3²) [INF, Section 4.1]."""
    x = stream.uniform(-4, 4, (rows, 1))
    return x, stream.normal(x**3, 3)
