"""Normal weights beside factors: each part is what it is alone, and together they are one posterior."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dubito
from dubito import (
    Around,
    BatchEnsemble,
    Categorical,
    ConfigError,
    Flipout,
    Implicit,
    KTied,
    MeanField,
    NetworkError,
    Rank1,
    Training,
)
from dubito.fitting import Run, Start
from dubito.inputs import Batch
from dubito.training import KL

QUICK = Training(epochs=2, batch_size=8, lr=1e-2)
INPUTS = ("embedding.weight", "lstm.weight_ih_l0", "head.bias")
NORMALS = {
    "mean-field": MeanField(prior_std=0.3, initial_std=0.1, initial_spread=0.2, subset=INPUTS),
    "k-tied": KTied(prior_std=0.3, initial_std=0.1, subset=INPUTS),
}
METHODS = {
    "rank1": Rank1(components=3, initial_rate=0.1, beside=NORMALS["mean-field"]),
    "rank1-k-tied": Rank1(components=3, initial_rate=0.1, beside=NORMALS["k-tied"]),
    "batch-ensemble": BatchEnsemble(components=3, beside=NORMALS["mean-field"]),
    "implicit": Implicit(components=3, bias_factors=True, beside=NORMALS["mean-field"]),
}
every_method = pytest.mark.parametrize("label", METHODS)


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(7, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0][:, -1])


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Sequences().double()


STREAM = torch.Generator().manual_seed(2)
IDS, LABELS = torch.randint(7, (20, 4), generator=STREAM), torch.randint(3, (20,), generator=STREAM)


def fit(method, **options):
    return method.fit(network(), (IDS, LABELS), Categorical(), training=options.pop("training", QUICK), **options)


def bound(method, net: nn.Module | None = None):
    """An objective that has seen a batch."""
    start = Start(network=net or network(), likelihood=Categorical().build(None), num_data=50, run=Run(seed=0))
    built = method.objective(start)
    built.bind(IDS)
    return built


def gradients(built, kl_weight: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    built.zero_grad()
    built.rows_seen = 0  # the implicit network's components take turns
    loss = built.batch_loss(Batch(IDS, LABELS), kl_weight, torch.Generator().manual_seed(3))
    loss.total.backward()
    return loss.total.detach(), {n: p.grad for n, p in built.named_parameters() if p.grad is not None}


def normal_kl(mean: Tensor, std: Tensor, prior_mean: float, prior_std: float) -> Tensor:
    laws = [(mean, std), (torch.full_like(mean, prior_mean), torch.full_like(std, prior_std))]
    return torch.distributions.kl_divergence(*(torch.distributions.Normal(*law) for law in laws)).sum()


# -- what each part is alone -------------------------------------------------------------------------------------


def without_factors(posterior) -> None:
    """All factors become 1, of no variance, in place."""
    for key in posterior.tensors:
        for _, values in posterior.group(key).items() if key.endswith("_mean") else ():
            values.fill_(1.0)
        for _, values in posterior.group(key).items() if key.endswith("put_raw_std") else ():
            values.fill_(-1e4)


@pytest.mark.parametrize("beside", NORMALS.values(), ids=NORMALS.keys())
@pytest.mark.parametrize("rows", [1, 20])
def test_with_factors_of_one_it_is_the_method_beside_alone_draw_by_draw(beside, rows: int):
    both = fit(BatchEnsemble(components=1, beside=beside))
    without_factors(both)
    alone = beside.objective(Start(network=network(), likelihood=both.likelihood, num_data=50)).posterior()
    with torch.no_grad():
        for name, weight in alone.weights().items():
            weight.copy_(both.weights()[name])
        for key in ("raw_std", "log_u", "log_v"):
            for name, values in alone.group(key).items() if key in alone.tensors else ():
                values.copy_(both.group(key)[name])
    draws = [posterior.sample_outputs(IDS[:rows], 6, seed=5) for posterior in (both, alone)]
    torch.testing.assert_close(*draws, rtol=1e-11, atol=1e-12)
    assert draws[0].std(0).min() > 1e-3
    for index in range(4):
        weights = [posterior.draw(index, posterior.generator(5, index)) for posterior in (both, alone)]
        for name in weights[1]:
            torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("label", ["rank1", "batch-ensemble", "implicit"])
def test_without_variance_beside_it_is_the_method_of_factors_alone_draw_by_draw(label: str):
    both = fit(METHODS[label])
    for _, values in both.group("raw_std").items():
        values.fill_(-1e4)
    names = list(both.uses)
    plain = replace(METHODS[label], beside=None, subset=names)
    alone = bound(plain).posterior()
    with torch.no_grad():
        for name, weight in alone.weights().items():
            weight.copy_(both.weights()[name])
        for key in alone.tensors:
            for name, values in alone.group(key).items():
                if key == "biases" and name == "head.bias":  # one for all where it is Normal
                    values.copy_(both.weights()[name].expand_as(values))
                elif key.startswith("bias_") and name == "head.bias":
                    values.fill_(1.0 if key == "bias_mean" else -1e4)
                else:
                    values.copy_(both.group(key)[name])
    for index in range(6):
        drawn = [posterior.draw(index, posterior.generator(5, index)) for posterior in (both, alone)]
        for name in names:
            if label != "implicit":  # whose biases take noise before factors do
                torch.testing.assert_close(drawn[0][name], drawn[1][name], rtol=1e-12, atol=1e-13)
        for name in INPUTS:
            torch.testing.assert_close(drawn[0][name], both.weights()[name], rtol=1e-12, atol=1e-13)


# -- the loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl", ["mean", "sum"])
@pytest.mark.parametrize("label", ["rank1", "rank1-k-tied"])
def test_the_divergence_is_the_sum_of_both(label: str, kl: str):
    method = replace(METHODS[label], kl=kl)
    built = bound(method)
    draft = built.draft
    factors = torch.zeros((), dtype=torch.float64)
    for side in ("input", "output"):
        for name, mean in draft.group(f"{side}_mean").items():
            std = F.softplus(draft.group(f"{side}_raw_std")[name])
            factors = factors + normal_kl(mean, std, 1.0, 0.1) / (3 if kl == "mean" else 1)
    weights, beside = draft.weights(), torch.zeros((), dtype=torch.float64)
    for name in INPUTS:
        if "log_u" in draft.tensors and name in draft.group("log_u"):
            u, v = (draft.group(key)[name].exp() for key in ("log_u", "log_v"))
            std = (u.mT @ v).view(weights[name].shape)
        else:
            std = F.softplus(draft.group("raw_std")[name])
        beside = beside + normal_kl(weights[name], std, 0.0, 0.3)
    assert factors > 1 and beside > 1
    loss = built.batch_loss(Batch(IDS, LABELS), 0.5, torch.Generator().manual_seed(3))
    for value in (built.kl(), loss.kl):
        torch.testing.assert_close(value, factors + beside, rtol=1e-12, atol=0)
    torch.testing.assert_close(loss.total, loss.nll + 0.5 / 50 * (factors + beside), rtol=1e-12, atol=0)


@pytest.mark.parametrize("label", ["rank1", "rank1-k-tied", "batch-ensemble"])
def test_the_likelihood_is_that_of_one_draw_of_the_normal_weights_in_every_component(label: str):
    built = bound(METHODS[label])
    draft, generator = built.draft, torch.Generator().manual_seed(3)
    noise = built.drawn(Batch(IDS, LABELS), generator)
    drawn = {name: draft.normals.scale(name).draw(draft.weights()[name], generator) for name in draft.random}
    assert set(drawn) == set(INPUTS) and not torch.equal(drawn["head.bias"], draft.weights()["head.bias"])
    fixed = bound(replace(METHODS[label], beside=None, subset=tuple(draft.uses)), network())
    with torch.no_grad():
        for name, weight in fixed.draft.network.named_parameters():
            weight.copy_(drawn.get(name, draft.weights()[name]))
        fixed.draft.group("biases")["head.bias"].copy_(drawn["head.bias"].expand(2, -1))
    outputs = fixed._tiled(Batch(IDS, LABELS), noise, late=False, training={})
    nll = F.cross_entropy(outputs, LABELS.repeat(3))
    loss = built.batch_loss(Batch(IDS, LABELS), 1.0, torch.Generator().manual_seed(3))
    torch.testing.assert_close(loss.nll, nll, rtol=1e-11, atol=0)


@every_method
def test_tile_and_loop_have_the_same_loss_and_gradients(label: str):
    method = METHODS[label]
    if label == "implicit":
        method = replace(method, noise_samples=2)
    both = [gradients(bound(replace(method, arrangement=arrangement))) for arrangement in ("tile", "loop")]
    (tile, tile_gradients), (loop, loop_gradients) = both
    torch.testing.assert_close(tile, loop, rtol=1e-12, atol=0)
    assert tile_gradients.keys() == loop_gradients.keys()
    assert any("raw_std" in key for key in tile_gradients)
    for key, value in tile_gradients.items():
        torch.testing.assert_close(value, loop_gradients[key], rtol=1e-9, atol=1e-11)


@every_method
def test_gradients_are_those_of_finite_differences(label: str):
    built = bound(METHODS[label])
    _, exact = gradients(built)
    for name, parameter in built.named_parameters():
        if not any(part in name for part in ("raw_std", "log_u", "embedding")):
            continue
        flat, step = parameter.data.view(-1), 1e-6
        values = []
        for sign in (1, -1):
            flat[0] += sign * step
            built.rows_seen = 0
            values.append(built.batch_loss(Batch(IDS, LABELS), 1.0, torch.Generator().manual_seed(3)).total.item())
            flat[0] -= sign * step
        slope = exact[name].reshape(-1)[0].item()
        assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4, abs=1e-8), name


def test_rates_and_decay_go_where_they_belong():
    method = replace(METHODS["rank1-k-tied"], factor_rate=0.25)
    built = bound(method)
    groups = built.parameter_groups(0.1, variational_lr=0.02, weight_decay=0.5)
    settings = {id(p): (group["name"], group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    draft = built.draft
    assert len(settings) == sum(len(group["params"]) for group in groups) == len(list(built.parameters()))
    for name, weight in draft.network.named_parameters():  # the prior of Normal weights is in the divergence
        assert settings[id(weight)] == ("weights", 0.1, 0.0 if name in INPUTS else 0.5)
    for name, bias in draft.group("biases").items():
        assert settings[id(bias)] == ("weights", 0.1, 0.5), name
    for key, rate in (("input_mean", 0.25), ("output_raw_std", 0.25), ("raw_std", 1.0), ("log_u", 0.5), ("log_v", 0.5)):
        for _, values in draft.group(key).items():
            assert settings[id(values)] == ("variational", pytest.approx(0.02 * rate), 0.0), key


def test_the_largest_standard_deviation_is_heeded():
    beside = replace(NORMALS["mean-field"], initial_spread=0.0, max_std=0.1)
    training = replace(QUICK, epochs=10, kl=KL(weight=200.0), variational_lr=0.1)
    wide = fit(replace(METHODS["rank1"], beside=replace(beside, max_std=None)), training=training)
    assert wide.normals.scale("embedding.weight").std.max() > 0.15
    posterior = fit(replace(METHODS["rank1"], beside=beside), training=training)
    assert posterior.normals.scale("embedding.weight").std.max() <= 0.1 * (1 + 1e-9)


# -- one posterior -----------------------------------------------------------------------------------------------


@every_method
def test_all_forms_of_draws_are_one_function(label: str):
    posterior = fit(METHODS[label])
    outputs = posterior.sample_outputs(IDS, 6, seed=4)
    for index in range(6):
        weights = posterior.draw(index, posterior.generator(4, index))
        truth = torch.func.functional_call(posterior.network, weights, (IDS,))
        torch.testing.assert_close(outputs[index], truth, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(posterior.function(index, 4)(IDS), truth, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(posterior.fold(index, seed=4)(IDS), truth, rtol=1e-10, atol=1e-12)
    few = torch.stack([posterior.sample_outputs(IDS[row : row + 1], 6, seed=4)[:, 0] for row in range(3)], 1)
    torch.testing.assert_close(few, outputs[:, :3], rtol=1e-9, atol=1e-11)
    kept = posterior.sampled(6, seed=4)
    torch.testing.assert_close(kept.predict(IDS).probs, posterior.predict(IDS, 6, seed=4).probs)
    torch.testing.assert_close(kept.scaled(0.4).predict(IDS).probs, posterior.scaled(0.4).predict(IDS, 6, seed=4).probs)


def test_large_normal_weights_are_drawn_some_at_a_time(monkeypatch):
    posterior = fit(METHODS["rank1"])
    whole = posterior.sample_outputs(IDS, 7, seed=1)
    monkeypatch.setattr(dubito.node_factors.beside, "MOST", 300)  # 111 numbers: two draws
    torch.testing.assert_close(posterior.sample_outputs(IDS, 7, seed=1), whole, rtol=1e-10, atol=1e-12)


@every_method
def test_a_component_keeps_the_normal_weights_that_all_share(label: str):
    posterior = fit(METHODS[label])
    for index, component in enumerate(posterior.components):
        for name in INPUTS:
            assert torch.equal(component.normals.scale(name).std, posterior.normals.scale(name).std)
            mean, std = posterior.weights()[name], posterior.normals.scale(name).std
            drawn = component.draw(0, component.generator(1, 0))[name]
            assert ((drawn - mean).abs() <= 6 * std).all() and not torch.equal(drawn, mean)
        centre, all_centres = component.scaled(0).draw(0, None), posterior.scaled(0).draw(index, None)
        for name, weight in centre.items():
            torch.testing.assert_close(weight, all_centres[name])


@every_method
def test_files_bring_back_every_draw(label: str, tmp_path):
    posterior = fit(METHODS[label])
    posterior.save(tmp_path / "both.safetensors")
    loaded = dubito.load(tmp_path / "both.safetensors", network())
    assert loaded.method == posterior.method and set(loaded.method.beside.subset) == set(INPUTS)
    for one, other in ((posterior, loaded), (posterior.sampled(6), None)):
        if other is None:
            one.save(tmp_path / "kept.safetensors")
            other = dubito.load(tmp_path / "kept.safetensors", network())
        assert torch.equal(one.predict(IDS, 6).probs, other.predict(IDS, 6).probs)
    assert [row.holds for row in loaded.summary().rows] == [row.holds for row in posterior.summary().rows]


def test_the_summary_says_of_each_parameter_what_it_holds():
    held = {row.name: row.holds for row in fit(METHODS["rank1-k-tied"]).summary().rows}
    assert held["embedding.weight"] == held["lstm.weight_ih_l0"] == "Normal, std of rank 2"
    assert held["head.bias"] == "Normal, own std"
    assert held["lstm.weight_hh_l0"] == "3 × Normal on 5 inputs and Normal on 20 outputs"
    assert held["lstm.bias_hh_l0"] == "3 points"
    assert held["lstm.bias_ih_l0"].startswith("point")


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    method, path = METHODS["rank1-k-tied"], tmp_path / "run.ckpt"
    whole = fit(method)

    class Interrupt(dubito.Callback):
        def on_step(self, *args: object, **kwargs: object) -> None:
            self.count = getattr(self, "count", 0) + 1
            if self.count == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(method, checkpoint=path, training=replace(QUICK, checkpoint_minutes=0.0), callbacks=[Interrupt()])
    assert path.exists()
    resumed = fit(method, checkpoint=path, training=replace(QUICK, checkpoint_minutes=0.0))
    for name, values in whole.state_dict().items():
        assert torch.equal(values, resumed.state_dict()[name]), name


def test_a_prior_around_pretrained_weights(tmp_path):
    net = network()
    beside = MeanField(subset=INPUTS, prior=Around(net, std=0.2), initial_std=0.1)
    built = bound(Rank1(components=2, beside=beside), net)
    factors = built.divergence(built.draft.stds())
    count = sum(net.get_parameter(name).numel() for name in INPUTS)
    # log(s/σ) + σ²/2s² − ½ at the prior's own mean
    each = math.log(2.0) + 0.125 - 0.5
    torch.testing.assert_close(built.kl() - factors, torch.tensor(count * each, dtype=torch.float64))
    posterior = fit(Rank1(components=2, beside=beside))
    assert posterior.normals.kl() > 0
    torch.testing.assert_close(posterior.kl(), posterior.factor_kl(posterior.stds()) + posterior.normals.kl())
    posterior.save(tmp_path / "around.safetensors")
    loaded = dubito.load(tmp_path / "around.safetensors", network())
    prior = loaded.normals.prior
    assert prior is not None and torch.equal(prior.centre("head.bias", net.head.bias), net.head.bias.detach())


@pytest.mark.parametrize(("label", "sampling"), [("rank1", "fixed"), ("batch-ensemble", "fixed"), ("rank1", "fresh")])
def test_exported_programs_answer_as_predictions_do(label: str, sampling: str, tmp_path):
    method = replace(METHODS[label], beside=MeanField(initial_std=0.1, subset=("0.weight", "2.bias")))
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    posterior = method.fit(net, (x, x[:, :3].argmax(1)), Categorical(), training=QUICK)
    path, samples = tmp_path / "both.pt2", 6 if sampling == "fixed" else 200
    posterior.export(path, num_samples=samples, sampling=sampling)
    answer = torch.export.load(path).module()(x)
    truth = posterior.predict(x, samples)
    tight = 1e-5 if sampling == "fixed" else 0.035  # two means of 200 draws
    torch.testing.assert_close(answer["probs"], truth.probs, rtol=0, atol=tight)
    torch.testing.assert_close(answer["epistemic"], truth.epistemic, rtol=0, atol=tight)
    assert truth.epistemic.max() > 1e-3


# -- what is refused ---------------------------------------------------------------------------------------------


def test_a_weight_has_factors_or_is_normal():
    method = Rank1(subset=["lstm"], beside=MeanField(subset=["embedding", "lstm.weight_ih_l0"]))
    with pytest.raises(ConfigError, match=r"not both, but subset and beside pick \['lstm.weight_ih_l0'\]"):
        method.build(network(), Categorical(), num_data=10)
    with pytest.raises(ConfigError, match="not both"):
        fit(method)
    with pytest.raises(NetworkError, match="this network has none among"):
        fit(Rank1(beside=MeanField(subset=lambda name, _: "weight" in name)))


@pytest.mark.parametrize("method", [Rank1, BatchEnsemble, Implicit])
def test_what_cannot_stand_beside_factors(method):
    with pytest.raises(ConfigError, match=r"got MeanField\(subset=None\).*give MeanField\(subset="):
        method(beside=MeanField())
    with pytest.raises(ConfigError, match=r"drawn once per batch, got KTied\(estimator=Flipout"):
        method(beside=KTied(subset=["a"], estimator=Flipout()))
    with pytest.raises(ConfigError, match="beside"):
        method(beside=Rank1())


def test_marginals_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"marginal=True is for posteriors of .*MeanField.* got one of Rank1"):
        fit(METHODS["rank1"]).predict(IDS, marginal=True)
