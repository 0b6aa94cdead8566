"""A run that was ended at any moment and started again ends where the uninterrupted run ends, bit for bit."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import interrupted_run
import numpy as np
import pytest
import torch
from examples import Noisy, data, fresh, mlp, same, step_in, with_statistics
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from dubito import (
    MAP,
    Categorical,
    ConfigError,
    DeepEnsemble,
    Gaussian,
    Interrupted,
    Laplace,
    MCDropout,
    MeanField,
    StorageError,
    Terminated,
    Training,
    TrainingError,
    storage,
)
from dubito.inference.map import MAPObjective
from dubito.inputs import Batch, TensorOptions
from dubito.method import TrainedMethod
from dubito.sources import as_source
from dubito.storage import whole
from dubito.training import (
    SGD,
    Cosine,
    EarlyStopping,
    GradientStepper,
    Plan,
    Processes,
    Run,
    Stepper,
    StepRecord,
    train,
)
from dubito.training import checkpoint as checkpoints
from dubito.training.loop import Loop
from dubito.training.members import MemberStepper
from dubito.training.progress import Reached, listened

HERE = Path(__file__).parent
QUICK = Training(epochs=2, batch_size=8, lr=0.05)
EVERY_STEP = dataclasses.replace(QUICK, checkpoint_minutes=0)


class Crash(BaseException):
    """What no code under test catches, as it cannot catch a power cut."""


def crashing(monkeypatch, last: int) -> list[int]:
    """Let the process die right after `last` checkpoints were written; returns the steps they were written at."""
    steps, plain = [], checkpoints.save

    def save(path, tensors, content) -> None:
        plain(path, tensors, content)
        steps.append(content["progress"]["step"])
        if len(steps) == last:
            raise Crash

    monkeypatch.setattr(checkpoints, "save", save)
    return steps


def images() -> nn.Module:
    return fresh(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)))


def early(path=None):
    x, y = data(60)
    training = Training(
        epochs=7,
        batch_size=8,
        lr=0.3,
        optimizer=SGD(momentum=0.9, nesterov=True),
        schedule=Cosine(),
        accumulate=2,
        checkpoint_minutes=0,
        early_stopping=EarlyStopping(patience=2, num_samples=2),
    )
    return MAP().fit(
        with_statistics(), (x[:21], y[:21]), Categorical(), training=training, validation=(x[21:], y[21:]),
        checkpoint=path,
    )  # fmt: skip


def augmented(path=None):
    loader = DataLoader(Noisy(*data(21)), batch_size=8, shuffle=True)
    training = Training(epochs=3, lr=0.05, warmup=1, clip_norm=1.0, checkpoint_minutes=0)
    return MeanField().fit(with_statistics(), loader, Categorical(), training=training, checkpoint=path)


def images_last(path=None):
    x = torch.randn(12, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    training = Training(iterations=5, batch_size=8, channels_last=True, checkpoint_minutes=0)
    return MeanField().fit(images(), (x, data(12)[1]), Categorical(), training=training, checkpoint=path)


def half(path=None):
    x, _ = data(21)
    training = Training(iterations=7, batch_size=8, precision="fp16", checkpoint_minutes=0)
    net = fresh(lambda: nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)))
    net[0].weight = nn.Parameter(net[0].weight.detach().t().contiguous().t())  # its memory runs down the columns
    return MCDropout(rate=0.3).fit(net, (x, x[:, :2]), Gaussian(), training=training, checkpoint=path)


@pytest.mark.parametrize("fit", [early, augmented, images_last, half])
def test_a_run_goes_on_from_every_checkpoint(fit, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # hundreds of files, and no power cut here
    whole = fit()
    with monkeypatch.context() as patch:
        steps = crashing(patch, 10**9)
        assert same(fit(tmp_path / "whole"), whole)  # writing changes nothing
    assert steps[0] == 0 and set(steps) == set(range(max(steps) + 1)) and max(steps) >= 5
    for last in range(1, len(steps)):
        path = tmp_path / f"{last}"
        with monkeypatch.context() as patch:
            crashing(patch, last)
            with pytest.raises(Crash):
                fit(path)
        again = fit(path)
        assert same(again, whole), f"killed at step {steps[last - 1]}"
        assert again.history == whole.history
    assert {path.name for path in tmp_path.iterdir()} == {"whole", *map(str, range(1, len(steps)))}


def test_a_finished_run_is_not_run_again(tmp_path, monkeypatch):
    path = tmp_path / "c.safetensors"
    first = early(path)
    monkeypatch.setattr(GradientStepper, "step", None)  # would fail if called
    again = early(path)
    assert same(first, again) and first.history == again.history


def test_when_checkpoints_are_written(tmp_path, monkeypatch):
    path, clock = tmp_path / "c.safetensors", [0.0]
    plain = GradientStepper.step

    def step(self, *args):
        clock[0] += 60.0
        return plain(self, *args)

    monkeypatch.setattr(GradientStepper, "step", step)
    monkeypatch.setattr("dubito.training.loop.time.monotonic", lambda: clock[0])
    steps = crashing(monkeypatch, 10**9)
    training = dataclasses.replace(QUICK, checkpoint_minutes=3)
    MAP().fit(mlp(), data(), Categorical(), training=training, checkpoint=path)
    assert steps == [0, 3, 6, 8]  # at the start, every third minute, and at the end
    with safe_open(path, "pt") as file:
        assert set(file.metadata()) == {"dubito"}
        header = json.loads(file.metadata()["dubito"])
        assert header["kind"] == "checkpoint" and len(header["sha256"]) == 64
        assert torch.equal(file.get_tensor("stepper/0.step"), torch.tensor(8.0))
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def frozen() -> nn.Module:
    net = mlp()
    net[0].requires_grad_(False)
    return net


def in_part(net: nn.Module) -> nn.Module:
    net[1].eval()
    return net


X, Y = data()
BASE = {
    "method": MAP(),
    "net": mlp,
    "data": (X, Y),
    "likelihood": Categorical(),
    "training": EVERY_STEP,
    "seed": 0,
    "validation": None,
    "num_data": None,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"training": dataclasses.replace(EVERY_STEP, lr=0.06)}, r"training\.lr was 0\.05 there and is 0\.06"),
        ({"training": dataclasses.replace(EVERY_STEP, batch_size=9)}, r"training\.batch_size was 8 there and is 9"),
        (
            {"training": dataclasses.replace(EVERY_STEP, optimizer=SGD(momentum=0.9, nesterov=True))},
            r"training\.optimizer\.type was 'Adam'",
        ),
        ({"training": dataclasses.replace(EVERY_STEP, kl=0.5)}, r"training\.kl\.weight was 1\.0 there and is 0\.5"),
        ({"training": dataclasses.replace(EVERY_STEP, epochs=3)}, r"training\.epochs was 2 there and is 3"),
        ({"method": MAP(prior_std=1.0)}, r"method\.prior_std was None there and is 1\.0"),
        ({"method": MCDropout()}, r"method\.type was 'MAP' there and is 'MCDropout'"),
        ({"likelihood": Categorical(class_axis=-1)}, r"likelihood\.class_axis was 1 there and is -1"),
        ({"seed": 1}, r"seed was 0 there and is 1"),
        ({"num_data": 99}, r"num_data was 27 there and is 99"),
        ({"data": (X + 1e-6, Y)}, r"data was '.*' there and is '"),
        ({"data": (X, Y.flip(0))}, r"data was '.*' there and is '"),
        ({"validation": (X, Y)}, r"validation was None there and is '"),
        (
            {"net": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))},
            r"network\.0\.out_features was 9 there and is 8",
        ),
        (
            {"net": lambda: nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))},
            r"network\.1\.class was 'nn\.ReLU' there and is 'nn\.Tanh' here",
        ),
        ({"net": lambda: mlp().double()}, r"data was"),
        ({"net": frozen}, r"tensors\.network\.0\.weight was '\(9, 4\) torch\.float32 trained' there"),
        ({"net": lambda: in_part(mlp())}, r"network\.1\.evaluation mode was False there and is True"),
    ],
)
def test_checkpoints_of_other_runs_are_refused(change, named, tmp_path):
    def fit(*, method, net, data, likelihood, training, seed, validation, num_data):
        return method.fit(
            net(), data, likelihood, training=training, seed=seed, validation=validation, num_data=num_data,
            checkpoint=tmp_path / "c",
        )  # fmt: skip

    fit(**BASE)
    before = (tmp_path / "c").read_bytes()
    with pytest.raises(StorageError, match=named) as caught:
        fit(**{**BASE, **change})
    assert "belongs to another run" in str(caught.value) and "another path" in str(caught.value)
    assert (tmp_path / "c").read_bytes() == before
    patient = dataclasses.replace(BASE["training"], timeout=9.0, checkpoint_minutes=7)  # change no result
    fit(**{**BASE, "training": patient})


class Act(nn.Module):
    """A user's own activation; what it prints says nothing of its setting."""

    def __init__(self, k: float) -> None:
        super().__init__()
        self.k = k

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.k * inputs)


