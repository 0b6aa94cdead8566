"""Deep ensembles side by side, in fits of a point estimate as the package was when the bar was set."""

import torch

from dubito import MAP, Categorical, DeepEnsemble, Training

from .bars import Bar, Other, Values, Work, base_source, benchmark, interleaved_with, ratios
from .lean_fits import digits, network

#: Steps of a short and of a longer fit, and their rows per step.
SHORT, LONG, ROWS = 60, 300, 64
BASE_WORKS = """
import torch
torch.set_num_threads(1)
from benchmarks.ensembles import LONG, SHORT, MAP, fit
works = {"MAP, short": fit(MAP(), SHORT), "MAP, long": fit(MAP(), LONG)}
"""


def fit(method: MAP | DeepEnsemble, steps: int) -> Work:
    """A fit of the small network to digits."""
    net, data = network(64, 128, 128, 10), digits()
    training = Training(iterations=steps, batch_size=ROWS)
    return lambda: method.fit(net, data, Categorical(), training=training, progress=False)


@benchmark({"DeepEnsemble(4), 300 steps": Bar(1.7, "MAP fits"), "DeepEnsemble(4), 60 steps": Bar(1.7, "MAP fits")})
def ensembles(rounds: int) -> Values:
    """Digits by 64-128-128-10, steps of 64 rows."""
    torch.set_num_threads(1)
    works = {"short": fit(DeepEnsemble(members=4), SHORT), "long": fit(DeepEnsemble(members=4), LONG)}
    other = Other(BASE_WORKS, base_source())
    seconds = interleaved_with(other, works, rounds)
    other.close()
    return {
        "DeepEnsemble(4), 300 steps": ratios(seconds, "long", "MAP, long"),
        "DeepEnsemble(4), 60 steps": ratios(seconds, "short", "MAP, short"),
    }
