"""Settings check themselves; schedules, the divergence's weight and optimisers follow their formulas."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from dubito import ConfigError, Training
from dubito.training import KL, SGD, Adam, AdamW, Constant, Cosine, EarlyStopping, Linear, Step
from dubito.training.plan import plan_run

NAN, INF = float("nan"), float("inf")


def test_defaults_and_frozen():
    training = Training()
    assert (training.epochs, training.iterations, training.kl) == (50, None, KL(weight=1.0))
    assert Training(iterations=7).epochs is None
    assert Training(kl=0.25).kl == KL(weight=0.25) and Training(kl=2).kl == KL(weight=2.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        training.lr = 1.0  # pyright: ignore[reportAttributeAccessIssue]
    assert dataclasses.replace(Training(epochs=3), lr=0.5).epochs == 3


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"epochs": 2, "iterations": 2}, "epochs or iterations"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": 1.5}, "epochs"),
        ({"epochs": True}, "epochs"),
        ({"iterations": -1}, "iterations"),
        ({"batch_size": 0}, "batch_size"),
        ({"accumulate": 0}, "accumulate"),
        ({"lr": 0}, "lr"),
        ({"lr": NAN}, "lr"),
        ({"lr": "fast"}, "lr"),
        ({"variational_lr": -1.0}, "variational_lr"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"clip_norm": INF}, "clip_norm"),
        ({"warmup": -1}, "warmup"),
        ({"warmup": INF}, "warmup"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"weight_decay": NAN}, "weight_decay"),
        ({"checkpoint_minutes": -1}, "checkpoint_minutes"),
        ({"timeout": 0}, "timeout"),
        ({"precision": "half"}, "precision"),
        ({"precision": 16}, "precision"),
        ({"optimizer": Adam}, "optimizer"),
        ({"optimizer": "adam"}, "optimizer"),
        ({"schedule": Cosine}, "schedule"),
        ({"schedule": None}, "schedule"),
        ({"variational_schedule": "cosine"}, "variational_schedule"),
        ({"early_stopping": 3}, "early_stopping"),
        ({"kl": "linear"}, "kl"),
        ({"kl": True}, "kl"),
        ({"kl": NAN}, "weight"),
        ({"kl": -1}, "weight"),
        ({"compile": "yes"}, "compile"),
        ({"channels_last": 1}, "channels_last"),
    ],
)
def test_what_training_refuses(wrong, names):
    with pytest.raises(ConfigError, match=names):
        Training(**wrong)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: KL(weight=INF), "weight"),
        (lambda: KL(weight="1"), "weight"),
        (lambda: KL(warmup=-1), "warmup"),
        (lambda: KL(warmup=NAN), "warmup"),
        (lambda: KL(every=0), "every"),
        (lambda: KL(every="batch"), "every"),
        (lambda: KL(every=True), "every"),
        (lambda: EarlyStopping(patience=0), "patience"),
        (lambda: EarlyStopping(margin=-0.1), "margin"),
        (lambda: EarlyStopping(margin=NAN), "margin"),
        (lambda: EarlyStopping(margin="0"), "margin"),
        (lambda: EarlyStopping(num_samples=0), "num_samples"),
        (lambda: Cosine(final=1.5), "final"),
        (lambda: Step(at=(0.8, 0.2)), "rise"),
        (lambda: Step(at=(1.0,)), "at"),
        (lambda: Step(at=0.5), "at"),
        (lambda: Step(by=0), "by"),
        (lambda: Linear(start=0.5, end=0.5), "end"),
        (lambda: Linear(final=-1), "final"),
        (lambda: Adam(betas=(0.9, 1.0)), "beta2"),
        (lambda: Adam(betas=(0.9,)), "betas"),
        (lambda: Adam(betas=0.9), "betas"),
        (lambda: Adam(eps=0), "eps"),
        (lambda: SGD(momentum=1.0), "momentum"),
    ],
)
def test_what_the_parts_refuse(make, names):
    with pytest.raises(ConfigError, match=names):
        make()


def test_schedules_are_their_formulas():
    for share in np.linspace(0, 1, 21):
        assert Constant().factor(share) == 1
        assert Cosine().factor(share) == pytest.approx((1 + math.cos(math.pi * share)) / 2)
        assert Cosine(final=0.1).factor(share) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2)
        assert Step(at=(0.25, 0.5), by=0.1).factor(share) == pytest.approx(
            1 if share < 0.25 else 0.1 if share < 0.5 else 0.01
        )
        # SWA-style: constant, a straight line, constant again
        assert Linear(start=0.5, end=0.9, final=0.05).factor(share) == pytest.approx(
            np.interp(share, [0, 0.5, 0.9, 1], [1, 1, 0.05, 0.05])
        )


@pytest.mark.parametrize("every", ["step", "epoch", 3])
def test_the_weight_of_the_divergence(every):
    steps_per_epoch, kl = 5, KL(weight=0.5, warmup=2, every=every)
    size = {"step": 1, "epoch": 5}.get(every, every)
    for step in range(25):
        moved = [s for s in range(step + 1) if s % size == 0][-1]  # the last step at which the weight moved
        assert kl.at(step, steps_per_epoch) == pytest.approx(0.5 * min(1, moved / 10))
    assert [KL(weight=0.3).at(step, 5) for step in (0, 9, 99)] == [0.3] * 3


def test_optimisers_are_those_of_pytorch():
    made = Adam(betas=[0.8, 0.9], eps=1e-4).make([{"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.1}])
    assert type(made) is torch.optim.Adam
    assert made.defaults["betas"] == (0.8, 0.9) and made.defaults["eps"] == 1e-4
    parameter = torch.nn.Parameter(torch.ones(2))
    made = AdamW().make([{"params": [parameter], "lr": 0.1, "weight_decay": 0.5}])
    parameter.grad = torch.zeros(2)
    made.step()  # decoupled: w − lr · decay · w, and a zero gradient moves nothing else
    torch.testing.assert_close(parameter.detach(), torch.full((2,), 1 - 0.1 * 0.5))
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    for settings, momentum, nesterov in (
        (SGD(), theirs.defaults["momentum"], theirs.defaults["nesterov"]),
        (SGD(momentum=0.9), 0.9, False),
        (SGD(momentum=0.9, nesterov=True), 0.9, True),
        (SGD(nesterov=True), 0.0, False),  # the same thing, which PyTorch refuses to be told
    ):
        made = settings.make([{"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.1}])
        assert (made.defaults["momentum"], made.defaults["nesterov"]) == (momentum, nesterov)


@pytest.mark.parametrize(
    ("settings", "rows", "passes", "expected"),
    [
        ({"epochs": 3}, 100, 7, (16, 7, 21, 16)),
        ({"epochs": 3, "accumulate": 2}, 100, 7, (16, 4, 12, 32)),
        ({"iterations": 5, "accumulate": 2}, 100, 7, (16, 4, 5, 32)),
        ({"epochs": 3}, 10, 1, (10, 1, 3, 10)),
        ({"epochs": 3, "accumulate": 4}, 40, 3, (16, 1, 3, 40)),
        ({"epochs": 3}, None, None, (16, None, None, 16)),
    ],
)
def test_the_plan_of_a_run(settings, rows, passes, expected):
    plan = plan_run(Training(**settings), rows, passes, 16)
    assert (plan.batch_size, plan.steps_per_epoch, plan.total, plan.step_rows) == expected
