"""Members side by side are members one after the other: every form of pass, optimiser, end and interruption."""

import copy
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dubito import MAP, Categorical, DeepEnsemble, Gaussian, Interrupted, Training, jobs, seeds
from dubito.likelihoods import GaussianLikelihood
from dubito.networks import renewed
from dubito.training import SGD, AdamW, Cosine, EarlyStopping, forward, members
from dubito.training.forward import Forward
from dubito.training.optimizers import Adam

QUICK = Training(epochs=2, batch_size=16, lr=1e-2)
SEED = 5


class Attending(nn.Module):
    """Tokens, attention, and a layer that holds rows second."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.outer = nn.Embedding(7, 8), nn.Linear(8, 2)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.outer(self.encoder(self.table(tokens).transpose(0, 1)).mean(0))

    def reset_parameters(self) -> None:
        """Its parameters are its modules'."""


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x)[0][:, -1])


class Centred(nn.Linear):
    """Rows meet: a stack of all members' rows would have another mean."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Counting(nn.Linear):
    """What a pass assigns is no tensor that a stack could hold."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x) / (1 + 0.1 * self.calls)


class Moving(nn.Linear):
    """A buffer that a pass replaces, and does not write into."""

    average: Tensor

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("average", torch.zeros(sizes[0], dtype=torch.double))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return super().forward(x - self.average)


def rows(*shape: int, count: int = 52) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, *shape, generator=torch.Generator().manual_seed(1)).double()
    return x, (x.flatten(1)[:, 0] > 0).long()


def mlp() -> nn.Module:
    with seeds.forked(0):
        return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).double()


def alone(method: DeepEnsemble, net: nn.Module, data, likelihood, training: Training, **keywords):
    """Point estimates from the starts and with the seeds of the members, each fitted by itself."""
    for member in range(method.members):
        start = copy.deepcopy(net)
        if member:
            with seeds.forked(SEED, "start", member):
                start = renewed(start)
        seed = seeds.derived(SEED, "member", member)
        yield MAP(prior_std=method.prior_std).fit(start, data, likelihood, training=training, seed=seed, **keywords)


def assert_alike(net, data, likelihood=None, training=QUICK, *, method=None, atol=1e-12, **keywords):
    """Members fitted at once have the weights, buffers, noise and histories of those fitted alone."""
    method, likelihood = method or DeepEnsemble(members=3), likelihood or Categorical()
    posterior = method.fit(net, data, likelihood, training=training, seed=SEED, **keywords)
    for member, point in enumerate(alone(method, net, data, likelihood, training, **keywords)):
        draw = posterior.draw(member, None)
        for name, tensor in (*point.network.named_parameters(), *point.network.named_buffers()):
            torch.testing.assert_close(draw[name], tensor.detach(), rtol=0, atol=atol)
        history = [{**entry, "member": member} for entry in point.history]
        for mine, other in zip(
            [entry for entry in posterior.history if entry["member"] == member], history, strict=True
        ):
            assert mine == pytest.approx(other, abs=1e-9)
        if isinstance(point.likelihood, GaussianLikelihood):
            torch.testing.assert_close(posterior.likelihood.std(member), point.likelihood.std().detach())
    return posterior


@pytest.fixture
def passes(monkeypatch) -> list[Forward | None]:
    """The passes that were chosen."""
    chosen: list[Forward | None] = []

    def spied(*arguments):
        chosen.append(forward.forward_of(*arguments))
        return chosen[-1]

    monkeypatch.setattr(members, "forward_of", spied)
    return chosen


def stacked(chosen: Forward | None) -> bool:
    return chosen is not None and not chosen.mapped


# -- passes ------------------------------------------------------------------------------------------------------------

#: Networks, the shape of a row, and whether `vmap` runs them; None where they are trained one by one.
NETWORKS = {
    "dense": (lambda: mlp(), (3,), False),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)), (3,), False,
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)), (1, 6, 6), False,
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), (3,), True,
    ),
    "rows that meet": (lambda: Centred(3, 2), (3,), True),
    "own dropout": (lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 2)), (3,), None),
    "recurrent": (Recurrent, (4, 3), None),
    "a counter": (lambda: Counting(3, 2), (3,), None),
    "a replaced buffer": (lambda: Moving(3, 2), (3,), None),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_members_at_once_are_members_alone(name: str, passes) -> None:
    make, shape, kind = NETWORKS[name]
    with seeds.forked(0):
        net = make().double()
    # Before batch norm a bias has a gradient of 0 but for rounding, which Adam scales up to its eps.
    assert_alike(net, rows(*shape), atol=1e-8 if name == "batch norm" else 1e-12)
    assert [None if chosen is None else chosen.mapped for chosen in passes] == [kind]