class Listed(Dataset):
    """Rows that are read one by one."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def changed(row: int = 19) -> tuple[Tensor, Tensor]:
    """The same rows but for one label."""
    x, y = data()
    y[row] = (y[row] + 1) % 3
    return x, y


def weighted(rows: tuple[Tensor, Tensor], weights: list[float]) -> DataLoader:
    """A loader with an order of its own."""
    stream = torch.Generator().manual_seed(3)
    return DataLoader(Listed(*rows), batch_size=8, sampler=WeightedRandomSampler(weights, 24, generator=stream))


def with_act(k: float) -> nn.Module:
    return fresh(lambda: nn.Sequential(nn.Linear(4, 9), Act(k), nn.Linear(9, 3)))


def other_weights() -> nn.Module:
    net = mlp()
    with torch.no_grad():
        net[2].bias[1] += 1e-6
    return net


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({}, {"net": other_weights}, r"first weights\.2\.bias was '"),
        ({"net": lambda: with_act(1)}, {"net": lambda: with_act(5)}, r"network\.1\.k was 1 there and is 5 here"),
        ({"data": Listed(*data())}, {"data": Listed(*changed())}, r"data was '27 rows: inputs (\w+), targets"),
        ({"data": weighted(data(), [1.0] * 27)}, {"data": weighted(changed(), [1.0] * 27)}, "data was '27 rows"),
        ({"data": weighted(data(), [1.0] * 27)}, {"data": weighted(data(), [2.0] * 27)}, "order BatchSampler"),
        ({"data": Noisy(*data())}, {"data": Noisy(*changed())}, r"inputs \(not compared: drawn anew"),
        ({"validation": Listed(*data())}, {"validation": Listed(*changed())}, r"validation was '27 rows"),
    ],
)  # fmt: skip
def test_no_run_goes_on_from_anothers_weights_settings_or_rows(first, second, named, tmp_path):
    def fit(net=mlp, data=BASE["data"], validation=None):
        training = dataclasses.replace(QUICK, batch_size=None, epochs=1)
        return MAP().fit(
            net(), data, Categorical(), training=training, validation=validation, checkpoint=tmp_path / "c"
        )

    posterior = fit(**first)
    assert same(fit(**first), posterior)  # its own run goes on
    with pytest.raises(StorageError, match=named):
        fit(**second)


def test_checkpoints_that_told_less_are_refused(tmp_path):
    fit = partial(MAP().fit, mlp(), data(), Categorical(), training=QUICK, checkpoint=tmp_path / "c")
    fit()
    tensors, content = storage.read(tmp_path / "c", "checkpoint")
    del content["fingerprint"]["revision"], content["fingerprint"]["first weights"]
    storage.write(tmp_path / "c", "checkpoint", tensors, content)
    with pytest.raises(StorageError, match=r"another version of dubito.*another path"):
        fit()


def test_attributes_that_another_pytorch_lacks_are_no_difference(tmp_path):
    fit = partial(MAP().fit, data=data(), likelihood=Categorical(), training=QUICK, checkpoint=tmp_path / "c")
    fit(with_act(1))
    tensors, content = storage.read(tmp_path / "c", "checkpoint")
    content["fingerprint"]["network"]["0"]["novelty"] = 3
    storage.write(tmp_path / "c", "checkpoint", tensors, content)
    fit(with_act(1))
    content["fingerprint"]["network"]["1"]["novelty"] = 3  # of the user's own module
    storage.write(tmp_path / "c", "checkpoint", tensors, content)
    with pytest.raises(StorageError, match=r"network\.1\.novelty was 3 there and is 'absent'"):
        fit(with_act(1))


def test_a_fit_that_keeps_no_checkpoint_takes_none(tmp_path):
    with pytest.raises(ConfigError, match=r"Laplace without training= .* leave checkpoint= out"):
        Laplace().fit(mlp(), data(), Categorical(), checkpoint=tmp_path / "c")
    Laplace().fit(mlp(), data(), Categorical(), training=QUICK, checkpoint=tmp_path / "c")
    assert (tmp_path / "c").exists()


def test_rates_of_dropout_are_part_of_the_network(tmp_path):
    fit = partial(MAP().fit, data=data(), likelihood=Categorical(), training=QUICK, checkpoint=tmp_path / "c")
    fit(with_statistics())
    other = with_statistics()
    other[3].p = 0.4
    with pytest.raises(StorageError, match=r"network\.3\.p was 0\.3 there and is 0\.4"):
        fit(other)


def test_files_that_cannot_be_are_found_before_work_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(GradientStepper, "step", None)
    fit = partial(MAP().fit, mlp(), data(), Categorical(), training=QUICK)
    with pytest.raises(StorageError, match="does not exist; create it first"):
        fit(checkpoint=tmp_path / "missing" / "c")
    with pytest.raises(StorageError, match="folder"):
        fit(checkpoint=tmp_path)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(StorageError, match="not a safetensors file"):
        fit(checkpoint=tmp_path / "text")
    assert (tmp_path / "text").read_text() == "hello"


def test_damaged_and_foreign_files_are_refused(tmp_path):
    fit = partial(MAP().fit, mlp(), data(), Categorical(), training=QUICK)
    posterior = fit(checkpoint=tmp_path / "c", seed=np.int64(0))  # NumPy's numbers are numbers too
    assert same(fit(checkpoint=tmp_path / "c", seed=0), posterior)
    raw = (tmp_path / "c").read_bytes()
    (tmp_path / "short").write_bytes(raw[:-7])
    (tmp_path / "flipped").write_bytes(raw[:-7] + bytes([raw[-7] ^ 1]) + raw[-6:])
    posterior.save(tmp_path / "posterior")
    for name, words in (("short", "truncated"), ("flipped", "altered"), ("posterior", "holds a posterior")):
        with pytest.raises(StorageError, match=words):
            fit(checkpoint=tmp_path / name)


# -- losses that are no numbers ----------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    x, y = data()
    path = tmp_path / "c"
    absurd = Training(epochs=9, batch_size=8, lr=1e30, optimizer=SGD(momentum=0.9, nesterov=True), checkpoint_minutes=0)
    with pytest.raises(
        TrainingError, match=r"the (nll|loss) became (inf|nan) at step [1-3] .*lower lr.*clip_norm"
    ) as e:
        MAP().fit(mlp(), (x, y), Categorical(), training=absurd, checkpoint=path)
    assert "(learning rate 1e+30)" in str(e.value) and str(path) in str(e.value)
    with safe_open(path, "pt") as file:
        assert all(file.get_tensor(name).isfinite().all() for name in file.keys())  # noqa: SIM118
    with pytest.raises(TrainingError, match="at step"):  # it is a checkpoint as good as any
        MAP().fit(mlp(), (x, y), Categorical(), training=absurd, checkpoint=path)
    with pytest.raises(TrainingError) as e:
        MAP().fit(mlp(), (x, y), Categorical(), training=absurd)
    assert "checkpoint" not in str(e.value)


def test_the_term_is_named():
    training = Training(epochs=9, batch_size=8, lr=1e18, optimizer=SGD(momentum=0.9, nesterov=True))
    with pytest.raises(TrainingError, match="the kl became"):
        MeanField(subset=["0"], prior_std=1e-2).fit(Bounded(), data(), Categorical(), training=training)


class Bounded(nn.Module):
    """Whatever its weights, its outputs are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", nn.Linear(4, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ torch.clamp(self.get_submodule("0").weight, -1, 1).t())


