"""Numbers on their way from a device to the host, read when they are there, so that a step waits for no device."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
