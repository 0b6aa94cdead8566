"""Runs with a limit of time: they stop at a step, keep their best state, go on where they were, and share equally."""

import pytest
import torch
from torch import nn

import dubito
from dubito import Categorical, Training
from dubito.errors import Interrupted
from dubito.training import Account, EarlyStopping, accounted
from dubito.training.account import part


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def ground(monkeypatch):
    """Rows, a network, and a clock on which a step of gradient descent takes one second."""
    stream = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 4, generator=stream)
    rows = (inputs, (inputs[:, 0] > 0).long())
    clock = Clock()
    step = dubito.training.GradientStepper.step

    def timed(self, *arguments):
        clock.now += 1
        return step(self, *arguments)

    monkeypatch.setattr(dubito.training.GradientStepper, "step", timed)
    torch.manual_seed(0)
    return rows, nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), clock


def weights(posterior):
    return torch.cat([value.flatten() for value in posterior.network.state_dict().values()])


def test_a_run_stops_at_its_limit_with_the_steps_it_made(ground):
    rows, net, clock = ground
    training = Training(iterations=100, batch_size=8, lr=1e-2)  # 5 steps an epoch
    with accounted(Account(12, clock)) as account:
        stopped = dubito.MAP().fit(net, rows, Categorical(), training=training)
    assert account.endings == ["budget"] and account.spent() == 12
    assert [entry["step"] for entry in stopped.history] == [5, 10, 12]
    short = dubito.MAP().fit(net, rows, Categorical(), training=Training(iterations=12, batch_size=8, lr=1e-2))
    assert torch.equal(weights(stopped), weights(short))
    with accounted(Account(None, clock)) as account:
        dubito.MAP().fit(net, rows, Categorical(), training=Training(iterations=12, batch_size=8))
    assert account.endings == ["limit"]
    with accounted(Account(0, clock)):  # one step is always made
        assert dubito.MAP().fit(net, rows, Categorical(), training=training).history[-1]["step"] == 1


def test_a_stopped_run_keeps_its_best_state(ground, monkeypatch):
    rows, net, clock = ground
    scores = iter([0.5, 0.3, 0.9])
    monkeypatch.setattr("dubito.training.loop.Loop._validate", lambda self, num_samples: next(scores))
    training = Training(iterations=100, batch_size=8, lr=1e-2, early_stopping=EarlyStopping(patience=50))
    with accounted(Account(13, clock)) as account:
        stopped = dubito.MAP().fit(net, rows, Categorical(), training=training, validation=rows)
    assert account.endings == ["budget"] and stopped.history[-1]["step"] == 13
    best = dubito.MAP().fit(net, rows, Categorical(), training=Training(iterations=10, batch_size=8, lr=1e-2))
    assert torch.equal(weights(stopped), weights(best))  # that of step 10


def test_patience_is_told_from_the_other_ends(ground):
    rows, net, clock = ground
    stopping = EarlyStopping(patience=1, margin=1e9)
    training = Training(epochs=50, batch_size=8, early_stopping=stopping)
    with accounted(Account(1000, clock)) as account:
        dubito.MAP().fit(net, rows, Categorical(), training=training, validation=rows)
    assert account.endings == ["patience"]


def test_what_was_spent_before_an_interruption_counts(ground, tmp_path, monkeypatch):
    rows, net, clock = ground
    training = Training(iterations=100, batch_size=8, lr=1e-2)
    arguments = {"training": training, "checkpoint": tmp_path / "run"}
    step = dubito.training.loop.Loop._step

    def interrupted(self, values):
        if values[0] == 6:
            self.interrupt()
        return step(self, values)

    with monkeypatch.context() as patch:
        patch.setattr(dubito.training.loop.Loop, "_step", interrupted)
        with accounted(Account(12, clock)), pytest.raises(Interrupted):
            dubito.MAP().fit(net, rows, Categorical(), **arguments)
    for _ in range(2):  # the second time from a checkpoint of a run that has ended
        with accounted(Account(12, clock)) as account:
            again = dubito.MAP().fit(net, rows, Categorical(), **arguments)
        assert account.endings == ["budget"] and again.history[-1]["step"] == 12
        assert account.spent() == 12


@pytest.mark.parametrize("apart", [False, True])
def test_members_of_an_ensemble_have_equal_shares(ground, apart, monkeypatch):
    rows, net, clock = ground
    if apart:
        monkeypatch.setattr("dubito.training.beside._joinable", lambda sources, training: False)
    else:  # one pass for all members, which is one second too
        from dubito.training.members import MemberStepper

        step = MemberStepper.step

        def timed(self, *arguments):
            clock.now += 1
            return step(self, *arguments)

        monkeypatch.setattr(MemberStepper, "step", timed)
    training = Training(iterations=100, batch_size=8, lr=1e-2)
    with accounted(Account(12, clock)) as account:
        posterior = dubito.DeepEnsemble(members=3).fit(net, rows, Categorical(), training=training)
    assert account.endings == ["budget"] * 3
    last = {entry["member"]: entry["step"] for entry in posterior.history}
    assert set(last.values()) <= ({4} if apart else {12, 13}), last


def test_weights_are_averaged_even_where_the_run_stops_before_its_end(ground):
    rows, net, clock = ground
    training = Training(iterations=100, batch_size=8, lr=1e-2)
    with accounted(Account(7, clock)):
        posterior = dubito.SWAG().fit(net, rows, Categorical(), training=training)
    short = dubito.MAP().fit(net, rows, Categorical(), training=Training(iterations=7, batch_size=8, lr=1e-2))
    torch.testing.assert_close(weights(posterior), weights(short))
    assert posterior.predict(rows[0]).probs.isfinite().all()


def test_parts_of_what_is_left():
    clock = Clock()
    with accounted(Account(10, clock)) as account:
        clock.now = 2
        with part(0.25):
            assert account.limit == 4
        assert account.limit == 10
    with part(0.5):  # nobody keeps account
        pass