class Broken(nn.Module):
    """A forward pass as ever, and a gradient of NaN at one step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.inner, self.calls, self.step = mlp(), 0, step

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.inner(inputs)
        if self.training:
            if self.calls == self.step:
                outputs = outputs + 0 * (outputs * 0).sqrt()  # its derivative at 0 is infinite
            self.calls += 1
        return outputs


def test_weights_that_are_no_numbers_are_neither_saved_nor_returned(tmp_path):
    path = tmp_path / "c"
    with pytest.raises(TrainingError, match="nll became nan at step 5"):
        MAP().fit(Broken(4), data(), Categorical(), training=EVERY_STEP, checkpoint=path)
    with safe_open(path, "pt") as file:
        assert all(file.get_tensor(name).isfinite().all() for name in file.keys())  # noqa: SIM118
    assert step_in(path) == 4
    with pytest.raises(TrainingError, match=r"network\.inner\.0\.weight became NaN or infinite at step 8"):
        MAP().fit(Broken(7), data(), Categorical(), training=QUICK)  # the last step of the run
    # The best state is finite, whatever the last step did to the weights after it.
    stopping = dataclasses.replace(QUICK, early_stopping=EarlyStopping())
    with pytest.raises(TrainingError, match="validation_nll became nan at step 8"):
        MAP().fit(Broken(7), data(), Categorical(), training=stopping, validation=data())


class Lost(nn.Module):
    """A loss of NaN at one step, and an error of another kind in the next."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.inner, self.calls, self.step = mlp(), 0, step

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if self.calls == self.step + 2:
                raise ValueError("the matrix is not positive definite")
        return self.inner(inputs) * (torch.nan if self.calls == self.step + 1 else 1)


