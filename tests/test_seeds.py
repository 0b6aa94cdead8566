"""Randomness by name: streams that repeat, differ from each other, and leave the global state alone."""

import hashlib
import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from dubito import seeds
from dubito.errors import ConfigError


def test_derived_seeds_are_a_hash_of_the_path():
    digest = hashlib.blake2b(b"3/draw/7", digest_size=8).digest()
    assert seeds.derived(3, "draw", 7) == int.from_bytes(digest, "little") // 2


@settings(deadline=None)
@given(st.integers(-(2**70), 2**70), st.integers(0, 1000), st.integers(0, 1000))
def test_derived_seeds_differ_and_fit_a_generator(seed: int, one: int, other: int):
    value = seeds.derived(seed, "draw", one)
    assert 0 <= value < 2**63
    assert (value == seeds.derived(seed, "draw", other)) == (one == other)
    assert value != seeds.derived(seed, "noise", one)
    assert value != seeds.derived(seed + 1, "draw", one)


@pytest.mark.parametrize("seed", [1.0, "1", None, True, float("nan")])
def test_seeds_are_whole_numbers(seed):
    with pytest.raises(ConfigError, match="seed must be a whole number, got"):
        seeds.derived(seed)


def test_numpy_numbers_are_whole_numbers_too():
    assert seeds.derived(np.int64(5), "a") == seeds.derived(5, "a")


def test_streams_repeat_and_are_independent():
    state = torch.get_rng_state()
    count = 20_000
    one, again, other = (
        torch.randn(count, generator=seeds.generator(0, "draw", index), dtype=torch.float64) for index in (0, 0, 1)
    )
    assert torch.equal(one, again)
    # The correlation of independent standard Normals has a standard error of 1/√n; five of them.
    assert abs((one * other).mean()) < 5 / math.sqrt(count)
    assert torch.equal(torch.get_rng_state(), state)


def test_forked_runs_under_a_derived_seed_and_puts_the_state_back():
    torch.manual_seed(5)
    state = torch.get_rng_state()

    def dropped(*path) -> torch.Tensor:
        with seeds.forked(*path):
            return F.dropout(torch.ones(1000), 0.5)

    first = dropped(1, "a")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(dropped(1, "a"), first)
    assert not torch.equal(dropped(1, "b"), first)
    assert not torch.equal(dropped(2, "a"), first)


def test_forked_puts_the_state_back_after_an_error():
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="inside"), seeds.forked(0):
        torch.rand(3)
        raise RuntimeError("inside")
    assert torch.equal(torch.get_rng_state(), state)


def test_reseed_reaches_the_named_device_and_not_the_current_one(monkeypatch):
    class Accelerator:
        current, seeded = 0, {}

        @staticmethod
        @contextmanager
        def device(device: torch.device):
            Accelerator.current = device.index
            yield
            Accelerator.current = 0

        @staticmethod
        def manual_seed(seed: int) -> None:
            Accelerator.seeded[Accelerator.current] = seed

    monkeypatch.setattr(torch, "get_device_module", lambda device: Accelerator)
    with torch.random.fork_rng(devices=[], device_type="cuda"):
        seeds.reseed(17, torch.device("cuda", 1))
        drawn = torch.rand(3)
        torch.manual_seed(17)
        assert torch.equal(torch.rand(3), drawn)
    assert Accelerator.seeded == {1: 17}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rows_noise_does_not_depend_on_its_batch(dtype: torch.dtype):
    def rows(start: int, count: int, **kwargs) -> torch.Tensor:
        return seeds.RowNoise(3, "labels", block=8, **kwargs).rows(start, torch.empty(count, 2, 3, dtype=dtype))

    whole = rows(0, 50)
    assert whole.shape == (50, 2, 3) and whole.dtype == dtype
    for size in (1, 7, 8, 9, 50):
        stream = seeds.RowNoise(3, "labels", block=8)
        pieces = [stream.rows(start, whole[start : start + size]) for start in range(0, 50, size)]
        assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(rows(13, 4), whole[13:17])
    assert len(whole.flatten().unique()) == whole.numel()  # no block is repeated
    assert not torch.equal(seeds.RowNoise(3, "other", block=8).rows(0, whole), whole)


def test_row_noise_is_standard_normal():
    noise = seeds.RowNoise(0, "labels").rows(0, torch.empty(5000, 4, dtype=torch.float64))
    count = noise.numel()
    assert abs(noise.mean()) < 5 / math.sqrt(count)  # standard error of the mean: 1/√n
    assert abs(noise.var() - 1) < 5 * math.sqrt(2 / count)  # and of the variance: √(2/n)


def test_row_noise_follows_the_shape_of_the_rows():
    noise = seeds.RowNoise(0, "labels")
    assert noise.rows(0, torch.empty(4, 3)).shape == (4, 3)
    assert noise.rows(0, torch.empty(4, 5, 2)).shape == (4, 5, 2)
    assert torch.equal(noise.rows(0, torch.empty(4, 3)), seeds.RowNoise(0, "labels").rows(0, torch.empty(4, 3)))
