"""The loop's own cost on a small network, where a device would wait for Python: beside one by hand with fused Adam."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from dubito import MAP, Categorical, Training

from .bars import Bar, Values, benchmark, interleaved, ratios

ROWS, BATCH = 1792, 64
#: By the number of steps: the most of a loop by hand. In a short fit its checks and copies of the network count too.
STEPS = {280: 1.2, 60: None}


def small() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )  # fmt: skip


def by_hand(x: torch.Tensor, y: torch.Tensor, steps: int) -> None:
    net = small()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    for step in range(steps):
        place = step % (ROWS // BATCH) * BATCH
        if place == 0:
            order = torch.randperm(len(y))
        rows = order[place : place + BATCH]  # pyright: ignore[reportPossiblyUnboundVariable]
        loss = F.cross_entropy(net(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@benchmark({f"{steps} steps": Bar(limit, "of a loop by hand, fused Adam") for steps, limit in STEPS.items()})
def lean_loop(rounds: int) -> Values:
    x, y = torch.randn(ROWS, 64), torch.randint(10, (ROWS,))
    values = {}
    for steps in STEPS:
        training = Training(iterations=steps, batch_size=BATCH)
        works = {
            "hand": partial(by_hand, x, y, steps),
            "ours": lambda training=training: MAP().fit(small(), (x, y), Categorical(), training=training),
        }
        values[f"{steps} steps"] = ratios(interleaved(works, rounds, warm=1), "ours", "hand")
    return values
