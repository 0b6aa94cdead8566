"""The loop against loops written by hand, and each of its options against its own definition."""

import copy
import dataclasses
import functools
import random
import warnings

import numpy as np
import pytest
import torch
from examples import Noisy, data, fresh, gap, mlp, same, with_statistics
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

from dubito import MAP, Categorical, ConfigError, DubitoWarning, Gaussian, MCDropout, MeanField, Rank1, Training, seeds
from dubito.inputs import Batch
from dubito.training import (
    KL,
    SGD,
    Adam,
    Constant,
    Cosine,
    EarlyStopping,
    GradientStepper,
    Linear,
    Plan,
    Processes,
    Run,
    Step,
)
from dubito.training.plan import plan_run

SEED = 3


def order(epoch: int, count: int, seed: int = SEED) -> Tensor:
    return torch.randperm(count, generator=seeds.generator(seed, "order", epoch))


def batches(epoch: int, count: int, size: int) -> list[Tensor]:
    return list(order(epoch, count).split(size))


def watched(monkeypatch, probe) -> list:
    """What `probe(stepper, number)` saw after every step of the library's update rule."""
    seen, plain = [], GradientStepper.step

    def step(self, number, *rest):
        record = plain(self, number, *rest)
        seen.append(probe(self, number, record))
        return record

    monkeypatch.setattr(GradientStepper, "step", step)
    return seen


# -- against loops written by hand -------------------------------------------------------------------------


