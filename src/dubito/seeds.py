"""Randomness by name: a seed and a path of labels give a generator, global state is left alone."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from numbers import Integral

import torch
from torch import Tensor

from .errors import ConfigError


def derived(seed: int, *path: int | str) -> int:
    """A seed of 63 bits from `seed` and `path`: other labels give independent streams."""
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ConfigError(f"seed must be a whole number, got {seed!r}")
    text = "/".join(map(str, (seed, *path)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, *path: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on `device` for the stream `path` of `seed`."""
    return torch.Generator(device).manual_seed(derived(seed, *path))


def drawn(generator: torch.Generator | None, bits: int) -> int:
    """A seed of so many bits from a generator, for streams of its own; no device is asked for its number.

    Each call gives another one. Generators of devices count what was drawn from them on the host.
    """
    if generator is None or generator.device.type == "cpu":
        return int(torch.randint(2**bits, (), generator=generator, device="cpu"))
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # counted in fours
    return derived(generator.initial_seed(), "drawn", offset) % 2**bits


class RowNoise:
    """Standard Normal noise for numbered rows: a row's noise does not depend on the batch it comes in.

    Args:
        seed: of the noise.
        path: the stream's labels.
        block: rows drawn together; the last block is kept.
    """

    def __init__(self, seed: int, *path: int | str, block: int = 1024) -> None:
        self.seed, self.path, self.block = seed, path, block
        self._kept: tuple[int, Tensor] | None = None

    def rows(self, start: int, like: Tensor) -> Tensor:
        """Noise for the rows from number `start` on, in the shape, dtype and device of `like`."""
        stop = start + len(like)
        blocks = range(start // self.block, (stop - 1) // self.block + 1)
        noise = torch.cat([self._drawn(number, like) for number in blocks])
        first = start - blocks.start * self.block
        return noise[first : first + len(like)]

    def _drawn(self, number: int, like: Tensor) -> Tensor:
        shape = (self.block, *like.shape[1:])
        if self._kept is None or self._kept[0] != number or self._kept[1].shape != shape:
            stream = generator(self.seed, *self.path, number, device=like.device)
            self._kept = number, torch.randn(shape, generator=stream, dtype=like.dtype, device=like.device)
        return self._kept[1]


#: Held by whoever has put the global state aside: it is one for all threads.
_global_state = threading.RLock()


@contextmanager
def forked(seed: int, *path: int | str, device: torch.device | str = "cpu") -> Iterator[None]:
    """Run code that draws from the global state (a network's own dropout) under a derived seed.

    The global state of the CPU and of `device` is put back afterwards; other devices are not touched. Threads wait
    for each other here.
    """
    device = torch.device(device)
    elsewhere = device.type != "cpu"
    devices = [device] if elsewhere else []
    with _global_state, torch.random.fork_rng(devices=devices, device_type=device.type if elsewhere else "cuda"):
        reseed(derived(seed, *path), device)
        yield


def state(device: torch.device) -> list[bytes]:
    """The global state of the CPU and of `device`, to compare."""
    states = [torch.default_generator.get_state()]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        states.append(module.get_rng_state(device) if device.type != "mps" else module.get_rng_state())
    return [bytes(state.cpu().numpy()) for state in states]


def reseed(seed: int, device: torch.device) -> None:
    """Seed the global state of the CPU and of `device` alone; `torch.manual_seed` would reach every device."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        module = torch.get_device_module(device)
        # `manual_seed` reaches the current device, which need not be this one; MPS knows a single device.
        with module.device(device) if hasattr(module, "device") else nullcontext():
            module.manual_seed(seed)
