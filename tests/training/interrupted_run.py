"""A run that is long enough to be interrupted: `python interrupted_run.py checkpoint`."""

import signal
import sys
import time
from pathlib import Path

import torch
from examples import data, with_statistics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from dubito import Categorical, MeanField, Training


class Slow(nn.Module):
    """A network that takes its time in training."""

    pause = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = with_statistics()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.pause)
        return self.inner(inputs)


def fit(checkpoint: Path | None, pause: float = 0.0, workers: int = 0):
    Slow.pause = pause
    rows = Subset(TensorDataset(*data(40)), range(40))
    loader = DataLoader(rows, batch_size=8, num_workers=workers)
    training = Training(iterations=80, lr=0.01, checkpoint_minutes=0)
    return MeanField().fit(Slow(), loader, Categorical(), training=training, checkpoint=checkpoint)


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells take it from jobs in the background
    fit(Path(sys.argv[1]), pause=0.05, workers=2)