def test_map_is_the_loop_one_would_write_by_hand():
    x, y = data(27)
    training = Training(
        epochs=3,
        batch_size=8,
        lr=0.1,
        optimizer=SGD(momentum=0.8, nesterov=True),
        schedule=Cosine(final=0.1),
        warmup=1,
        weight_decay=0.01,
        clip_norm=0.5,
    )
    posterior = MAP(prior_std=2.0).fit(mlp(), (x, y), Categorical(), training=training, seed=SEED)

    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.01)
    step, expected = 0, []
    for epoch in range(3):
        sums = np.zeros(3)
        for rows in batches(epoch, 27, 8):  # 8, 8, 8, 3
            nll = F.cross_entropy(net(x[rows]), y[rows])
            penalty = sum(p.square().sum() for p in net.parameters()) / (2 * 2.0**2)
            loss = nll + penalty / 27
            optimizer.zero_grad()
            (loss * len(rows) / 8).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            factor = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * step / 12))
            optimizer.param_groups[0]["lr"] = 0.1 * min(1, (step + 1) / 4) * factor
            optimizer.step()
            step += 1
            sums += len(rows) * np.array([loss.item(), nll.item(), penalty.item()])
        expected.append(dict(zip(("loss", "nll", "kl"), sums / 27, strict=True)))
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(posterior.weights()[name], parameter.detach(), rtol=0, atol=1e-6)
    for entry, (epoch, want) in zip(posterior.history, enumerate(expected), strict=True):
        assert (entry["epoch"], entry["step"]) == (epoch + 1, 4 * (epoch + 1))
        assert {key: entry[key] for key in want} == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean_field_is_the_loop_one_would_write_by_hand(dtype):
    x, y = data(22)
    x = x.to(dtype)
    training = Training(
        epochs=3, batch_size=8, lr=0.02, variational_lr=0.05, variational_schedule=Step(at=(0.5,), by=0.5),
        kl=KL(weight=0.7, warmup=2, every=2),
    )  # fmt: skip
    method = MeanField(prior_std=0.8, initial_std=0.1)
    posterior = method.fit(mlp().to(dtype), (x, y), Categorical(), training=training, seed=SEED)

    net = mlp().to(dtype)
    means = dict(net.named_parameters())
    raw = {name: torch.full_like(m, 0.1).expm1().log().detach().requires_grad_() for name, m in means.items()}
    optimizer = torch.optim.Adam(
        [{"params": list(means.values()), "lr": 0.02}, {"params": list(raw.values()), "lr": 0.05}]
    )
    prior = torch.distributions.Normal(*torch.tensor([0.0, 0.8], dtype=dtype))
    step = 0
    for epoch in range(3):
        for rows in batches(epoch, 22, 8):
            noise = seeds.generator(SEED, "noise", step, 0)
            posteriors = {n: torch.distributions.Normal(means[n], F.softplus(raw[n])) for n in means}
            draw = {
                n: q.mean + q.stddev * torch.randn(q.mean.shape, generator=noise, dtype=dtype)
                for n, q in posteriors.items()
            }
            kl = sum(torch.distributions.kl_divergence(q, prior).sum() for q in posteriors.values())
            weight = 0.7 * min(1, (step // 2 * 2) / 6)  # 3 steps per epoch, 2 epochs
            loss = F.cross_entropy(functional_call(net, draw, (x[rows],)), y[rows]) + weight * kl / 22
            optimizer.zero_grad()
            (loss * len(rows) / 8).backward()
            optimizer.param_groups[1]["lr"] = 0.05 * (0.5 if step / 9 >= 0.5 else 1)
            optimizer.step()
            step += 1
    for name in means:
        tolerance = {"rtol": 0, "atol": 1e-6 if dtype == torch.float32 else 1e-12}
        torch.testing.assert_close(posterior.weights()[name], means[name].detach(), **tolerance)
        torch.testing.assert_close(posterior.group("raw_std")[name].detach(), raw[name].detach(), **tolerance)


def test_dropout_is_the_loop_one_would_write_by_hand():
    x, y = data(19)
    training = Training(epochs=2, batch_size=8, lr=0.02, accumulate=2)
    posterior = MCDropout(rate=0.4).fit(mlp(), (x, y), Categorical(), training=training, seed=SEED)

    net, step = mlp(), 0
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for epoch in range(2):
        passes = batches(epoch, 19, 8)  # 8 and 8 in one step, 3 in the next
        for group in (passes[:2], passes[2:]):
            optimizer.zero_grad()
            for index, rows in enumerate(group):
                noise = seeds.generator(SEED, "noise", step, index)
                keep = torch.bernoulli(torch.full((len(rows), 9), 0.6), generator=noise)
                outputs = net[2](net[1](net[0](x[rows])) * keep / 0.6)
                (F.cross_entropy(outputs, y[rows]) * len(rows) / 16).backward()
            optimizer.step()
            step += 1
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(posterior.weights()[name], parameter.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [32, 27, 12])
def test_accumulated_passes_are_one_larger_batch(count):
    fits = [
        MAP(prior_std=1.0).fit(
            mlp(),
            data(count),
            Categorical(),
            training=Training(epochs=3, lr=0.05, optimizer=SGD(momentum=0.9, nesterov=True), **sizes),
        )
        for sizes in ({"batch_size": 8, "accumulate": 2}, {"batch_size": 16})
    ]
    assert gap(*fits) < 1e-6
    assert [entry["step"] for entry in fits[0].history] == [entry["step"] for entry in fits[1].history]


@pytest.mark.parametrize(("count", "accumulate"), [(27, 1), (27, 3), (25, 1), (30, 2)])
def test_an_epoch_of_gradients_is_that_of_the_whole_objective(count, accumulate):
    """Σ_b (B_b / B) ∇ [nll_b + kl / N] = (N / B) ∇ [nll + kl / N]: likelihood once, divergence once."""
    x, y = data(count)
    objective = MAP(prior_std=0.7).build(mlp().double(), Categorical(), count)
    training = Training(epochs=1, batch_size=8, lr=1.0, optimizer=SGD(), accumulate=accumulate)
    passes = [Batch(x[rows].double(), y[rows]) for rows in torch.arange(count).split(8)]
    plan = plan_run(training, count, len(passes), 8)
    start = copy.deepcopy(objective.draft.network.state_dict())
    total = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    stepper = GradientStepper(objective, training, plan, Processes(), seed=0)
    for number in range(-(-len(passes) // accumulate)):
        chunk = passes[number * accumulate : (number + 1) * accumulate]
        stepper.step(number, chunk, sum(len(batch.targets) for batch in chunk), False)
        for name, tensor in objective.draft.network.state_dict().items():
            total[name] += start[name] - tensor  # the step's scaled gradient, at the same weights every time
        objective.draft.network.load_state_dict(start)
    loss = objective.loss(x.double(), y).total
    network = objective.draft.network
    for parameter, (name, summed) in zip(network.parameters(), total.items(), strict=True):
        (whole,) = torch.autograd.grad(loss, parameter, retain_graph=True)
        torch.testing.assert_close(summed, whole * count / (8 * accumulate), msg=name)


def test_a_lone_last_row_joins_the_batch_before_it(monkeypatch):
    rows = watched(monkeypatch, lambda stepper, number, record: record.rows)
    MAP().fit(with_statistics(), data(17), Categorical(), training=Training(epochs=1, batch_size=8))
    assert rows == [8, 9]


# -- rates and groups ----------------------------------------------------------------------------------------


def test_every_group_has_its_own_schedule(monkeypatch):
    rates = watched(
        monkeypatch, lambda stepper, *_: {group["name"]: group["lr"] for group in stepper.optimizer.param_groups}
    )
    training = Training(
        iterations=20, batch_size=8, lr=0.1, variational_lr=0.3, schedule=Linear(final=0.0),
        variational_schedule=Constant(), warmup=1.0, weight_decay=0.1,
    )  # fmt: skip
    posterior = MeanField().fit(mlp(), data(27), Categorical(), training=training)
    for step, rate in enumerate(rates):  # 4 steps per epoch
        rise = min(1, (step + 1) / 4)
        assert rate["weights"] == pytest.approx(0.1 * rise * (1 - step / 20))
        assert rate["variational"] == pytest.approx(0.3 * rise)
    assert len(rates) == 20 and posterior.history[-1]["step"] == 20


def test_groups_cover_what_is_learned_and_decay_only_weights(monkeypatch):
    groups = watched(monkeypatch, lambda stepper, *_: stepper.optimizer.param_groups)
    x, _ = data(12)
    net = fresh(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)))
    net[0].bias.requires_grad_(False)
    training = Training(iterations=1, weight_decay=0.1)
    MeanField().fit(net, (x, x[:, :2]), Gaussian(), training=training)
    weights, beside = groups[0]
    assert [tuple(p.shape) for p in weights["params"]] == [(6, 4), (2, 6), (2,)]
    assert [tuple(p.shape) for p in beside["params"]] == [(6, 4), (2, 6), (2,), (2,)]  # raw_std, then the noise
    assert (weights["weight_decay"], beside["weight_decay"]) == (0.1, 0.0)


def test_the_divergence_may_rise_slowly(monkeypatch):
    weights = watched(monkeypatch, lambda stepper, number, _: stepper.kl_weight(number))
    training = Training(epochs=4, batch_size=8, kl=KL(warmup=2, every="epoch"))
    MeanField().fit(mlp(), data(27), Categorical(), training=training)
    assert weights == [0.0] * 4 + [0.5] * 4 + [1.0] * 8


# -- sources of rows -------------------------------------------------------------------------------------------


# Two workers hand over batches in turn, which one would not; where there is one core, PyTorch warns of the second.
@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes:UserWarning")
def test_a_loader_is_rebuilt_around_our_order(monkeypatch):
    seen = watched(monkeypatch, lambda stepper, number, record: record.rows)
    x, y = data(27)
    expected = MeanField().fit(mlp(), (x, y), Categorical(), training=Training(epochs=2, batch_size=8), seed=1)
    assert seen == [8, 8, 8, 3] * 2
    pairs = Subset(TensorDataset(x, y), range(27))
    for workers, shuffle in ((0, True), (2, False)):
        loader = DataLoader(pairs, batch_size=8, shuffle=shuffle, num_workers=workers)
        posterior = MeanField().fit(mlp(), loader, Categorical(), training=Training(epochs=2), seed=1)
        assert same(posterior, expected)
    seen.clear()
    short = DataLoader(pairs, batch_size=8, drop_last=True)
    MAP().fit(mlp(), short, Categorical(), training=Training(epochs=1))
    assert seen == [8, 8, 8]


class Wasteful(Noisy):
    """Draws from the global state, to no effect."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        super().__getitem__(index)
        return self.inputs[index], self.targets[index]


def test_what_a_dataset_draws_does_not_reach_the_networks_dropout():
    fits = [
        MAP().fit(with_statistics(), rows, Categorical(), training=Training(epochs=2, batch_size=8))
        for rows in (data(27), Wasteful(*data(27)))
    ]
    assert same(*fits)


class Stream(IterableDataset):
    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.rows = list(zip(inputs, targets, strict=True))

    def __iter__(self):
        return iter(self.rows)


class Uneven:
    """A batch sampler of the user's, whose batches have the sizes they have."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self):
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return len(self.sizes)


def test_samplers_and_streams_of_the_users_run_in_their_own_order():
    x, y = data(20)
    stream = DataLoader(Stream(x, y), batch_size=8)
    training = Training(epochs=2, lr=0.05, optimizer=SGD(momentum=0.9, nesterov=True))
    posterior = MAP().fit(mlp(), stream, Categorical(), training=training, num_data=20)
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for _ in range(2):
        for rows in torch.arange(20).split(8):
            optimizer.zero_grad()
            (F.cross_entropy(net(x[rows]), y[rows]) * len(rows) / 8).backward()
            optimizer.step()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(posterior.weights()[name], parameter.detach(), rtol=0, atol=1e-6)

    sampler = WeightedRandomSampler([1.0] * 20, 12)
    drawn = DataLoader(TensorDataset(x, y), sampler=sampler, batch_size=8)
    fits = [MAP().fit(mlp(), drawn, Categorical(), training=training, seed=s) for s in (1, 1, 2)]
    assert same(fits[0], fits[1]) and not same(fits[0], fits[2])
    assert [entry["step"] for entry in fits[0].history] == [2, 4]

    with pytest.raises(ConfigError, match="its batch size 8 cannot become 4"):
        MAP().fit(mlp(), stream, Categorical(), training=Training(batch_size=4), num_data=20)


def test_batches_of_the_users_own_sizes_are_weighted_by_their_rows():
    x, y = data(20)
    loader = DataLoader(TensorDataset(x, y), batch_sampler=Uneven([8, 4, 8]))
    training = Training(epochs=1, lr=0.05, optimizer=SGD())
    posterior = MAP().fit(mlp(), loader, Categorical(), training=training, num_data=20)
    net = mlp()
    for rows in (slice(0, 8), slice(8, 12), slice(12, 20)):  # the first batch tells how large a full one is
        loss = F.cross_entropy(net(x[rows]), y[rows]) * (rows.stop - rows.start) / 8
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter -= 0.05 * gradient
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(posterior.weights()[name], parameter.detach(), rtol=0, atol=1e-6)


def test_schedules_over_a_stream_count_its_rows(monkeypatch):
    rates = watched(monkeypatch, lambda stepper, number, record: (record.lr, stepper.kl_weight(number)))
    x, y = data(20)
    training = Training(epochs=4, lr=1.0, schedule=Linear(), warmup=1, kl=KL(warmup=2))
    MAP().fit(mlp(), DataLoader(Stream(x, y), batch_size=8), Categorical(), training=training, num_data=20)
    expected = [(min(1, (s + 1) / 3) * (1 - s / 12), min(1, s / 6)) for s in range(12)]
    np.testing.assert_allclose(rates, expected)
    rates.clear()
    # Told of fewer rows than there are, the rate stays at its end instead of rising again.
    training = Training(epochs=2, lr=1.0, schedule=Cosine())
    MAP().fit(mlp(), DataLoader(Stream(x, y), batch_size=8), Categorical(), training=training, num_data=8)
    np.testing.assert_allclose([rate for rate, _ in rates], [1, 0.5, 0, 0, 0, 0], atol=1e-12)


def test_global_random_states_are_left_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    x, y = data(20)
    sampler = WeightedRandomSampler([1.0] * 20, 12)
    for rows in (
        (x, y),
        DataLoader(Noisy(x, y), batch_size=8, shuffle=True),
        DataLoader(TensorDataset(x, y), batch_size=8, sampler=sampler),
    ):
        training = Training(epochs=2, early_stopping=EarlyStopping(patience=1))
        MeanField().fit(with_statistics(), rows, Categorical(), training=training, validation=rows)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_seeds_decide_order_and_noise():
    fits = [
        MeanField().fit(with_statistics(), data(20), Categorical(), training=Training(epochs=1, batch_size=8), seed=s)
        for s in (1, 1, 2)
    ]
    assert same(fits[0], fits[1]) and not same(fits[0], fits[2])


# -- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("method", [MAP(), MeanField()])
def test_autocast(precision, method, monkeypatch):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    seen = set()

    class Spying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, inputs: Tensor) -> Tensor:
            outputs = self.inner(inputs)
            if self.training:
                seen.add(outputs.dtype)
            return outputs

    training = Training(epochs=10, batch_size=8, lr=0.05)
    scales = watched(monkeypatch, lambda stepper, *_: stepper.scaler.get_scale())
    full = method.fit(Spying(), data(64), Categorical(), training=training)
    seen.clear(), scales.clear()
    lower = method.fit(Spying(), data(64), Categorical(), training=dataclasses.replace(training, precision=precision))
    assert seen == {dtype}
    assert all(parameter.dtype == torch.float32 for parameter in lower.parameters())
    # Eight or eleven bits of mantissa: the same way down, not the same numbers.
    assert lower.history[-1]["loss"] == pytest.approx(full.history[-1]["loss"], rel=0.02)
    assert not same(lower, full)
    # Half precision needs its loss scaled, and what the scale brings in is taken out again before the step.
    assert set(scales) == ({65536.0} if precision == "fp16" else {1.0})


def test_a_step_that_overflows_half_precision_is_left_out(monkeypatch):
    seen = watched(
        monkeypatch,
        lambda stepper, *_: (stepper.scaler.get_scale(), stepper.objective.draft.network[0].weight.detach().clone()),
    )
    x, y = data(8)
    net = mlp()
    with torch.no_grad():
        net[0].weight.mul_(1e-3), net[2].weight.mul_(3e3)  # gradients of some thousands, times 65536
    training = Training(iterations=60, batch_size=8, lr=1e-6, precision="fp16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scale that is being found is no explosion
        posterior = MAP().fit(net, (x, y), Categorical(), training=training)
    scales = [scale for scale, _ in seen]
    assert scales[0] == 32768 and torch.equal(seen[0][1], net[0].weight)  # left out, and the scale halved
    assert scales[-1] < scales[0] and scales[-1] == scales[-2]
    assert not torch.equal(posterior.weights()["0.weight"], net[0].weight)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # PyTorch's tracer looks at drawn weights' gradients
def test_compile_compiles_whatever_the_network_is(monkeypatch):
    import torch._dynamo
    from torch._dynamo.utils import counters

    # The graph is captured as ever; running it as it is spares the minutes of a C++ compiler.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    training = Training(epochs=2, batch_size=8, lr=0.05)
    compiled = dataclasses.replace(training, compile=True)
    for method in (MAP(), MeanField()):
        torch._dynamo.reset()
        counters.clear()
        posterior = method.fit(mlp(), data(27), Categorical(), training=compiled)
        assert 1 <= counters["stats"]["unique_graphs"] <= 4  # not one per step
        assert gap(posterior, method.fit(mlp(), data(27), Categorical(), training=training)) < 1e-6
        assert posterior.network._compiled_call_impl is None
    torch._dynamo.reset()


@pytest.mark.parametrize("method", [MCDropout(rate=0.5), Rank1(components=2)], ids=["mc dropout", "rank-1"])
def test_compile_says_where_it_has_no_effect(method):
    training = Training(epochs=1, batch_size=8, lr=0.05)
    with pytest.warns(DubitoWarning, match="compile=True has no effect on"):
        posterior = method.fit(mlp(), data(27), Categorical(), training=dataclasses.replace(training, compile=True))
    assert gap(posterior, method.fit(mlp(), data(27), Categorical(), training=training)) == 0


def convolutional() -> nn.Module:
    return fresh(
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 4, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * 16, 3),
        )
    )


