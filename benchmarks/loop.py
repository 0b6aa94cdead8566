"""The loop around a MAP step against a hand-written PyTorch loop, on the MLP 784-400-400-10."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from dubito import MAP, Categorical, Training
from dubito.models import mlp

from .bars import Bar, Values, benchmark, interleaved, ratios

EPOCHS = 5
#: By batch: steps, and the most that our loop may take of a hand-written one.
CASES = {1024: (40, 1.05), 32: (600, 1.10)}


def by_hand(net: nn.Module, x: torch.Tensor, y: torch.Tensor, batch: int) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(EPOCHS):
        order = torch.randperm(len(y))
        for start in range(0, len(y), batch):
            rows = order[start : start + batch]
            loss = F.cross_entropy(net(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@benchmark({f"batches of {batch}": Bar(limit, "of a loop by hand") for batch, (_, limit) in CASES.items()})
def loop(rounds: int) -> Values:
    values = {}
    for batch, (steps, _) in CASES.items():
        rows = batch * steps // EPOCHS
        x, y = torch.randn(rows, 784), torch.randint(10, (rows,))
        training = Training(epochs=EPOCHS, batch_size=batch)
        works = {
            "hand": lambda data=(x, y), batch=batch: by_hand(mlp(784), *data, batch),
            "ours": partial(MAP().fit, mlp(784), (x, y), Categorical(), training=training),
        }
        seconds = interleaved(works, rounds, warm=1)
        values[f"batches of {batch}"] = ratios(seconds, "ours", "hand")
    return values
