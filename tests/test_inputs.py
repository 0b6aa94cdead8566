"""Inputs of every form: called, mapped, moved, cut and checked."""

import copy
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import dubito
from dubito import (
    MAP,
    Bernoulli,
    Categorical,
    ConfigError,
    DataError,
    Gaussian,
    Laplace,
    NetworkError,
    Training,
    TrainingError,
)
from dubito.inputs import (
    Batch,
    TensorOptions,
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
from dubito.prediction import RealPrediction

CPU = torch.device("cpu")
SINGLE, DOUBLE = TensorOptions(torch.float32, CPU), TensorOptions(torch.float64, CPU)
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
    assert [name for name, _ in named_tensors(TREE)] == ["inputs['ids']", "inputs['pair'][0]", "inputs['pair'][1][0]"]
    doubled = map_tensors(lambda tensor: tensor * 2, TREE)
    assert torch.equal(doubled["pair"][1][0], TREE["pair"][1][0] * 2)
    assert doubled["pair"][1][1] == "mode" and doubled["flag"] is True  # other leaves pass unchanged
    some = take(TREE, torch.tensor([4, 1]))
    assert torch.equal(some["ids"], torch.tensor([4, 1]))
    assert torch.equal(some["pair"][1][0], TREE["pair"][1][0][[4, 1]])
    assert count_rows(TREE) == rows_of(TREE) == 6


@pytest.mark.parametrize("like", [SINGLE, DOUBLE])
def test_floats_take_the_dtype_asked_for_and_nothing_else_does(like: TensorOptions):
    tree = {
        "half": torch.rand(3, dtype=torch.float16),
        "array": np.arange(3.0),
        "ids": torch.arange(3, dtype=torch.int32),
        "mask": np.array([True, False, True]),
        "name": "x",
    }
    moved = to_tensors(tree, like.dtype)
    assert moved["half"].dtype == moved["array"].dtype == like.dtype
    assert moved["ids"].dtype == torch.int32 and moved["mask"].dtype == torch.bool
    assert moved["name"] == "x"
    assert tree["half"].dtype == torch.float16  # the user's own stay as they were


def test_arrays_of_every_layout_become_the_same_tensor():
    plain = np.arange(12.0).reshape(4, 3)
    frozen = plain.copy()
    frozen.flags.writeable = False  # PyTorch warns of such memory, and warnings are errors here
    turned = plain[::-1]
    for array in (frozen, np.asfortranarray(plain), plain.astype(">f8"), turned[::-1], np.broadcast_to(plain, (4, 3))):
        assert torch.equal(to_tensors(array, DOUBLE.dtype), torch.arange(12.0, dtype=torch.float64).reshape(4, 3))
    assert torch.equal(to_tensors(turned, DOUBLE.dtype), torch.tensor(plain).flip(0))
    assert to_tensors(np.array(2.0), DOUBLE.dtype).shape == ()


@pytest.mark.parametrize("array", [np.array(["a", "b"]), np.array([1, None]), np.array(["2020-01-01"], dtype="M8[D]")])
def test_arrays_of_other_things_than_numbers_are_refused(array: np.ndarray):
    with pytest.raises(DataError, match=r"arrays must hold numbers, got dtype .* encode"):
        to_tensors(array, SINGLE.dtype)


def test_the_place_of_a_module():
    assert TensorOptions.of(nn.Linear(2, 2).double()) == DOUBLE
    only_buffers = nn.BatchNorm1d(2, affine=False).double()
    assert TensorOptions.of(only_buffers) == DOUBLE
    assert TensorOptions.of(nn.ReLU()) == TensorOptions(torch.get_default_dtype(), CPU)


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
    with pytest.raises(DataError, match=rf"inputs\['x'\]\[0\] must be finite, got {value} at row 4, position \(1, 2\)"):
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
        ((torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.zeros(3)), "got tuple of length 4"),
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


# -- through the front door --------------------------------------------------------------------------------

ROWS, LABELS = torch.randn(9, 2, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3


def spoiled(tensor: torch.Tensor, row: int, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[row] = value
    return tensor


BAD = {
    "nan inputs": (
        (spoiled(ROWS, 4, NAN), LABELS),
        Categorical(),
        DataError,
        "inputs must be finite, got nan at row 4",
    ),
    "infinite targets": (
        (ROWS, spoiled(ROWS, 2, INF)),
        Gaussian(),
        DataError,
        "targets must be finite, got inf at row 2",
    ),
    "large label": ((ROWS, spoiled(LABELS, 7, 3)), Categorical(), DataError, r"0\.\.2 .* got 3 at row 7"),
    "negative label": ((ROWS, spoiled(LABELS, 7, -1)), Categorical(), DataError, "got -1 at row 7"),
    "real label": ((ROWS, LABELS.float()), Categorical(), DataError, "whole numbers, got torch.float32"),
    "many labels": ((ROWS, LABELS), Bernoulli(), DataError, r"outputs' shape \(9, 3\), got \(9,\)"),
    "no binary": ((ROWS, LABELS[:, None] + torch.zeros(3)), Bernoulli(), DataError, "must be 0 or 1, got 2 at row 2"),
    "words": ((ROWS, ["a"] * 9), Categorical(), DataError, "numbers"),
    "empty": ((ROWS[:0], LABELS[:0]), Categorical(), DataError, "at least one row"),
    "lengths": ((ROWS, LABELS[:5]), Categorical(), DataError, "same length, got 9 and 5"),
    "one axis": ((ROWS, LABELS), Categorical(class_axis=2), NetworkError, "classes on axis 2"),
    "noise": ((ROWS, ROWS), Gaussian(std=(1.0, 2.0)), NetworkError, "std is for 2 outputs"),
    "width": ((ROWS[:, :1], LABELS), Categorical(), DataError, r"cannot read inputs of shape .*\(8, 1\)"),
    "no data": (None, Categorical(), DataError, "must be a pair"),
    "no likelihood": ((ROWS, LABELS), "classification", ConfigError, r"must be an instance such as Categorical\(\)"),
    "class": ((ROWS, LABELS), Categorical, ConfigError, r"add \(\)"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("method", [MAP(), Laplace()], ids=["trained", "post hoc"])
def test_a_fit_refuses_before_work_starts(method, case: str, monkeypatch):
    data, likelihood, error, message = BAD[case]
    monkeypatch.setattr("dubito.method.train", lambda *_, **__: pytest.fail("training started"))
    net = nn.Sequential(nn.Linear(2, 3))
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    with pytest.raises(error, match=message):
        method.fit(net, data, likelihood)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert net.training and all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"seed": 1.5}, ConfigError, "seed must be a whole number"),
        ({"num_data": 0}, ConfigError, "num_data must be a whole number of at least 1"),
        ({"training": 5}, ConfigError, r"training must be a Training"),
        ({"validation": (ROWS, LABELS[:3])}, DataError, "same length, got 9 and 3"),
        ({"validation": (ROWS, LABELS + 1)}, DataError, "got 3 at row 2"),
        ({"validation": 5}, DataError, "validation must be a pair"),
    ],
)
def test_other_arguments_are_refused_as_early(arguments, error, message: str, monkeypatch):
    monkeypatch.setattr("dubito.method.train", lambda *_, **__: pytest.fail("training started"))
    with pytest.raises(error, match=message):
        MAP().fit(nn.Linear(2, 3), (ROWS, LABELS), Categorical(), **arguments)


@pytest.mark.parametrize("net", [nn.ReLU(), None, nn.Linear])
def test_networks_that_cannot_be_fitted(net):
    with pytest.raises(NetworkError, match="the network must"):
        MAP().fit(net, (ROWS, LABELS), Categorical())


class Detached(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


class Widening(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, :1].expand(-1, len(x))


@pytest.mark.parametrize("method", dubito.methods())
def test_every_method_refuses_before_work_what_cannot_be_fitted(method: str, monkeypatch):
    monkeypatch.setattr("dubito.method.train", lambda *_, **__: pytest.fail("training started"))
    refused = {
        "must depend on its trainable parameters": Detached(2, 3),
        "must answer a row alike alone and among others": Widening(2, 3),
    }
    for message, net in refused.items():
        with pytest.raises(NetworkError, match=message):
            dubito.methods()[method].fit(net, (ROWS, LABELS), Categorical())
    with pytest.raises(DataError, match=r"targets must be below 1e\+16 .* got 1e\+30 at row 4"):
        targets = torch.ones(9, 1).index_fill(0, torch.tensor([4]), 1e30)
        dubito.methods()[method].fit(nn.Linear(2, 1), (ROWS, targets), Gaussian())


def test_networks_of_jit_half_precision_and_one_row_under_batch_norm(recwarn):
    with pytest.raises(NetworkError, match=r"compiled by torch\.jit"):
        MAP().fit(torch.jit.trace(nn.Linear(2, 3), ROWS), (ROWS, LABELS), Categorical())  # pyright: ignore
    for method in ("bali", "noisy-kfac"):
        with pytest.raises(NetworkError, match=r"needs float32 or float64, got 'weight' in torch\.bfloat16"):
            dubito.methods()[method].fit(nn.Linear(2, 3).bfloat16(), (ROWS, LABELS), Categorical())
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with pytest.raises(DataError, match="batches of at least two rows in training, got one"):
        MAP().fit(net, (ROWS[:1], LABELS[:1]), Categorical(), training=Training(epochs=1))
    with pytest.raises(TrainingError, match="training ended in weights whose outputs are NaN or infinite"):
        deep = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        MAP().fit(deep, (ROWS, LABELS), Categorical(), training=Training(iterations=1, lr=1e30))


def test_variances_below_zero_do_not_leave():
    """Rounding may leave a covariance of outputs with a little less than nothing on its diagonal."""
    covariance = torch.tensor([[[[-1e-9]], [[2.0]]]])
    prediction = RealPrediction(torch.zeros(1, 2, 1), torch.zeros(1, 1, 1), mean_covariances=covariance)
    assert prediction.epistemic.tolist() == [[0.0], [2.0]] and prediction.std.isfinite().all()


def test_answers_that_are_not_finite_are_refused():
    class Divides(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / 0

    with pytest.raises(NetworkError, match="outputs on the first rows hold NaN or infinity"):
        MAP().fit(Divides(2, 3), (ROWS, LABELS), Categorical())


@pytest.mark.parametrize("row", [1, 8])
def test_loaders_are_checked_batch_by_batch(row: int):
    """Rows are named by their number in the dataset, whatever order training takes them in."""
    for data, message in (
        ((spoiled(ROWS, row, NAN), LABELS), f"must be finite, got nan at row {row}, position"),
        ((ROWS, spoiled(LABELS, row, 7)), f"got 7 at row {row}"),
    ):
        loader = DataLoader(TensorDataset(*data), batch_size=2, shuffle=True)
        with pytest.raises(DataError, match=message):
            MAP().fit(nn.Linear(2, 3), loader, Categorical(), training=Training(epochs=1))


def test_data_that_do_not_tell_their_number_need_it():
    class Stream(IterableDataset):
        def __iter__(self):
            return zip(ROWS, LABELS, strict=True)

    net = nn.Linear(2, 3)
    with pytest.raises(DataError, match="pass num_data="):
        MAP().fit(net, Stream(), Categorical(), training=Training(epochs=1))
    MAP().fit(net, Stream(), Categorical(), training=Training(epochs=1), num_data=9)
    MAP().fit(net, (ROWS, LABELS), Categorical(), training=Training(epochs=1), num_data=100)  # of a larger whole


@pytest.mark.filterwarnings("ignore:the network is no better than a constant")  # it was not trained
@pytest.mark.parametrize("method", [MAP(), Laplace()], ids=["trained", "post hoc"])
def test_a_fit_leaves_the_global_state_alone_whatever_the_loader_draws(method):
    loader = DataLoader(TensorDataset(ROWS, LABELS), sampler=WeightedRandomSampler(torch.ones(9), 9), batch_size=3)
    net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    training = Training(epochs=2) if isinstance(method, MAP) else None
    outputs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        posterior = method.fit(net, loader, Categorical(), training=training, seed=3)
        assert torch.equal(torch.get_rng_state(), state)
        outputs.append(posterior.sample_outputs(ROWS, 1))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_fit_works_where_gradients_are_off(off):
    net = nn.Linear(2, 3)
    with off():
        posterior = MAP().fit(net, (ROWS, LABELS), Categorical(), training=Training(epochs=2))
        assert not torch.is_grad_enabled()
    assert posterior.history[0]["loss"] > posterior.history[1]["loss"]
    assert not posterior.weights()["weight"].is_inference()
