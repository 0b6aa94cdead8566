"""The made-up device sees every kind of read, and nothing else."""

import numpy as np
import pytest
import torch

from dubito import seeds

from .simulated import CUDA, hosted, simulated

VALUES = torch.tensor([[2.0, 0.5], [0.5, 1.0]])

READS = {
    "item": lambda x: x[0, 0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: np.asarray(x),
    "bool": lambda x: bool(x[0, 0] > 0),
    "float": lambda x: float(x[0, 0]),
    "int": lambda x: int(x[0, 0]),
    "format": lambda x: f"{x[0, 0]:.3g}",
    "max of a list": lambda x: max(x[0]),
    "in": lambda x: 2.0 in x,
    "mask": lambda x: x[x > 0.7],
    "assignment by a mask": lambda x: x.clone().__setitem__(x > 0.7, x[0]),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0.7),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "cholesky": lambda x: torch.linalg.cholesky(x),
    "solve": lambda x: torch.linalg.solve(x, x),
    "inverse": lambda x: torch.linalg.inv(x),
    "eigh": lambda x: torch.linalg.eigh(x),
    "svd": lambda x: torch.linalg.svd(x),
    "inside a function of PyTorch": lambda x: torch.distributions.Normal(x, x, validate_args=True),
    "to the host": lambda x: x.cpu(),
    "to the host by name": lambda x: x.to("cpu"),
    "a number to the device": lambda x: torch.tensor(1.0, device=x.device),
    "a number like another": lambda x: x.new_tensor(1.0),
    "a tensor to the device": lambda x: torch.ones(2).to(x.device),
    "a tensor like another": lambda x: torch.ones(2).to(x),
    "row numbers of the host": lambda x: x[torch.tensor([1, 0])],
    "two devices": lambda x: x + torch.ones(2),
    "a generator's number": lambda x: int(torch.randint(9, (), generator=seeds.generator(0, device=CUDA), device=CUDA)),
}
NONE = {
    "host": lambda x: hosted(x.clone()).tolist(),
    "host's own": lambda x: torch.arange(3).tolist(),
    "a host's generator": lambda x: int(torch.randint(9, (), generator=seeds.generator(0))),
    "shape": lambda x: (len(x), x.shape, x.ndim, x.device),
    "rows": lambda x: x[torch.tensor([1, 0], device="cpu").to(x.device, non_blocking=True)],
    "a mask filled": lambda x: x.masked_fill(x > 0.7, 0.0),
    "a mask filled by assignment": lambda x: x.clone().__setitem__(x > 0.7, 0.0),
    "where of two": lambda x: torch.where(x > 0.7, x, 0.0),
    "cholesky without a check": lambda x: torch.linalg.cholesky_ex(x),
    "triangular": lambda x: torch.linalg.solve_triangular(x, x, upper=True),
    "made there": lambda x: torch.full((), 3.0, device=x.device) + x.new_zeros(2),
    "a scalar of the host": lambda x: x + torch.ones(()),
    "gradient": lambda x: (
        torch.autograd.grad(x.clone().requires_grad_().square().sum(), x, allow_unused=True)
        if x.requires_grad
        else None
    ),
}


@pytest.mark.parametrize("kind", READS)
def test_reads_are_seen(kind: str):
    with simulated() as reads:
        READS[kind](VALUES.clone())
    assert reads.total() >= 1
    assert all(read.startswith("test_device_simulated.py") for read in reads)


@pytest.mark.parametrize("kind", NONE)
def test_other_work_is_not(kind: str):
    with simulated() as reads:
        NONE[kind](VALUES.clone())
    assert not reads


def test_numbers_are_real_and_the_device_is_not():
    x = torch.arange(4.0)
    with simulated():
        assert x.device == CUDA and x.is_cuda and torch.zeros(2).device.type == "cpu"
        y = (x * 2).sum()
        assert (x + 1).device == CUDA and hosted(x.clone()).device.type == "cpu"
    assert float(y) == 12.0 and x.device.type == "cpu"