@pytest.mark.parametrize("method", [MAP(), MeanField()])
def test_channels_last_changes_no_result(method, monkeypatch):
    formats = watched(
        monkeypatch,
        lambda stepper, *_: stepper.objective.draft.network[0].weight.is_contiguous(memory_format=torch.channels_last),
    )
    x = torch.randn(20, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    training = Training(epochs=2, batch_size=8, lr=0.01, optimizer=SGD(momentum=0.9, nesterov=True))
    rows = (x, data(20)[1])
    plain = method.fit(convolutional(), rows, Categorical(), training=training)
    assert not any(formats)
    formats.clear()
    last = method.fit(convolutional(), rows, Categorical(), training=dataclasses.replace(training, channels_last=True))
    assert all(formats)
    assert all(tensor.is_contiguous() for tensor in last.stored().values())
    assert gap(plain, last) < 1e-5


def overfitting() -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    x, y = data(60)
    y[:20:4] = (y[:20:4] + 1) % 3  # wrong labels, to be learned by heart
    net = fresh(lambda: nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3)))
    return net, (x[:20], y[:20]), (x[20:], y[20:])


@pytest.mark.parametrize("method", [MAP(), MeanField(initial_std=0.05)])
def test_early_stopping_ends_and_goes_back_to_the_best_state(method):
    net, train, rest = overfitting()
    stopping = EarlyStopping(patience=3, margin=0.001, num_samples=4)
    training = Training(epochs=200, batch_size=8, lr=0.003, early_stopping=stopping)
    posterior = method.fit(net, train, Categorical(), training=training, validation=rest, seed=SEED)
    scores = [entry["validation_nll"] for entry in posterior.history]
    assert 5 < len(scores) < 200
    best, waited, expected = float("inf"), 0, []
    for score in scores:  # the rule, by hand
        best, waited = (score, 0) if score < best - 0.001 else (best, waited + 1)
        expected.append(waited)
    assert expected[-1] == 3 and max(expected[:-1]) < 3
    at_end = -posterior.predict(rest[0], 4, seed=SEED).log_prob(rest[1]).mean()
    assert float(at_end) == pytest.approx(best, abs=1e-6) and best < scores[-1]
    # Batch statistics went back too: the run that stops at the best epoch has the same bits.
    short = dataclasses.replace(training, epochs=scores.index(best) + 1)
    again = method.fit(net, train, Categorical(), training=short, validation=rest, seed=SEED)
    assert same(posterior, again)