def test_layers_that_hold_rows_second_are_surveyed(passes) -> None:
    with seeds.forked(0):
        net = Attending().double()
    tokens = torch.randint(7, (52, 5), generator=torch.Generator().manual_seed(2))
    assert_alike(net, (tokens, rows(3)[1]), atol=1e-9)
    assert stacked(passes[0]) and passes[0].surveyed is not None


def test_large_passes_keep_the_loop(passes, monkeypatch) -> None:
    monkeypatch.setattr(forward, "MOST_NUMBERS", 16 * (3 + 8) + 8 * 2 - 1)  # inputs of both layers, and one weight
    DeepEnsemble(members=2).fit(mlp(), rows(3), Categorical(), training=QUICK)
    monkeypatch.setattr(forward, "MOST_NUMBERS", 16 * (3 + 8) + 8 * 2)
    DeepEnsemble(members=2).fit(mlp(), rows(3), Categorical(), training=QUICK)
    assert passes[0] is None and stacked(passes[1])


def test_frozen_and_tied_parameters_stay_so(passes) -> None:
    net = mlp()
    net[0].bias.requires_grad_(False)
    posterior = assert_alike(net, rows(3))
    assert all(torch.equal(posterior.draw(member, None)["0.bias"], net[0].bias) for member in range(3))
    with seeds.forked(0):
        tied = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2)).double()
    tied[2].weight = tied[0].weight
    assert_alike(tied, rows(3))
    assert all(stacked(chosen) for chosen in passes)


# -- optimisers --------------------------------------------------------------------------------------------------------

