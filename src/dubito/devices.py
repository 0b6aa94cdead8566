"""Between host and device: copies that wait for nothing, and numbers read when they are there.

A read of a device's number waits for all work queued before it. So what is to be checked is looked at on the host,
before it is copied, and what training reports is copied behind the step that makes it and read after the next.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def on_host(tensor: Tensor) -> bool:
    """Whether reading the tensor's numbers waits for no device."""
    return tensor.device.type == "cpu"


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on a device, floats or not in this dtype; the host does not wait for a copy to CUDA.

    Elsewhere a copy from the host may be made after the host has changed what is copied.
    """
    return tensor.to(device, dtype, non_blocking=device.type == "cuda" and on_host(tensor))


class HostCopy:
    """A few numbers of a device, copied behind the work that makes them; reading them later waits for nothing else.

    Args:
        numbers: scalars of any device; nobody changes them afterwards.
    """

    def __init__(self, numbers: Sequence[Tensor] | Tensor) -> None:
        self._event: torch.Event | None = None
        if numbers[0].device.type == "cuda":  # elsewhere such copies may be read before they are made
            numbers = torch.stack(tuple(numbers)).to("cpu", non_blocking=True)  # into pinned memory
            self._event = torch.Event("cuda")
            self._event.record()
        self._numbers = numbers

    def read(self) -> list[float]:
        """The numbers."""
        if self._event is not None:
            self._event.synchronize()
        return [number.item() for number in self._numbers]
