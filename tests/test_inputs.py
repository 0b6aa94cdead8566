"""Inputs of every form: called, mapped, moved, cut and checked."""

from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dubito.errors import DataError, NetworkError
from dubito.inputs import (
    Batch,
    Place,
    call,
    check_finite,
    checked_batch,
    checked_inputs,
    chunks,
    count_rows,
    map_tensors,
    named_tensors,
    rows_of,
    take,
    to_tensors,
)

CPU = torch.device("cpu")
SINGLE, DOUBLE = Place(torch.float32, CPU), Place(torch.float64, CPU)
NAN, INF = float("nan"), float("inf")


def test_inputs_are_handed_over_as_one_several_or_named():
    def add(a, b=10):
        return a + b

    x, y = torch.ones(2), torch.full((2,), 5.0)
    assert torch.equal(call(add, x), x + 10)
    assert torch.equal(call(add, (x, y)), x + y)
    assert torch.equal(call(add, [x, y]), x + y)
    assert torch.equal(call(add, {"b": y, "a": x}), x + y)
    assert torch.equal(call(add, OrderedDict(a=x)), x + 10)


def test_an_answer_is_a_tensor_or_has_logits():
    logits = torch.ones(2)
    assert call(lambda _: SimpleNamespace(logits=logits, loss=None), 0) is logits
    for answer in ((logits,), {"logits": logits}, None, SimpleNamespace(logits=[1.0])):
        with pytest.raises(NetworkError, match=r"must return a tensor .* wrap it"):
            call(lambda _, answer=answer: answer, 0)


TREE = {"ids": torch.arange(6), "pair": (torch.rand(6, 2), [torch.rand(6, 1, 3), "mode"]), "flag": True}


def test_trees_are_walked_mapped_and_cut():
    assert [name for name, _ in named_tensors(TREE)] == [
        "inputs['ids']",
        "inputs['pair'][0]",
        "inputs['pair'][1][0]",
    ]
    doubled = map_tensors(lambda tensor: tensor * 2, TREE)
    assert torch.equal(doubled["pair"][1][0], TREE["pair"][1][0] * 2)
    assert doubled["pair"][1][1] == "mode" and doubled["flag"] is True  # other leaves pass unchanged
    some = take(TREE, torch.tensor([4, 1]))
    assert torch.equal(some["ids"], torch.tensor([4, 1]))
    assert torch.equal(some["pair"][1][0], TREE["pair"][1][0][[4, 1]])
    assert count_rows(TREE) == rows_of(TREE) == 6


@pytest.mark.parametrize("place", [SINGLE, DOUBLE])
def test_floats_take_the_places_dtype_and_nothing_else_does(place: Place):
    tree = {
        "half": torch.rand(3, dtype=torch.float16),
        "array": np.arange(3.0),
        "ids": torch.arange(3, dtype=torch.int32),
        "mask": np.array([True, False, True]),
        "name": "x",
    }
    moved = to_tensors(tree, place)
    assert moved["half"].dtype == moved["array"].dtype == place.dtype
    assert moved["ids"].dtype == torch.int32 and moved["mask"].dtype == torch.bool
    assert moved["name"] == "x"
    assert tree["half"].dtype == torch.float16  # the user's own stay as they were


def test_arrays_of_every_layout_become_the_same_tensor():
    plain = np.arange(12.0).reshape(4, 3)
    frozen = plain.copy()
    frozen.flags.writeable = False  # PyTorch warns of such memory, and warnings are errors here
    turned = plain[::-1]
    for array in (
        frozen,
        np.asfortranarray(plain),
        plain.astype(">f8"),
        turned[::-1],
        np.broadcast_to(plain, (4, 3)),
    ):
        assert torch.equal(to_tensors(array, DOUBLE), torch.arange(12.0, dtype=torch.float64).reshape(4, 3))
    assert torch.equal(to_tensors(turned, DOUBLE), torch.tensor(plain).flip(0))
    assert to_tensors(np.array(2.0), DOUBLE).shape == ()


@pytest.mark.parametrize(
    "array", [np.array(["a", "b"]), np.array([1, None]), np.array(["2020-01-01"], dtype="M8[D]")]
)
def test_arrays_of_other_things_than_numbers_are_refused(array: np.ndarray):
    with pytest.raises(DataError, match=r"arrays must hold numbers, got dtype .* encode"):
        to_tensors(array, SINGLE)