TRAININGS = {
    "momentum and decay": replace(QUICK, optimizer=SGD(momentum=0.9, nesterov=True), weight_decay=0.1),
    "plain descent": replace(QUICK, optimizer=SGD()),
    "decoupled decay, schedule, warmup": replace(
        QUICK, optimizer=AdamW(), weight_decay=0.1, schedule=Cosine(), warmup=1.0
    ),
    "clipped norms": replace(QUICK, clip_norm=0.2),
    "accumulated passes": replace(QUICK, accumulate=2),
    "uneven batches": replace(QUICK, batch_size=19),
    "iterations": Training(iterations=5, batch_size=16, lr=1e-2),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_optimisers_treat_every_member_by_itself(name: str, passes) -> None:
    assert_alike(mlp(), rows(3), training=TRAININGS[name])
    assert stacked(passes[0])


def test_priors_and_learned_noise_are_those_of_a_member(passes) -> None:
    x, y = rows(3)
    assert_alike(mlp(), (x, y), method=DeepEnsemble(members=3, prior_std=0.3))
    targets = x[:, :2] + 0.1 * y[:, None]
    assert_alike(mlp(), (x, targets), Gaussian(), replace(QUICK, clip_norm=1.0, variational_lr=0.1))
    assert len(passes) == 2 and all(stacked(chosen) for chosen in passes)


def test_other_optimisers_keep_the_loop(passes) -> None:
    class Whole(Adam):
        """An optimiser that might look at whole tensors."""

    DeepEnsemble(members=2).fit(mlp(), rows(3), Categorical(), training=replace(QUICK, optimizer=Whole()))
    assert passes == []


def test_augmented_rows_are_those_of_a_member(passes) -> None:
    x, y = rows(3)

    class Augmented(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(x)

        def __getitem__(self, index: int):
            return x[index] + 0.1 * torch.randn(3, dtype=torch.double), y[index]

    assert_alike(mlp(), Augmented())
    assert stacked(passes[0])


# -- ends --------------------------------------------------------------------------------------------------------------


def test_members_leave_one_by_one(passes) -> None:
    (x, y), (other, labels) = rows(3), rows(3, count=30)
    training = Training(epochs=30, batch_size=16, lr=0.01, early_stopping=EarlyStopping(patience=2))
    other = other + torch.randn(other.shape, generator=torch.Generator().manual_seed(3)).double()
    posterior = assert_alike(
        mlp(), (x, y), training=training, method=DeepEnsemble(members=5), validation=(other, labels)
    )
    lengths = [sum(entry["member"] == member for entry in posterior.history) for member in range(5)]
    assert len(set(lengths)) > 2 and max(lengths) < 30
    assert stacked(passes[0])


def interrupting(data, at: int):
    """A data set that sends this process the signal of Ctrl-C when its reading number `at` begins."""

    class Interrupting(torch.utils.data.Dataset):
        read = 0

        def __len__(self) -> int:
            return len(data[1])

        def __getitem__(self, index: int):
            Interrupting.read += 1
            if Interrupting.read == at:
                os.kill(os.getpid(), signal.SIGINT)
            return data[0][index], data[1][index]

    return Interrupting()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C reaches Python, also where the tests run in the background and the shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("optimizer", [Adam(), SGD(momentum=0.9)])
def test_an_interrupted_ensemble_goes_on_from_its_members_checkpoints(tmp_path, optimizer) -> None:
    data, path = rows(3), tmp_path / "run.ckpt"
    method, training = DeepEnsemble(members=3), replace(QUICK, epochs=3, optimizer=optimizer)
    counted = interrupting(data, -1)
    whole = method.fit(mlp(), counted, Categorical(), training=training, seed=SEED, checkpoint=tmp_path / "whole.ckpt")
    before = counted.read - 3 * 3 * len(data[1])  # what is read for the example and for the checkpoint's facts
    with pytest.raises(Interrupted, match=r"after step 5 of 12.*run\.ckpt\.member-0"):
        # the first four steps read 3 · 52, the fifth 3 · 16 rows
        method.fit(
            mlp(), interrupting(data, before + 3 * 52 + 20), Categorical(), training=training, seed=SEED,
            checkpoint=path,
        )  # fmt: skip
    (tmp_path / "run.ckpt.member-1").unlink()  # a member behind the others, which wait for it
    again = method.fit(mlp(), interrupting(data, -1), Categorical(), training=training, seed=SEED, checkpoint=path)
    for member in range(3):
        for name, tensor in whole.draw(member, None).items():
            torch.testing.assert_close(again.draw(member, None)[name], tensor, rtol=0, atol=1e-12)
    assert [entry["step"] for entry in again.history] == [entry["step"] for entry in whole.history]


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_members_are_jobs_on_a_cluster_of_dask() -> None:
    distributed = pytest.importorskip("distributed", reason="clusters need the extra dubito[cluster]")
    method, data = DeepEnsemble(members=3), rows(3)
    here = method.fit(mlp(), data, Categorical(), training=QUICK, seed=SEED)
    options = {"processes": True, "n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with (
        distributed.LocalCluster(**options) as cluster,
        jobs.pooled(backend="dask", scheduler=cluster.scheduler_address),
    ):
        there = method.fit(mlp(), data, Categorical(), training=QUICK, seed=SEED)
    for member in range(3):
        for name, tensor in here.draw(member, None).items():
            torch.testing.assert_close(there.draw(member, None)[name], tensor, rtol=0, atol=1e-12)
    assert [set(entry) for entry in there.history] == [set(entry) for entry in here.history]
    assert [entry["member"] for entry in there.history] == [0, 0, 1, 1, 2, 2]
    assert jobs.workers() is None


def test_shares_of_members_go_to_as_many_jobs_as_run_at_a_time(monkeypatch) -> None:
    shares = []

    def each(function, arguments, **options):
        shares.extend([list(share) for _, share, _, _ in arguments])
        assert options == {"jobs": 2, "backend": "local", "scheduler": None}
        return [function(*argument) for argument in reversed(arguments)]  # in the order in which they end

    monkeypatch.setattr(jobs, "each", each)
    method, data = DeepEnsemble(members=3), rows(3)
    with jobs.pooled(2):
        there = method.fit(mlp(), data, Categorical(), training=QUICK, seed=SEED)
    here = method.fit(mlp(), data, Categorical(), training=QUICK, seed=SEED)
    assert shares == [[0, 2], [1]]
    torch.testing.assert_close(there.sample_outputs(data[0], 3), here.sample_outputs(data[0], 3))


class Padded(nn.Module):
    """A table whose padding is never learned, under batch norm, which takes a pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.last = nn.Embedding(9, 4, padding_idx=0), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.norm(self.table(tokens).mean(1)).relu())

    def reset_parameters(self) -> None:
        """Its parameters are its modules'."""


def test_padding_is_learned_by_no_member() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(9, (32, 5))
    rows = tokens, torch.randn(32, 2)
    posterior = DeepEnsemble(members=3).fit(
        Padded(), rows, Gaussian(), training=replace(QUICK, batch_size=8), seed=SEED
    )
    for member in range(3):
        assert not posterior.fold(member).table.weight[0].any()
