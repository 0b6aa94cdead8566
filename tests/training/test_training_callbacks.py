"""Callbacks: every method tells them of every step once, also over interruptions, and what they raise ends a fit."""

import pickle
import signal
from collections import Counter

import pytest
import torch
from torch import nn

import dubito
from dubito import (
    BALI,
    MAP,
    Callback,
    Categorical,
    ConfigError,
    DeepEnsemble,
    Interrupted,
    Laplace,
    MeanField,
    Training,
    jobs,
)
from dubito.training import EarlyStopping, checkpoint
from tests.training.examples import data, mlp, same, with_statistics

STEPS = 6
TRAINING = Training(iterations=STEPS, batch_size=9, lr=1e-2)


class Heard(Callback):
    """Writes down what it hears; is no part of anything that is pickled."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.events: list[tuple] = []
        self.terms: list[dict] = []
        self.stop_at = stop_at

    def __reduce__(self):
        raise pickle.PicklingError("callbacks are pickled nowhere")

    def on_start(self, run):
        self.events.append(("start", run.member, run.done))

    def on_step(self, run, step, terms):
        self.events.append(("step", run.member, step))
        self.terms.append(dict(terms))
        if step == self.stop_at:
            raise KeyError("enough")

    def on_epoch(self, run, record):
        self.events.append(("epoch", run.member, record["step"]))

    def on_validation(self, run, step, nll):
        self.events.append(("validation", run.member, step))

    def on_end(self, run, ended):
        self.events.append(("end", run.member, ended))

    def steps(self, member=None) -> list[int]:
        return [number for kind, who, number in self.events if kind == "step" and who == member]

    def kinds(self, member=None) -> list[str]:
        return [kind for kind, who, _ in self.events if who == member]


@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")
@pytest.mark.parametrize("name", sorted({*dubito.methods()} - {"deep-ensemble", "hmc"}))
def test_every_method_tells_of_every_step_once_and_is_not_changed_by_it(name):
    method, heard = dubito.methods()[name], Heard()
    training = Training(iterations=STEPS, batch_size=9, lr=1e-3)
    plain = method.fit(mlp(), data(), Categorical(), training=training)
    watched = method.fit(mlp(), data(), Categorical(), training=training, callbacks=[heard])
    assert same(plain, watched)
    assert heard.steps() == list(range(1, STEPS + 1))
    assert heard.events[0] == ("start", None, 0) and heard.events[-1] == ("end", None, "limit")
    assert Counter(heard.kinds()) == {"start": 1, "step": STEPS, "epoch": 2, "end": 1}


def test_members_of_an_ensemble_are_told_apart_side_by_side_and_one_by_one():
    # dropout is drawn from the global state: such members are trained one by one
    for make in (mlp, with_statistics):
        heard = Heard()
        DeepEnsemble(members=3).fit(make(), data(), Categorical(), training=TRAINING, callbacks=[heard])
        for member in range(3):
            assert heard.steps(member) == list(range(1, STEPS + 1))
            assert Counter(heard.kinds(member))["start"] == Counter(heard.kinds(member))["end"] == 1


def test_hmc_and_fits_after_the_fact_tell_of_their_start_and_end():
    heard, trained = Heard(), MAP().fit(mlp(), data(), Categorical(), training=Training(epochs=30, lr=1e-2))
    Laplace().fit(trained.network.requires_grad_(), data(), Categorical(), callbacks=[heard])
    assert heard.events == [("start", None, 0), ("end", None, "limit")]
    heard = Heard()
    with pytest.warns(dubito.DubitoWarning):
        dubito.HMC(chains=2, warmup=2, num_samples=4).fit(nn.Linear(4, 3), data(9), Categorical(), callbacks=[heard])
    assert heard.kinds()[0] == "start" and heard.kinds()[-1] == "end"
    assert heard.steps()[-1] == 12 and {"chain"} == {*heard.terms[0]}


def test_terms_are_those_of_the_loss_and_come_one_step_late():
    heard, made = Heard(), []

    class Slow(Callback):
        def on_step(self, run, step, terms):
            made.append((step, len(seen)))

    seen: list[int] = []

    class Counting(nn.Linear):
        def forward(self, x):
            if self.training:
                seen.append(len(x))
            return super().forward(x)

    x, y = data()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Counting(4, 3)
    first = nn.functional.cross_entropy(net(x), y).item()
    seen.clear()
    training = Training(iterations=3, batch_size=len(x), lr=1e-2)
    posterior = MAP(prior_std=2.0).fit(net, (x, y), Categorical(), training=training, callbacks=[heard, Slow()])
    assert heard.terms[0]["nll"] == pytest.approx(first, rel=1e-5)
    for terms in heard.terms:
        assert terms["loss"] == pytest.approx(terms["nll"] + terms["kl"] / len(x), rel=1e-5)
        assert terms["lr"] == 1e-2
    # the terms of a step are read when the next has been made; those of an epoch's last at its end
    forwards = dict(made)
    assert sorted(forwards) == [1, 2, 3] and len(posterior.history) == 3
    training = Training(epochs=1, batch_size=9, lr=1e-2)
    seen.clear(), made.clear()
    MAP().fit(net, (x, y), Categorical(), training=training, callbacks=[Slow()])
    assert [forwards for _, forwards in made[:2]] == [2, 3]


def test_validations_come_with_the_scores_of_the_history():
    scores = {}

    class Scores(Callback):
        def on_validation(self, run, step, nll):
            assert run.validates and step not in scores
            scores[step] = nll

    stopping = EarlyStopping(patience=100, every=2)
    training = Training(epochs=4, batch_size=9, lr=1e-2, early_stopping=stopping)
    posterior = MAP().fit(mlp(), data(), Categorical(), training=training, validation=data(12), callbacks=[Scores()])
    assert sorted(scores) == [2, 4, 6, 8, 10, 12]
    assert posterior.history[-1]["best_nll"] == pytest.approx(min(scores.values()))


class Stopping(Callback):
    """Interrupts a run as Ctrl-C does, while the terms of a step are read."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run, step, terms):
        if step == self.step and run.member in (None, 0):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("method", [MeanField(), BALI(), dubito.VOGN(), DeepEnsemble(members=2)], ids=repr)