def test_the_place_of_a_module():
    assert Place.of(nn.Linear(2, 2).double()) == DOUBLE
    only_buffers = nn.BatchNorm1d(2, affine=False).double()
    assert Place.of(only_buffers) == DOUBLE
    assert Place.of(nn.ReLU()) == Place(torch.get_default_dtype(), CPU)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"a": torch.zeros(3), "b": torch.zeros(4)}, r"same number of rows, got .*'a'.*3.*'b'.*4"),
        (torch.zeros(()), r"leading axis of rows, got a scalar"),
        ((torch.zeros(3), torch.zeros(())), r"inputs\[1\] must have a leading axis"),
        (torch.zeros(0, 5), "at least one row, got none"),
        ("text", "at least one tensor or array, got str"),
        ({}, "at least one tensor or array, got dict"),
        ([[1.0, 2.0]], "at least one tensor or array"),
    ],
)
def test_inputs_without_rows_are_refused(inputs, message: str):
    with pytest.raises(DataError, match=message):
        checked_inputs(inputs, SINGLE)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_what_is_not_finite_is_refused_with_its_place(value: float, dtype: torch.dtype):
    x = torch.zeros(7, 2, 3, dtype=dtype)
    x[4, 1, 2] = x[6, 0, 0] = value
    with pytest.raises(
        DataError, match=rf"inputs\['x'\]\[0\] must be finite, got {value} at row 4, position \(1, 2\)"
    ):
        check_finite({"ids": torch.arange(7), "x": (x,)})
    vector = x[:, 1, 2].clone()
    with pytest.raises(DataError, match=rf"targets must be finite, got {value} at row 4; remove or impute"):
        check_finite(vector, "targets")


def test_places_are_counted_in_the_users_rows():
    x = torch.zeros(3, 1)
    x[2] = NAN
    for rows, number in ((0, 2), (100, 102), ([7, 3, 55], 55), (range(10, 13), 12)):
        with pytest.raises(DataError, match=f"at row {number}, position"):
            check_finite(x, rows=rows)


def test_long_data_are_searched_to_their_end():
    x = torch.zeros(70_000)
    check_finite(x)
    x[65_536 + 17] = INF
    with pytest.raises(DataError, match="at row 65553"):
        check_finite(x)


def test_whole_and_complex_numbers():
    check_finite(torch.arange(4))
    with pytest.raises(DataError, match="at row 1"):
        check_finite(torch.tensor([1j, complex(0, NAN)]))


def test_a_batch_is_checked_and_moved():
    batch = checked_batch((np.zeros((3, 2)), [1, 0, 1]), SINGLE)
    assert isinstance(batch, Batch)
    assert batch.inputs.dtype == torch.float32 and batch.targets.tolist() == [1, 0, 1]
    assert checked_batch([torch.zeros(2, 1), (0.5, 1.5)], SINGLE).targets.dtype == torch.float32


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(3, 2), r"must be a pair \(inputs, targets\), got Tensor; wrap"),
        ((torch.zeros(3), torch.zeros(3), torch.zeros(3)), "got tuple of length 3"),
        ({"x": 1}, "got dict of length 1"),
        ((torch.zeros(3, 2), torch.zeros(4)), "same length, got 3 and 4"),
        ((torch.zeros(3, 2), torch.tensor(1.0)), "same length, got 3 and a scalar"),
        ((torch.zeros(1, 2), 1), "same length, got 1 and a scalar"),
        ((torch.zeros(0, 2), torch.zeros(0)), "at least one row"),
        ((torch.zeros(2, 2), ["cat", "dog"]), "targets must be .*numbers"),
        ((torch.zeros(2, 2), [[1], [1, 2]]), "targets must be .*numbers"),
        ((torch.zeros(2, 2), None), "targets must be .*numbers"),
        ((torch.zeros(2, 2), {"y": [1, 2]}), "targets must be .*numbers"),
        ((torch.zeros(2, 2), torch.tensor([1.0, NAN])), "targets must be finite, got nan at row 1"),
        ((torch.tensor([[1.0], [INF]]), torch.zeros(2)), "inputs must be finite, got inf at row 1"),
    ],
)
def test_bad_batches_are_refused(batch, message: str):
    with pytest.raises(DataError, match=message):
        checked_batch(batch, SINGLE)


def test_a_number_too_large_for_the_network_is_not_finite_there():
    with pytest.raises(DataError, match="got inf at row 1"):
        checked_inputs(np.array([1.0, 1e300]), SINGLE)
    checked_inputs(np.array([1.0, 1e300]), DOUBLE)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 50))
def test_chunks_are_all_rows_in_order(rows: int, max_rows: int):
    inputs = {"a": torch.arange(rows), "b": (torch.arange(2 * rows).reshape(rows, 2),)}
    pieces = list(chunks(inputs, max_rows))
    assert all(1 <= rows_of(piece) <= max_rows for piece in pieces)
    assert torch.equal(torch.cat([piece["a"] for piece in pieces]), inputs["a"])
    assert torch.equal(torch.cat([piece["b"][0] for piece in pieces]), inputs["b"][0])