@pytest.mark.parametrize("step", [0, 2, 3, 6])  # an epoch has 4 steps: 3 is its last
def test_a_loss_is_read_a_step_late_and_its_step_named(step, tmp_path):
    path = tmp_path / "c"
    with pytest.raises(TrainingError, match=rf"nll became nan at step {step} ") as caught:
        MAP().fit(Lost(step), data(), Categorical(), training=QUICK, checkpoint=path)
    # What the next step broke on is no more than a consequence; no next step is made once an epoch is recorded.
    assert isinstance(caught.value.__context__, ValueError) == (step != 3)
    assert step_in(path) == 0


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_reads_its_last_loss(tmp_path, monkeypatch):
    pressing(monkeypatch, 2)
    with pytest.raises(TrainingError, match="nll became nan at step 2 "):
        MAP().fit(Lost(2), data(), Categorical(), training=QUICK, checkpoint=tmp_path / "c")
    assert step_in(tmp_path / "c") == 0


def test_listeners_hear_of_every_step_with_its_own_loss():
    heard: list[Reached] = []
    with listened(heard.append):
        posterior = MAP().fit(mlp(), data(), Categorical(), training=QUICK)
    assert [reached.step for reached in heard] == list(range(1, 9))
    for entry, steps in zip(posterior.history, (heard[:4], heard[4:]), strict=True):
        sizes = [8, 8, 8, len(data()[1]) - 24]
        total = sum(size * reached.nll for size, reached in zip(sizes, steps, strict=True))
        assert entry["nll"] == pytest.approx(total / sum(sizes), rel=1e-6)


