"""Several processes as one: shares of rows, sums of gradients, and an end when a peer is gone."""

import atexit
import functools
import json
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import ProcessError


class Processes:
    """The processes of a run; a run of its own has one.

    Args:
        rank: this process's number.
        count: how many there are.
        group: how they reach each other; None is the group of all.
    """

    def __init__(self, rank: int = 0, count: int = 1, group: Any = None) -> None:
        self.rank, self.count, self.group = rank, count, group

    @property
    def first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def share(self, rows: int) -> tuple[int, int]:
        """This process's part of `rows` rows: all parts together are the rows, none is padded."""
        sharing = min(self.count, max(1, rows // 2))  # no part of one row, on which batch norm cannot train
        rank = min(self.rank, sharing)
        return rows * rank // sharing, rows * min(rank + 1, sharing) // sharing

    def sum(self, tensors: list[Tensor]) -> None:
        """Add up the tensors of all processes, in place, in one message."""
        if self.count == 1:
            return
        # In one dtype that holds them all: losses would lose their digits among gradients in half precision.
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
        flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])
        self._guarded(dist.all_reduce, flat)
        start = 0
        for tensor in tensors:
            tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()

    def broadcast(self, tensors: list[Tensor], source: int = 0) -> None:
        """Give every process the tensors of process `source`, in place."""
        if self.count == 1:
            return
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            if whole.numel():
                # As bytes: not every backend knows every dtype.
                self._guarded(dist.broadcast, whole.view(-1).view(torch.uint8), source)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(whole)

    def broadcast_json(self, value: Any, device: torch.device, source: int = 0) -> Any:
        """The plain value of process `source`, as JSON, so that nothing is unpickled."""
        if self.count == 1:
            return value
        raw = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=device)
        size = torch.tensor([len(raw)], device=device)
        self.broadcast([size], source)
        if self.rank != source:
            raw = torch.empty(int(size), dtype=torch.uint8, device=device)
        self.broadcast([raw], source)
        return json.loads(bytes(raw.tolist()).decode())

    def gathered_json(self, value: Any, device: torch.device) -> list[Any]:
        """The plain values of all processes, by their numbers."""
        return [self.broadcast_json(value, device, source) for source in range(self.count)]

    def patient(self) -> "Processes":
        """The same processes, who wait for each other as long as work lasts; one that dies is still noticed."""
        if self.count == 1:
            return self
        return Processes(self.rank, self.count, dist.new_group(timeout=timedelta(days=30)))

    def _guarded(self, operation: Any, *arguments: Any) -> None:
        try:
            operation(*arguments, group=self.group)
        except (RuntimeError, ValueError) as error:
            raise ProcessError(
                f"process {self.rank} of {self.count} lost its peers: one has died or did not answer in time "
                f"({str(error).splitlines()[0]}); start the run again with the same checkpoint= to go on"
            ) from error


def current(timeout: float, device: torch.device) -> Processes:
    """The processes that `torchrun` started, joined on first use; without it this one alone."""
    if not dist.is_available():
        return Processes()
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "MASTER_ADDR" not in os.environ:
            return Processes()
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        except RuntimeError as error:
            raise ProcessError(
                f"the processes did not find each other within {timeout:g} s ({str(error).splitlines()[0]}); "
                "start as many as WORLD_SIZE says, or raise Training(timeout=...)"
            ) from error
        atexit.register(_leave)
    return Processes(dist.get_rank(), dist.get_world_size())


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
