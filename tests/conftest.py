"""One thread per worker, as the suite runs in two processes on two cores; and the same numbers in any order.

PyTorch starts the layers of a network from its global generator: without a seed of its own, a test's
network would depend on the tests that ran before it in the same worker.
"""

import signal

import pytest
import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells take Ctrl-C from jobs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order() -> None:
    torch.manual_seed(0)