def test_a_resumed_run_tells_of_the_steps_that_are_left_exactly_once(method, tmp_path):
    whole, before, after = Heard(), Heard(), Heard()
    given = {"training": Training(iterations=7, batch_size=9, lr=1e-3), "validation": data(12)}
    plain = method.fit(mlp(), data(), Categorical(), callbacks=[whole], **given)
    given["checkpoint"] = tmp_path / "c"
    with pytest.raises(Interrupted):
        method.fit(mlp(), data(), Categorical(), callbacks=[before, Stopping(3)], **given)
    resumed = method.fit(mlp(), data(), Categorical(), callbacks=[after], **given)
    assert same(plain, resumed)
    for member in [0, 1] if isinstance(method, DeepEnsemble) else [None]:
        last = before.steps(member)[-1]
        assert ("end", member, "interrupted") in before.events
        assert ("start", member, last) in after.events and last < 7
        assert before.steps(member) + after.steps(member) == list(range(1, 8)) == whole.steps(member)
        rest = [
            [event for event in heard.events if event[1] == member and event[0] in ("epoch", "validation")]
            for heard in (whole, before, after)
        ]
        assert rest[1] + rest[2] == rest[0]


def test_callbacks_are_in_no_checkpoint_and_another_list_goes_on_with_it(tmp_path):
    given = {"training": TRAINING, "checkpoint": tmp_path / "c"}
    MAP().fit(mlp(), data(), Categorical(), callbacks=[Heard()], **given)
    heard = Heard()
    MAP().fit(mlp(), data(), Categorical(), callbacks=[heard, Heard()], **given)  # finished: nothing is left
    assert heard.events == [("start", None, STEPS), ("end", None, "limit")]
    tensors, content = checkpoint.storage.read(tmp_path / "c", checkpoint.KIND)
    assert "callback" not in str(content) + str(sorted(tensors))


@pytest.mark.parametrize("method", [MAP(), DeepEnsemble(members=2)], ids=repr)
def test_what_a_callback_raises_ends_the_fit_and_leaves_everything_as_it_was(method):
    net, first, second = mlp(), Heard(), Heard(stop_at=2)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="enough"):
        method.fit(net, data(), Categorical(), training=TRAINING, callbacks=[first, second])
    members = [0, 1] if isinstance(method, DeepEnsemble) else [None]
    for heard in (first, second):
        starts = [who for kind, who, _ in heard.events if kind == "start"]
        ends = [who for kind, who, ended in heard.events if kind == "end" and ended == "failed"]
        assert sorted(map(str, starts)) == sorted(map(str, ends)) and set(starts) <= set(members)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not net[0].weight.grad and net[0].weight.requires_grad


def test_a_step_that_fails_ends_the_run_for_those_who_watch():
    heard = Heard()
    training = Training(iterations=STEPS, batch_size=9, lr=1e30)
    with pytest.raises(dubito.TrainingError):
        MAP().fit(mlp(), data(), Categorical(), training=training, callbacks=[heard])
    assert heard.events[-1] == ("end", None, "failed")


def test_a_callback_that_cannot_start_ends_those_that_have():
    class Broken(Callback):
        def on_start(self, run):
            raise OSError("no space")

    heard = Heard()
    with pytest.raises(OSError, match="no space"):
        MAP().fit(mlp(), data(), Categorical(), training=TRAINING, callbacks=[heard, Broken()])
    assert heard.events == [("start", None, 0), ("end", None, "failed")]


def test_an_object_with_some_of_the_methods_is_a_callback_and_others_are_refused():
    class Only:
        steps = 0

        def on_step(self, run, step, terms):
            self.steps += 1

    only = Only()
    MAP().fit(mlp(), data(), Categorical(), training=TRAINING, callbacks=(only,))
    assert only.steps == STEPS
    for wrong in (3, "on_step", print, Only, Heard):
        with pytest.raises(ConfigError, match="callbacks must be a list of objects"):
            MAP().fit(mlp(), data(), Categorical(), training=TRAINING, callbacks=[wrong])


def test_members_fitted_as_jobs_tell_of_their_epochs(monkeypatch):
    class Elsewhere:
        """Jobs that travel as pickles, as those of other processes do."""

        def shares(self, count):
            return [range(1), range(1, count)]

        def each(self, function, shares):
            for share in shares:
                yield pickle.loads(pickle.dumps(function(*pickle.loads(pickle.dumps(share)))))

    monkeypatch.setattr(jobs, "workers", Elsewhere)
    heard = Heard()
    DeepEnsemble(members=2).fit(mlp(), data(), Categorical(), training=TRAINING, callbacks=[heard])
    for member in range(2):
        assert heard.kinds(member) == ["start", "epoch", "epoch", "end"]
