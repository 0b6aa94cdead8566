"""Arguments against their hints, by cases written out; `tests/chaos/calls.py` goes through the whole API."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dubito import Categorical, ConfigError, DataError, NetworkError, UnknownNameError
from dubito.errors import require_positive
from dubito.hints import Checked, checked, require_dense
from dubito.likelihoods import Likelihood

GOOD: list[tuple[Any, Any]] = [
    (int, 3), (int, np.int64(3)), (float, 3), (float, 2.5), (float, np.float32(1)), (float, math.inf), (bool, True),
    (str, "a"), (float | None, None), (Literal["a", 2], 2), (tuple[float, float], (0.9, 0.99)), (tuple[float, ...], []),
    (tuple[float, float], [1, 2]), (Sequence[float], np.ones(3)), (Sequence[int], range(3)), (Sequence[str], ["a"]),
    (Mapping[str, float], {"a": 1}), (Callable[[int], int], len), (Tensor, torch.ones(2)), (Any, object()),
    (nn.Module, nn.Linear(1, 1)), (tuple[tuple[float, ...], ...], np.eye(2)), ("Missing", 3),
]  # fmt: skip
BAD: list[tuple[Any, Any]] = [
    (int, True), (int, 2.5), (int, "3"), (float, True), (float, math.nan), (float, "2"), (float, 1j), (bool, 1),
    (str, 3), (float, None), (Literal["a", 2], "b"), (Literal[1], True), (tuple[float, float], (0.9,)),
    (tuple[float, float], (1, 2, 3)), (tuple[float, float], "ab"), (Sequence[float], ["a"]), (Sequence[str], "abc"),
    (Sequence[int], 3), (Mapping[str, float], {1: 1.0}), (Mapping[str, float], []), (Callable[[int], int], 3),
    (Tensor, [1.0]), (Tensor, torch.tensor([math.nan])), (Tensor, torch.ones(2).to_sparse()),
    (Tensor, torch.ones(2, device="meta")), (Tensor, torch.ones(2) * 1j), (nn.Module, nn.Linear),
    (tuple[Tensor, Tensor], (torch.ones(1), torch.ones(2).to_sparse())), (Sequence[float], np.array(["a"])),
]  # fmt: skip


def taking(hint: Any) -> Callable[[Any], str]:
    def function(value):
        return "taken"

    function.__annotations__["value"] = hint
    return checked(function)


def test_what_hints_let_through():
    for hint, value in GOOD:
        assert taking(hint)(value) == "taken"
    for hint, value in BAD:
        with pytest.raises((ConfigError, DataError, NetworkError), match="value"):
            taking(hint)(value)


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    size: float = 1.0
    names: Sequence[str] = ()
    law: Likelihood = Categorical()

    def __post_init__(self) -> None:
        require_positive(size=self.size)


def test_settings_check_themselves_and_what_they_say_goes_first():
    assert replace(Settings(), size=2).size == 2
    with pytest.raises(ConfigError, match="size must be a finite number above 0, got 'a'"):
        Settings(size="a")  # pyright: ignore
    with pytest.raises(ConfigError, match="names must be a list whose every item is text, got 'abc'"):
        Settings(names="abc")
    with pytest.raises(ConfigError, match=r"law must be .*Categorical\(\).*add \(\) to make one"):
        Settings(law=Categorical)  # pyright: ignore
    with pytest.raises(TypeError, match="unexpected keyword"):
        Settings(colour=3)  # pyright: ignore


def test_words_that_nobody_knows_are_told_the_nearest():
    with pytest.raises(UnknownNameError, match="unknown value 'clam', did you mean 'clamp'"):
        taking(Literal["clamp", "congruence"])("clam")


@checked
def product(first: Tensor, second: Tensor) -> Tensor:
    return first @ second


def test_tensors_that_do_not_meet_and_results_that_are_no_numbers():
    assert torch.equal(product(torch.eye(2), torch.ones(2)), torch.ones(2))
    with pytest.raises(DataError, match=r"product cannot take these tensors .*\(3,\)"):
        product(torch.eye(2), torch.ones(3))
    with pytest.raises(DataError, match="product of these tensors is NaN"):
        product(torch.tensor([[math.inf, -math.inf]]), torch.ones(2))
    assert torch.equal(torch.vmap(product)(torch.ones(3, 2, 2), torch.ones(3, 2)), torch.full((3, 2), 2.0))


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "nested"),
        (torch.ones(2, dtype=torch.complex64), "complex"),
        (torch.ones(2, device="meta"), "meta"),
    ],
)
def test_each_strange_tensor_has_one_error(tensor, word):
    with pytest.raises(DataError, match=f"rows must be a dense tensor of real numbers, got a {word} one"):
        require_dense("rows", tensor)