# -- Ctrl-C ----------------------------------------------------------------------------------------------------


def pressing(
    monkeypatch, *steps: int, times: int = 1, number: int = signal.SIGINT, stepper: type = GradientStepper
) -> list[int]:
    """Press Ctrl-C, or send another signal, while these steps are made; returns the steps that were made."""
    made, plain, sent = [], stepper.step, number

    def step(self, number, *rest):
        record = plain(self, number, *rest)
        made.append(number)
        if number in steps:
            for _ in range(times):
                signal.raise_signal(sent)
        return record

    monkeypatch.setattr(stepper, "step", step)
    return made


@pytest.fixture
def interruptible(monkeypatch):
    """Python's own answer to Ctrl-C, also where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # put back, whatever happened
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("at", [0, 2, 3, 6])  # an epoch has 4 steps: 3 is its last, 6 the last of all iterations
def test_an_interrupted_run_goes_on(at, tmp_path, monkeypatch):
    for training in (QUICK, Training(iterations=7, batch_size=8, lr=0.05)):
        path = tmp_path / f"{training.epochs}"
        fit = partial(MeanField().fit, with_statistics(), data(), Categorical(), training=training)
        with monkeypatch.context() as patch:
            made = pressing(patch, at)
            with pytest.raises(Interrupted, match=f"after step {at + 1} of .*checkpoint=.* to go on"):
                fit(checkpoint=path)
        assert made == list(range(at + 1)) and step_in(path) == at + 1
        assert same(fit(checkpoint=path), fit())
        with monkeypatch.context() as patch, pytest.raises(Interrupted, match="nothing was saved"):
            pressing(patch, at)
            fit()
    assert issubclass(Interrupted, KeyboardInterrupt)


@pytest.mark.usefixtures("interruptible")
def test_a_second_press_ends_at_once(monkeypatch, tmp_path):
    made = pressing(monkeypatch, 1, times=2)
    with pytest.raises(KeyboardInterrupt) as caught:
        MAP().fit(mlp(), data(), Categorical(), training=QUICK, checkpoint=tmp_path / "c")
    assert not isinstance(caught.value, Interrupted) and made == [0, 1]


# -- SIGTERM ---------------------------------------------------------------------------------------------------


@pytest.fixture
def handled():
    """Sets a handler of SIGTERM, and sees that it is put back whatever happened."""
    handlers = [signal.getsignal(signal.SIGTERM)]

    def handle(handler) -> None:
        handlers.append(handler)
        signal.signal(signal.SIGTERM, handler)

    yield handle
    assert signal.getsignal(signal.SIGTERM) is handlers[-1]
    signal.signal(signal.SIGTERM, handlers[0])


@pytest.mark.parametrize(
    ("method", "stepper"), [(MeanField(), GradientStepper), (DeepEnsemble(members=2), MemberStepper)]
)
def test_a_terminated_run_goes_on(method, stepper, handled, tmp_path, monkeypatch, capsys):
    handled(signal.SIG_DFL)
    fit = partial(method.fit, mlp(), data(), Categorical(), training=QUICK)
    with monkeypatch.context() as patch:
        # The second changes nothing.
        pressing(patch, 2, number=signal.SIGTERM, times=2, stepper=stepper)
        with pytest.raises(Terminated, match=r"interrupted after step [34] of 8.*to go on") as caught:
            fit(checkpoint=tmp_path / "c")
    assert caught.value.code == 143 and isinstance(caught.value, SystemExit | Interrupted)
    assert "to go on" in capsys.readouterr().err
    assert {step_in(path) for path in tmp_path.iterdir()} <= {3, 4}  # runs side by side end together, a step later
    assert same(fit(checkpoint=tmp_path / "c"), fit())


def test_a_programs_own_handler_decides(handled, tmp_path, monkeypatch):
    fit = partial(MAP().fit, mlp(), data(), Categorical(), training=QUICK)
    whole, heard = fit(), []
    handled(lambda number, _: heard.append(number))  # it returns: the run goes on, saved
    steps = crashing(monkeypatch, 10**9)
    with monkeypatch.context() as patch:
        pressing(patch, 2, number=signal.SIGTERM)
        assert same(fit(checkpoint=tmp_path / "c"), whole)
    assert heard == [signal.SIGTERM] and 3 in steps

    def leave(*_: Any) -> None:
        sys.exit("bye")

    handled(leave)
    with monkeypatch.context() as patch:
        pressing(patch, 2, number=signal.SIGTERM)
        with pytest.raises(SystemExit, match="bye"):
            fit(checkpoint=tmp_path / "d")
    assert step_in(tmp_path / "d") == 3
    handled(signal.SIG_IGN)
    with monkeypatch.context() as patch:
        pressing(patch, 2, number=signal.SIGTERM)
        assert same(fit(), whole)


def test_a_signal_after_the_last_step_ends_the_program_all_the_same(handled, tmp_path, monkeypatch):
    handled(signal.SIG_DFL)
    plain = Loop._close_epoch

    def closed(self) -> None:
        plain(self)
        if self.progress.done:
            signal.raise_signal(signal.SIGTERM)

    fit = partial(MAP().fit, mlp(), data(), Categorical(), training=QUICK)
    with monkeypatch.context() as patch, pytest.raises(Terminated):
        patch.setattr(Loop, "_close_epoch", closed)
        fit(checkpoint=tmp_path / "c")
    assert same(fit(checkpoint=tmp_path / "c"), fit())


def test_a_job_in_the_background_stays_deaf(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # what shells do to `command &`
    try:
        pressing(monkeypatch, 1)
        posterior = MAP().fit(mlp(), data(), Categorical(), training=QUICK)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert posterior.history[-1]["step"] == 8


def test_threads_may_fit():
    fits = []
    thread = threading.Thread(target=lambda: fits.append(MAP().fit(mlp(), data(), Categorical(), training=QUICK)))
    thread.start()
    thread.join()
    assert same(fits[0], MAP().fit(mlp(), data(), Categorical(), training=QUICK))


# -- an update rule of one's own --------------------------------------------------------------------------------


class ByHand(Stepper):
    """Gradient descent with momentum, all by hand."""

    def __init__(self, objective: MAPObjective, training: Training, plan: Plan) -> None:
        self.objective, self.rate, self.plan = objective, training.lr, plan
        self.speed = {name: torch.zeros_like(p) for name, p in objective.draft.weights().items()}
        self.count = 0

    def step(self, number: int, passes: Sequence[Batch | None], rows: int, stop: bool) -> StepRecord:
        weights, sums = self.objective.draft.weights(), torch.zeros(3)
        for batch in passes:
            assert batch is not None
            loss = self.objective.batch_loss(batch, 1.0, None)
            gradients = torch.autograd.grad(loss.total, list(weights.values()))
            with torch.no_grad():
                for name, gradient in zip(weights, gradients, strict=True):
                    self.speed[name].mul_(0.5).add_(gradient)
            sums += len(batch.targets) * torch.stack([loss.total, loss.nll, loss.kl]).detach()
        with torch.no_grad():
            for name, weight in weights.items():
                weight -= self.rate * self.speed[name]
        self.count += 1
        return StepRecord(number, sums / rows, rows, self.rate, None, stop)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return dict(self.speed), {"count": self.count}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self.speed, self.count = dict(tensors), facts["count"]


class ByHandObjective(MAPObjective):
    made: list[ByHand]

    def stepper(self, training: Training, plan: Plan, processes: Processes, seed: int) -> Stepper:
        return self.made[-1] if self.made else self.made.append(ByHand(self, training, plan)) or self.made[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HandMade(TrainedMethod):
    posterior_type = MAP.posterior_type
    made: list = dataclasses.field(default_factory=list)

    def objective(self, start):
        draft = self.posterior_type(start.network, start.likelihood, method=MAP())
        objective = ByHandObjective(draft, None, num_data=start.num_data, modes=start.modes)
        objective.made = self.made
        return objective


def test_a_method_may_bring_its_own_update_rule(tmp_path, monkeypatch):
    training = Training(epochs=3, batch_size=8, lr=0.1, accumulate=2, checkpoint_minutes=0)
    x, y = data(21)

    def fit(path: Path | None = None) -> tuple[Any, ByHand]:
        method = HandMade()
        posterior = method.fit(
            with_statistics(), (x, y), Categorical(), training=training, checkpoint=path, validation=(x, y)
        )
        return posterior, method.made[0]

    whole, rule = fit()
    assert rule.count == 6 and [entry["step"] for entry in whole.history] == [2, 4, 6]
    assert whole.history[-1]["validation_nll"] < whole.history[0]["validation_nll"]
    for last in range(1, 8):
        with monkeypatch.context() as patch, pytest.raises(Crash):
            crashing(patch, last)
            fit(tmp_path / f"{last}")
        again, rule = fit(tmp_path / f"{last}")
        assert same(again, whole) and again.history == whole.history and rule.count == 6


def test_the_loop_serves_objectives_of_ones_own():
    x, y = data()
    objective = MAP().build(mlp(), Categorical(), num_data=27)
    history = train(objective, as_source((x, y), TensorOptions.of(objective.draft)), QUICK, Run(seed=4))
    expected = MAP().fit(mlp(), (x, y), Categorical(), training=QUICK, seed=4)
    assert same(objective.posterior(), expected) and history == expected.history


class Rows(IterableDataset):
    def __iter__(self):
        return zip(*data(20), strict=True)


def test_streams_go_on_where_they_were(tmp_path, monkeypatch):
    """Without a promise of bits in general: a stream that repeats itself is found where it was left."""
    loader = DataLoader(Rows(), batch_size=8)
    fit = partial(MAP().fit, mlp(), loader, Categorical(), training=dataclasses.replace(EVERY_STEP, batch_size=None))
    with monkeypatch.context() as patch, pytest.raises(Crash):
        crashing(patch, 3)
        fit(num_data=20, checkpoint=tmp_path / "c")
    assert same(fit(num_data=20, checkpoint=tmp_path / "c"), fit(num_data=20))


# -- real signals to real processes -------------------------------------------------------------------------------


def script(name: str, *arguments: str | Path) -> list[str]:
    return [sys.executable, str(HERE / name), *map(str, arguments)]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_killed_at_any_moment(tmp_path):
    """SIGKILL at five random moments of each of two runs; and to one of two processes that share a run."""
    done = subprocess.run(
        script("killed_runs.py", tmp_path), env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])  # before it stands what old releases of Gloo say
    for name in ("early", "augmented"):
        assert results[name]["kills"] == 5, results
        assert len(set(results[name]["steps"])) >= 3, results  # they hit the run at different stages
        assert results[name]["same"], results
    for how, seconds in (("dead", 4), ("silent", 15)):  # of a timeout of 60 s and of 5 s
        assert results[how]["exit"] == 0 and results[how]["step"] == 4
        assert "process 0 of 2 lost its peers" in results[how]["said"]
        assert "same checkpoint= to go on" in results[how]["said"]
        assert results[how]["seconds"] < seconds, results


@pytest.mark.parametrize(("number", "codes"), [(signal.SIGINT, (1,)), (signal.SIGTERM, (143,))])
def test_a_signal_to_all_processes_of_a_run(number, codes, tmp_path):
    """It goes to the whole group, as from a terminal or a scheduler: to this one and to its loader's workers."""
    path = tmp_path / "c"
    process = subprocess.Popen(
        script("interrupted_run.py", path), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        end = time.monotonic() + 60
        while not (path.exists() and step_in(path) >= 3):
            assert process.poll() is None and time.monotonic() < end, "it never came to step 3"
            time.sleep(0.02)
        os.killpg(process.pid, number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode in codes, err
    assert ": interrupted after step" in err and f"checkpoint={str(path)!r} to go on" in err
    reached = step_in(path)
    assert 3 <= reached < 80  # the step that was waited for may be the last
    assert same(interrupted_run.fit(path), interrupted_run.fit(None))


class Disconnected(torch.utils.data.Dataset):
    """Rows whose reader is told to end, and loses its connection to the worker that sends them."""

    def __init__(self, error: type[Exception]) -> None:
        self.error, self.read = error, 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int):
        self.read += 1
        if self.read == 40:
            os.kill(os.getpid(), signal.SIGTERM)
            raise self.error("lost")
        return torch.ones(2), number % 2


@pytest.mark.parametrize("error", [ConnectionResetError, EOFError, RuntimeError])
def test_a_run_saves_itself_where_the_signal_has_ended_its_workers(error, tmp_path):
    net, training = torch.nn.Linear(2, 2), Training(epochs=20, batch_size=4)
    with pytest.raises(Terminated, match="interrupted after step"):
        MAP().fit(net, Disconnected(error), Categorical(), training=training, checkpoint=tmp_path / "c")
    assert step_in(tmp_path / "c") >= 1


def test_what_a_killed_writer_left_goes_also_where_nothing_more_is_written(tmp_path):
    fit = partial(MAP().fit, mlp(), data(), Categorical(), training=QUICK, checkpoint=tmp_path / "c")
    fit()
    before = (tmp_path / "c").read_bytes()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = tmp_path / f".c.{whole._machine()}-{ended.pid}-abc.partial"
    left.mkdir()
    fit()  # it is done already
    assert not left.exists() and (tmp_path / "c").read_bytes() == before
