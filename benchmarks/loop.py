"""The loop around a MAP step against a hand-written PyTorch loop: CPU time, interleaved, one thread.

Bars: at most 1.05 times at batch 1024, 1.10 times at batch 32 (MLP 784-400-400-10).
"""

import json
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

from dubito import MAP, Categorical, Training
from dubito.models import mlp


def by_hand(net: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int, batch: int) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(epochs):
        order = torch.randperm(len(y))
        for start in range(0, len(y), batch):
            rows = order[start : start + batch]
            loss = F.cross_entropy(net(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def seconds(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(batch: int, steps: int, rounds: int) -> dict[str, float]:
    epochs = 5
    rows = batch * steps // epochs
    x, y = torch.randn(rows, 784), torch.randint(10, (rows,))
    training = Training(epochs=epochs, batch_size=batch)
    ratios, plain = [], []
    for _ in range(rounds):
        hand = seconds(lambda: by_hand(mlp(784), x, y, epochs, batch))
        ours = seconds(lambda: MAP().fit(mlp(784), (x, y), Categorical(), training=training))
        ratios.append(ours / hand)
        plain.append(hand / steps)
    return {"batch": batch, "ratio": statistics.median(ratios), "step_ms": 1e3 * statistics.median(plain)}


def main() -> None:
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    measure(32, 50, 1)  # warm up
    for batch, steps in ((1024, 40), (32, 600)):
        print(json.dumps(measure(batch, steps, rounds)))


if __name__ == "__main__":
    main()