def test_validation_only_watches():
    net, train, rest = overfitting()
    training = Training(epochs=4, batch_size=8, lr=0.02)
    alone = MeanField().fit(net, train, Categorical(), training=training)
    loader = DataLoader(Subset(TensorDataset(*rest), range(40)), batch_size=16)
    seen = [MeanField().fit(net, train, Categorical(), training=training, validation=v) for v in (rest, loader)]
    assert all(same(alone, posterior) for posterior in seen)
    assert [set(entry) for entry in alone.history] == [{"epoch", "step", "loss", "nll", "kl"}] * 4
    expected = -seen[0].predict(rest[0], 8, seed=0).log_prob(rest[1]).mean()
    for posterior in seen:
        assert posterior.history[-1]["validation_nll"] == pytest.approx(float(expected), abs=1e-6)
    with pytest.raises(ConfigError, match="validation="):
        MAP().fit(net, train, Categorical(), training=Training(early_stopping=EarlyStopping()))


def test_progress_is_silent_off_terminals_and_shown_on_request(capfd):
    training = Training(epochs=2, batch_size=8)
    for progress in (None, False):
        MeanField().fit(mlp(), data(), Categorical(), training=training, progress=progress)
    assert capfd.readouterr() == ("", "")
    posterior = MeanField().fit(mlp(), data(), Categorical(), training=training, progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "MeanField" in err and "8/8" in err
    for word in ("loss", "nll", "kl", "lr", "0:00:00"):
        assert word in err
    assert len(posterior.history) == 2


# -- explosions ------------------------------------------------------------------------------------------------


class Spiking(nn.Module):
    """A network whose gradient is enormous at chosen steps, though its outputs are as ever."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.inner, self.calls, self.steps = mlp(), 0, steps

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.inner(inputs)
        if self.training:
            if self.calls in self.steps:
                outputs = outputs.detach() + 1e6 * (outputs - outputs.detach())
            self.calls += 1
        return outputs


def test_gradients_that_explode_give_one_warning():
    training = Training(iterations=100, batch_size=8, lr=1e-6)
    with pytest.warns(DubitoWarning, match=r"at step 64 is .*clip_norm") as caught:
        MAP().fit(Spiking(64, 72), data(), Categorical(), training=training)
    assert len(caught) == 1 and caught[0].filename == __file__
    # Clipped, a spike does no harm and needs no words.
    MAP().fit(Spiking(64, 72), data(), Categorical(), training=dataclasses.replace(training, clip_norm=1.0))
    MAP().fit(Spiking(), data(), Categorical(), training=training)


def test_clipping_bounds_every_step(monkeypatch):
    def norm(stepper: GradientStepper, *_) -> float:
        return float(torch.nn.utils.get_total_norm([p.grad for p in stepper.parameters]))

    norms = watched(monkeypatch, norm)
    training = Training(epochs=2, batch_size=8, clip_norm=0.01)
    MAP().fit(mlp(), data(), Categorical(), training=training)
    assert max(norms) == pytest.approx(0.01, rel=1e-3)


def test_a_run_of_iterations_may_end_within_an_epoch(monkeypatch):
    rows = watched(monkeypatch, lambda stepper, number, record: record.rows)
    posterior = MAP().fit(mlp(), data(27), Categorical(), training=Training(iterations=6, batch_size=8))
    assert rows == [8, 8, 8, 3, 8, 8]
    assert [(entry["epoch"], entry["step"]) for entry in posterior.history] == [(1, 4), (2, 6)]


def test_the_plan_and_run_are_plain_settings():
    assert Run().processes is None and Processes().share(7) == (0, 7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan(1, 1, 1, 1, 1).total = 2  # pyright: ignore[reportAttributeAccessIssue]
    assert Adam() == Adam() and hash(Training()) == hash(Training())
