"""One thread per worker: the suite runs in two processes on two cores."""

import torch

torch.set_num_threads(1)
