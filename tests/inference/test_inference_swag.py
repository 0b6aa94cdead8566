"""SWA and SWAG: moments of the weights on the way, the sampler's covariance, batch norm, checkpoints."""

import itertools
import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import SWA, SWAG, Categorical, ConfigError, Gaussian, Training
from dubito.inference.swag.averages import Averages, AveragingStepper, Gathering
from dubito.inference.swag.batch_norm import normalising, refresh
from dubito.inputs import Batch
from dubito.sources import TensorSource
from dubito.training import SGD, EarlyStopping

QUICK = Training(epochs=4, batch_size=8, lr=0.05, optimizer=SGD(momentum=0.9, nesterov=True))


def rows(*shape: int, seed: int = 0, dtype=torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def data(count: int = 24, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    inputs = rows(count, 3, dtype=dtype)
    return inputs, (inputs[:, 0] > 0).long()


def mlp(dtype=torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def normed() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


class Watching:
    """Keeps the weights after every step of a run."""

    def __init__(self, monkeypatch) -> None:
        self.weights: list[Tensor] = []
        plain = AveragingStepper.step

        def step(stepper, *arguments):
            record = plain(stepper, *arguments)
            own = stepper.objective.draft.network
            self.weights.append(flat(dict(own.named_parameters())).detach().clone())
            return record

        monkeypatch.setattr(AveragingStepper, "step", step)


# -- when -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [1, 2, 7, 40, 1000])
@pytest.mark.parametrize("start", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("snapshots", [1, 3, 20])
def test_snapshots_are_even_and_end_with_the_run(total, start, snapshots):
    gathering = Gathering(start=start, snapshots=snapshots)
    due = [made for made in range(1, total + 1) if gathering.due(made, total)]
    assert due[-1] == total and all(made > min(int(start * total), total - 1) for made in due)
    assert len(due) == min(snapshots, total - min(int(start * total), total - 1))
    gaps = {b - a for a, b in itertools.pairwise(due)}
    assert len(gaps) <= 2 and (not gaps or max(gaps) - min(gaps) <= 1)


# -- what -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_running_moments_are_those_of_two_passes(dtype):
    values = 1000 + rows(13, 4, 3, dtype=dtype)  # E[w²] − E[w]² would lose every digit in single precision
    averages = Averages(Gathering(start=0, snapshots=1, variance=True, rank=5))
    for value in values:
        averages.collect({"w": value})
    torch.testing.assert_close(averages.mean["w"], values.mean(0))
    variance = values.double().var(0, unbiased=False).to(dtype)
    torch.testing.assert_close(averages.squares["w"] / 13, variance, rtol=2e-3, atol=0)
    means = values.double().cumsum(0) / torch.arange(1, 14, dtype=torch.float64)[:, None, None]
    expected = (values.double() - means).to(dtype)  # deviations from the mean so far
    kept = averages.deviations["w"]
    for number in range(8, 13):
        torch.testing.assert_close(kept[number % 5], expected[number], rtol=2e-3, atol=1e-4)


def test_the_mean_of_a_run_by_hand(monkeypatch):
    watching = Watching(monkeypatch)
    posterior = SWA(start=0.5, snapshots=3).fit(mlp(), data(), Categorical(), training=QUICK)
    weights = torch.stack(watching.weights)  # 12 steps; gathered after 8, 10, 12
    torch.testing.assert_close(flat(posterior.weights()), weights[[7, 9, 11]].mean(0))
    assert posterior.num_atoms == 1
    last = SWA(start=0.99).fit(mlp(), data(), Categorical(), training=QUICK)
    plain = dubito.MAP().fit(mlp(), data(), Categorical(), training=QUICK)
    torch.testing.assert_close(flat(last.weights()), flat(plain.weights()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 1, 3, 20])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_the_samplers_linear_map_has_the_covariance(monkeypatch, dtype, rank, scale):
    watching = Watching(monkeypatch)
    method = SWAG(start=0.5, snapshots=6, rank=rank, scale=scale)
    posterior = method.fit(mlp(dtype), data(dtype=dtype), Categorical(), training=QUICK)
    weights = torch.stack(watching.weights)[6:].double()  # after each of the last 6 steps
    mean = weights.mean(0)
    size, kept = len(mean), min(rank, 6)
    torch.testing.assert_close(flat(posterior.weights()), mean.to(dtype))
    running = weights.cumsum(0) / torch.arange(1, 7)[:, None]
    deviations = (weights - running)[6 - kept :].T  # [P, K]
    dense = weights.var(0, unbiased=False).diag()
    if kept > 1:
        dense = dense + deviations @ deviations.T / (kept - 1)
    dense = scale / 2 * dense

    names = list(posterior.group("variance").names)
    assert names == list(posterior.weights()) and posterior.rank == kept
    shapes = [posterior.weights()[name].shape for name in names]
    stds = {name: variance.sqrt() for name, variance in posterior.group("variance").items()}
    columns = []
    for unit in torch.eye(size + kept, dtype=dtype):
        own = unit[:size].split([shape.numel() for shape in shapes])
        moved = [
            posterior.deviation(name, stds[name] * z.reshape(shape), unit[size:])
            for name, z, shape in zip(names, own, shapes, strict=True)
        ]
        columns.append(torch.cat([part.reshape(-1) for part in moved]))
    linear = torch.stack(columns, 1).double()  # F, [P, P + K]
    torch.testing.assert_close(linear @ linear.T, dense, rtol=2e-3 if dtype == torch.float32 else 1e-7,
                               atol=1e-5 * float(dense.max()))  # fmt: skip


def test_draws_have_the_covariance():
    posterior = SWAG(snapshots=6, rank=4).fit(mlp(), data(), Categorical(), training=QUICK)
    draws = torch.stack([flat(posterior.draw(i, posterior.generator(0, i))) for i in range(4000)]).double()
    names = list(posterior.weights())
    deviations = torch.cat([posterior.group("deviations")[name].flatten(1) for name in names], 1).double()
    variance = flat(dict(posterior.group("variance").items())).double()
    dense = (variance.diag() + deviations.T @ deviations / 3) / 2
    found = torch.cov(draws.T, correction=0)
    # a sample covariance has the standard error √((v_i v_j + c_ij²)/n)
    error = ((dense.diag()[:, None] * dense.diag() + dense**2) / 4000).sqrt()
    assert ((found - dense).abs() < 5 * error).all()
    assert float((found - dense.diag().diag()).abs().max()) > 5 * float(error.max())  # layers are correlated


def test_frozen_weights_and_learned_noise():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    net[0].requires_grad_(False)
    inputs, _ = data()
    posterior = SWAG(snapshots=4).fit(net, (inputs, inputs[:, :1]), Gaussian(), training=QUICK)
    assert set(posterior.group("variance").names) == {"2.weight", "2.bias"}
    assert posterior.holds("0.weight").startswith("point (frozen") and "rank 4 of 4" in posterior.holds("2.weight")
    draw = posterior.draw(0, posterior.generator(0, 0))
    assert torch.equal(draw["0.weight"], net[0].weight)
    assert float(posterior.likelihood.std()) > 0


# -- batch norm -----------------------------------------------------------------------------------------------


def test_batch_norm_is_refreshed_at_the_mean():
    inputs, targets = data(32)
    training = Training(epochs=4, batch_size=32, lr=0.05)  # one batch: its statistics are those of all rows
    posterior = SWA(snapshots=3).fit(normed(), (inputs, targets), Categorical(), training=training)
    hidden = posterior.network[0](inputs).detach()
    layer = posterior.network[1]
    torch.testing.assert_close(layer.running_mean, hidden.mean(0))
    torch.testing.assert_close(layer.running_var, hidden.var(0))  # unbiased, as PyTorch keeps it
    assert layer.momentum == 0.1 and not layer.training
    frozen = normed()
    frozen[1].eval()
    kept = SWA().fit(frozen, (inputs, targets), Categorical(), training=training)
    assert torch.equal(kept.network[1].running_mean, frozen[1].running_mean)


def test_refreshing_is_a_mean_over_batches_whatever_came_before():
    net = normed()
    inputs, targets = data(30)
    source = TensorSource(Batch(inputs, targets))
    for _ in range(2):
        refresh(net, dict(net.named_parameters()), normalising(net), source, 10, seed=4)
        found = net[1].running_mean.clone()
        with torch.no_grad():
            torch.testing.assert_close(found, net[0](inputs).mean(0))  # batches of one size
    assert int(net[1].num_batches_tracked) == 3


def test_every_draw_may_have_statistics_of_its_own(tmp_path):
    inputs, targets = data(32)
    training = Training(epochs=4, batch_size=32, lr=0.05)
    method = SWAG(snapshots=3, scale=2.0)
    posterior = method.fit(normed(), (inputs, targets), Categorical(), training=training)
    own = posterior.refreshed((inputs, targets), num_samples=3, seed=5, batch_size=32)
    assert own.num_atoms == 3 and posterior.num_atoms is None
    for index in range(4):
        draw = own.draw(index, None)
        plain = posterior.draw(index % 3, posterior.generator(5, index % 3))
        assert all(torch.equal(draw[name], plain[name]) for name in plain)
        hidden = nn.functional.linear(inputs, draw["0.weight"], draw["0.bias"])
        torch.testing.assert_close(draw["1.running_mean"], hidden.mean(0))
    folded = own.fold(1)
    torch.testing.assert_close(folded(inputs), own.sample_outputs(inputs, 3)[1])
    assert torch.equal(posterior.network[1].running_mean, own.network[1].running_mean)  # it was not changed
    own.save(tmp_path / "s.safetensors")
    again = dubito.load(tmp_path / "s.safetensors", normed())
    assert torch.equal(again.predict(inputs).probs, own.predict(inputs).probs) and again.num_atoms == 3
    plain = SWAG().fit(mlp(), data(), Categorical(), training=QUICK)
    assert plain.refreshed(data()) is plain  # nothing to refresh


# -- runs -----------------------------------------------------------------------------------------------------


class Crash(Exception):
    pass


@pytest.mark.parametrize("method", [SWA(snapshots=4), SWAG(snapshots=4, rank=2)])
@pytest.mark.parametrize("at", [2, 9])
def test_an_interrupted_run_goes_on(monkeypatch, tmp_path, method, at):
    training = Training(epochs=4, batch_size=8, lr=0.05, checkpoint_minutes=0)
    expected = method.fit(normed(), data(), Categorical(), training=training, seed=3)
    with monkeypatch.context() as patch:
        plain = AveragingStepper.step

        def step(stepper, number, *arguments):
            if number == at:
                raise Crash
            return plain(stepper, number, *arguments)

        patch.setattr(AveragingStepper, "step", step)
        with pytest.raises(Crash):
            method.fit(normed(), data(), Categorical(), training=training, seed=3, checkpoint=tmp_path / "c")
    found = method.fit(normed(), data(), Categorical(), training=training, seed=3, checkpoint=tmp_path / "c")
    assert found.details == expected.details
    for name, tensor in expected.stored().items():
        assert torch.equal(found.stored()[name], tensor), name
    x, _ = data()
    assert torch.equal(found.predict(x, 4, seed=1).probs, expected.predict(x, 4, seed=1).probs)


def test_a_loop_of_ones_own():
    built = SWAG(rank=2).build(mlp(), Categorical(), 24)
    with pytest.raises(ConfigError, match=r"call collect\(\)"):
        built.posterior()
    optimizer = torch.optim.SGD(built.parameter_groups(0.1))
    inputs, targets = data()
    seen = []
    for step in range(5):
        optimizer.zero_grad()
        built.loss(inputs, targets).total.backward()
        optimizer.step()
        if step >= 2:
            built.collect()
            seen.append(flat(dict(built.draft.network.named_parameters())).detach().clone())
    posterior = built.posterior()
    torch.testing.assert_close(flat(posterior.weights()), torch.stack(seen).mean(0))
    assert posterior.details == {"rank": 2, "snapshots": 3}
    optimizer.step()
    torch.testing.assert_close(flat(posterior.weights()), torch.stack(seen).mean(0))  # later steps change nothing


def test_settings_are_checked():
    for wrong in ({"start": 1.0}, {"snapshots": 0}, {"rank": -1}, {"scale": 0.0}, {"prior_std": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            SWAG(**wrong)
    stopping = Training(epochs=2, early_stopping=EarlyStopping())
    with pytest.raises(ConfigError, match="early_stopping"):
        SWA().fit(mlp(), data(), Categorical(), training=stopping, validation=data())
    assert math.isfinite(SWA(prior_std=1.0).fit(mlp(), data(), Categorical(), training=QUICK).history[-1]["kl"])


def test_a_stream_that_is_longer_than_it_said_ends_with_the_snapshots_that_were_planned():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            inputs = torch.randn(90, 3, generator=torch.Generator().manual_seed(0))
            for first, last in ((0, 30), (30, 45), (45, 60), (60, 75), (75, 90)):
                yield inputs[first:last], inputs[first:last, :1]

    loader = torch.utils.data.DataLoader(Stream(), batch_size=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dubito.DubitoWarning)
        posterior = dubito.SWAG(snapshots=5, rank=3).fit(
            nn.Linear(3, 1), loader, dubito.Gaussian(), training=dubito.Training(epochs=10), num_data=90
        )
    assert posterior.details["snapshots"] == 5
