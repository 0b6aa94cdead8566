"""BALI as a method: Algorithm 1 in the library's loop, on any network, alone and side by side."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dubito
from dubito import BALI, Categorical, ConfigError, DataError, DubitoWarning, Gaussian, NetworkError, Training, seeds
from dubito.inference.bali.layer import Layer, Prior
from dubito.inference.bali.local import noise_on
from dubito.inference.bali.products import gram
from dubito.inference.bali.setup import find_layers
from dubito.inference.bali.stepper import BALIStepper
from dubito.layers.record import recorded
from dubito.training import Constant, Step

SET = BALI(effective_data=40.0, output_floor=1e-3)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def seeded(build):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def mlp(inputs: int = 3, outputs: int = 2, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype))


def table(rows: int = 40, outputs: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = noise(rows, 3, seed=seed)
    y = torch.stack([x[:, 0].sin() + x[:, 1], x[:, 2] * x[:, 0]], 1)[:, :outputs]
    return x, y + 0.1 * noise(rows, outputs, seed=seed + 100)


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, (3, 2), stride=2, padding=1)
        self.second = nn.Conv2d(4, 6, 2, groups=2, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))).mean((2, 3)))


def pictures(rows: int = 24) -> tuple[Tensor, Tensor]:
    return noise(rows, 2, 6, 5, seed=3), torch.arange(rows) % 3


def algorithm(net: nn.Sequential, x: Tensor, y: Tensor, method: BALI, rates, seed: int) -> dict[str, Tensor]:
    """Algorithm 1 for a network of two layers, full batch, in the paper's own scale and with its inverses."""
    layers = [net[0], net[2]]
    scales = [1.0, 7**-0.5]  # Eq. 12: the first layer's inputs are not scaled
    weights = [
        torch.cat([each.weight, each.bias[:, None]], 1).detach().mT / s for each, s in zip(layers, scales, strict=True)
    ]
    n, data = len(x), method.effective_data
    spread = y.std(0, unbiased=False).square()
    floors = [torch.full((6,), method.hidden_floor).double(), method.output_floor * spread]
    psi = [{"xx": 0.0, "xy": 0.0, "yy": 0.0} for _ in layers]
    squares, rest = torch.zeros(6, dtype=torch.float64), 1.0
    sigma = torch.diag(spread)
    found: dict[str, Tensor] = {}
    for step, rate in enumerate(rates):
        rest *= 1 - rate
        if step and method.sampling == "weight":
            stream = seeds.generator(seed, "noise", step)
            unit = torch.randn(6 * 4 + 2 * 7, generator=stream, dtype=torch.float64).split([24, 14])
            for i, a in enumerate((unit[0].view(6, 4).mT, unit[1].view(2, 7).mT)):
                # W = M + R^½ A Σ^½ᵀ with the roots that Cholesky factors of R⁻¹ and Σ give
                left = torch.linalg.inv(torch.linalg.cholesky(found[f"rinv{i}"])).mT
                weights[i] = found[f"mean{i}"] + left @ a @ torch.linalg.cholesky(found[f"sigma{i}"]).mT
        elif step:
            weights = [found["mean0"], found["mean1"]]
        one = torch.ones(n, 1, dtype=torch.float64)
        x1 = torch.cat([x, one], 1)
        z1 = (x1 @ weights[0]).requires_grad_()
        x2 = scales[1] * torch.cat([z1.tanh(), one], 1)
        z2 = x2 @ weights[1]
        density = torch.distributions.MultivariateNormal(z2, sigma).log_prob(y).sum()
        (g,) = torch.autograd.grad(density, z1)
        squares = (1 - rate) * squares + rate * g.square().mean(0)
        targets = [(z1 + method.step_size * g / (squares / (1 - rest)).sqrt()).detach(), y]
        for i, (a, b) in enumerate(zip((x1, x2.detach()), targets, strict=True)):
            now = {"xx": a.mT @ a, "xy": a.mT @ b, "yy": b.mT @ b}
            psi[i] = {key: (1 - rate) * psi[i][key] + rate * data / n * now[key] for key in now}
            eye = torch.eye(a.shape[1], dtype=torch.float64)
            inverse = eye / method.prior_scale + psi[i]["xx"] / (1 - rest)
            mean = torch.linalg.solve(inverse, psi[i]["xy"] / (1 - rest))
            u = floors[i].diag() * data + psi[i]["yy"] / (1 - rest) - mean.mT @ inverse @ mean
            found[f"rinv{i}"], found[f"mean{i}"] = inverse, mean
            found[f"sigma{i}"] = u / (data + b.shape[1] + 1)
        sigma = found["sigma1"]
    return {"0": found["mean0"].mT, "2": (found["mean1"] * scales[1]).mT, "noise": sigma}


@pytest.mark.parametrize("sampling", ["weight", "deterministic"])
def test_a_fit_is_algorithm_1(sampling: str) -> None:
    net, (x, y) = mlp(), table()
    method = replace(SET, sampling=sampling)
    rates = [0.2, 0.2, 0.2, 0.04, 0.008]  # divided by 5 from 60 % and from 80 % of 5 steps on
    truth = algorithm(net, x, y, method, rates, seed=7)
    posterior = method.fit(net, (x, y), Gaussian(), training=Training(iterations=5, batch_size=40), seed=7)
    for path in ("0", "2"):
        own = posterior.network.get_submodule(path)
        torch.testing.assert_close(torch.cat([own.weight, own.bias[:, None]], 1), truth[path], rtol=1e-8, atol=1e-8)
    tril = posterior.likelihood.scale_tril  # the full covariance of both outputs
    torch.testing.assert_close(tril @ tril.mT, truth["noise"], rtol=1e-8, atol=1e-8)
    assert abs(float(truth["noise"][0, 1])) > 1e-6
    assert posterior.history[-1]["nll"] < posterior.history[0]["nll"]
    distribution = posterior.distribution("2.weight")
    torch.testing.assert_close(distribution.mean[0].mT, truth["2"], rtol=1e-8, atol=1e-8)


def test_passes_of_a_step_add_up() -> None:
    net, data = mlp(), table()
    whole = SET.fit(net, data, Gaussian(), training=Training(iterations=6, batch_size=40))
    parts = SET.fit(net, data, Gaussian(), training=Training(iterations=6, batch_size=10, accumulate=4))
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("sampling", ["weight", "local"])
def test_a_run_goes_on_from_its_checkpoint(tmp_path, monkeypatch, sampling: str) -> None:
    net = seeded(lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double())
    method, training = replace(SET, sampling=sampling, momentum=0.3), Training(iterations=9, batch_size=16)
    data = table()
    with pytest.warns(DubitoWarning, match=r"1\.weight: it multiplies no inputs"):
        whole = method.fit(net, data, Gaussian(), training=training)
    step = BALIStepper.step

    def broken(self, number, *rest):
        if number == 5:
            raise KeyboardInterrupt
        return step(self, number, *rest)

    monkeypatch.setattr(BALIStepper, "step", broken)
    often = replace(training, checkpoint_minutes=0.0)
    with pytest.warns(DubitoWarning, match="points"), pytest.raises(KeyboardInterrupt):
        method.fit(net, data, Gaussian(), training=often, checkpoint=tmp_path / "c")
    monkeypatch.setattr(BALIStepper, "step", step)
    with pytest.warns(DubitoWarning, match="points"):
        again = method.fit(net, data, Gaussian(), training=often, checkpoint=tmp_path / "c")
    assert not torch.equal(whole.network[1].weight, torch.ones(6))  # points are trained
    for (name, a), b in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


# -- wide layers -------------------------------------------------------------------------------------------------------


def test_a_mean_moves_by_equation_74_between_factorisations() -> None:
    """M + c Eᵀ X (R⁻¹ + c XᵀX)⁻¹ with E = Y − X Mᵀ and c = β N / (b P (1 − β / b)), written densely."""
    own = Layer.start(
        "x", Prior(precision=0.5, floor=torch.full((1, 3), 0.1).double(), data=noise(1).abs() * 90), noise(1, 3, 5)
    )
    own.see_cases(noise(1, 20, 5, seed=1), noise(1, 20, 3, seed=2), 0.4)
    own.infer(0.4)
    own.settle()
    mean, precision = own.mean[0].clone(), own.input_tril[0] @ own.input_tril[0].mT
    x, y = noise(1, 7, 5, seed=3), noise(1, 7, 3, seed=4)
    own.move(own.whitened(x), y, 0.3)
    own.settle()
    c = float(own.prior.data) * 0.3 / (7 * 0.7)
    gap = y[0] - x[0] @ mean.mT
    truth = mean + c * gap.mT @ x[0] @ torch.linalg.inv(precision + c * x[0].mT @ x[0])
    torch.testing.assert_close(own.mean[0], truth)
    torch.testing.assert_close(own.input_tril[0] @ own.input_tril[0].mT, precision)  # R waits for a factorisation


def test_weights_that_are_not_written_out_are_the_same(monkeypatch) -> None:
    net = seeded(lambda: nn.Sequential(nn.Linear(3, 60), nn.ReLU(inplace=True), nn.Linear(60, 40, bias=False),
                                       nn.Tanh(), nn.Linear(40, 2)).double())  # fmt: skip
    check_few(net, table(16), monkeypatch)
    sequences = noise(16, 30, 3), noise(16, 30, 2, seed=1)  # few rows, many cases
    check_few(
        seeded(lambda: nn.Sequential(nn.Linear(3, 62), nn.Tanh(), nn.Linear(62, 2)).double()), sequences, monkeypatch
    )


def check_few(net: nn.Module, data: tuple[Tensor, Tensor], monkeypatch) -> None:
    training = Training(iterations=12, batch_size=8)
    for every in (1, 3):
        fits = []
        for few in (8, 10**6):  # 8 rows are few for 63 inputs and outputs or more; then none are
            monkeypatch.setattr("dubito.inference.bali.stepper.FEW", few)
            fits.append(replace(SET, refactor_every=every).fit(net, data, Gaussian(), training=training))
        for a, b in zip(fits[0].parameters(), fits[1].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


def test_wide_layers_are_factorised_every_few_steps(monkeypatch) -> None:
    net = seeded(lambda: nn.Sequential(nn.Linear(3, 600), nn.Tanh(), nn.Linear(600, 500), nn.Tanh(), nn.Linear(500, 2)))
    data = tuple(tensor.float() for tensor in table(24))
    infer, calls = Layer.infer, []
    monkeypatch.setattr(Layer, "infer", lambda self, *rest: (calls.append(self.name), infer(self, *rest))[1])
    SET.fit(net, data, Gaussian(), training=Training(iterations=12, batch_size=8))
    # of 604, 1,101 and 503 inputs and outputs: at each of the first 2 and 4 steps, every second or fourth, and the end
    assert [calls.count(name) for name in ("0", "2", "4")] == [2 + 5 + 1, 4 + 2 + 1, 12]
    calls.clear()
    replace(SET, refactor_every=1).fit(net, data, Gaussian(), training=Training(iterations=12, batch_size=8))
    assert [calls.count(name) for name in ("0", "2", "4")] == [12, 12, 12]


def test_rare_factorisations_learn_as_well() -> None:
    """Without moves between factorisations every fifth of 60 steps would be too few (0.60 against 0.42)."""
    (x, y), training = table(300), Training(iterations=60, batch_size=20)
    net = seeded(lambda: nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2)).double())
    method, scores = replace(SET, effective_data=200.0), {}
    for every in (1, 5):
        posterior = replace(method, refactor_every=every).fit(net, (x[:200], y[:200]), Gaussian(), training=training)
        scores[every] = posterior.evaluate((x[200:], y[200:]), num_samples=16)["nll"]
    assert abs(scores[5] - scores[1]) < 0.1


# -- layers ------------------------------------------------------------------------------------------------------------


def assert_blocks(own: Tensor, truth: Tensor, inputs: int) -> None:
    """The blocks of X and G are whole; of those between them the one above the diagonal is read."""
    torch.testing.assert_close(own[:inputs], truth[:inputs])
    torch.testing.assert_close(own[inputs:, inputs:], truth[inputs:, inputs:])


def test_sums_over_patches_are_those_of_unfolded_inputs() -> None:
    net, (x, _) = seeded(lambda: Conv().double().eval()), pictures(5)
    found = find_layers(net, x, None)
    assert found.first == {"first"} and found.last == "head" and not found.points
    grads: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    record = found.cover.record()
    with recorded(net, found.cover.parameters, record) as shell:
        handles = [
            getattr(shell, name).register_forward_hook(
                lambda _, args, out, name=name: (
                    seen.__setitem__(name, args[0].detach()),
                    out.register_hook(lambda g, name=name: grads.__setitem__(name, g)),
                )[0]
            )
            for name in ("first", "second")
        ]
        shell(x).square().sum().backward()
        sums = {name: gram(parts, record, 5) for name, parts in found.cover.parts.items()}
        for handle in handles:
            handle.remove()
    a = F.unfold(seen["first"], (3, 2), stride=2, padding=1).mT  # [B, T, n]
    g = grads["first"].flatten(2).mT
    joint = torch.cat([a, torch.ones(*a.shape[:2], 1, dtype=a.dtype), g], -1).flatten(0, 1)
    assert_blocks(sums["first"][0][0], joint.mT @ joint, 13)
    assert sums["first"][1] == len(joint)
    for group in range(2):
        part = slice(2 * group, 2 * group + 2), slice(3 * group, 3 * group + 3)
        a = F.unfold(seen["second"][:, part[0]], 2).mT
        joint = torch.cat([a, grads["second"][:, part[1]].flatten(2).mT], -1).flatten(0, 1)
        assert_blocks(sums["second"][0][group], joint.mT @ joint, 8)


@pytest.mark.parametrize("kind", ["dense", "convolution"])
def test_local_noise_has_the_posteriors_variance(kind: str) -> None:
    net = mlp() if kind == "dense" else seeded(lambda: Conv().double())
    data = table(outputs=2) if kind == "dense" else pictures()
    likelihood = Gaussian() if kind == "dense" else Categorical()
    posterior = SET.fit(net, data, likelihood, training=Training(iterations=4, batch_size=24))
    found = find_layers(net.eval(), data[0][:4], None)
    block = found.blocks[0]
    mean = block.matrix(posterior.weights())
    ones = torch.ones(block.groups, dtype=torch.float64)
    layer = Layer.start("x", Prior(precision=1.0, floor=ones[:, None].expand(-1, block.rows), data=ones), mean)
    layer.input_tril = posterior.group("input_tril")[block.weight]
    layer.output_tril = posterior.group("output_tril")[block.weight]
    module = posterior.network.get_submodule(block.weight.rpartition(".")[0])
    (use,), x = found.cover.survey.of(block.weight), data[0][:4]
    plain = module(x)
    positions = plain[0].numel() // block.rows
    units = (noise(4, 1, positions, block.rows, seed=s) for s in range(4000))
    draws = torch.stack([noise_on(use.form, x, layer, True, unit) for unit in units])
    draws = (draws if use.form.trailing else draws.mT).reshape(-1, *plain.shape)
    weights = torch.stack(
        [
            block.tensors(posterior.matrices(block, torch.Generator().manual_seed(s), mean))[block.weight]
            for s in range(10)
        ]
    )
    assert weights.std(0).min() > 0
    # The truth: outputs under draws of the weights, row by row.
    tensors = [block.tensors(posterior.matrices(block, torch.Generator().manual_seed(s), mean)) for s in range(4000)]
    names = {name: name.rpartition(".")[2] for name in block.parameters}
    outputs = torch.stack(
        [torch.func.functional_call(module, {names[n]: t for n, t in each.items()}, (x,)) for each in tensors]
    )
    ratio = draws.var(0) / outputs.var(0)
    assert (ratio - 1).abs().max() < 6 * (2 * 2 / 4000) ** 0.5  # of two variances of 4,000 draws each


def test_local_and_weight_sampling_start_alike_and_part() -> None:
    net, data = mlp(), table()
    fits = {
        name: replace(SET, sampling=name).fit(net, data, Gaussian(), training=Training(iterations=steps, batch_size=40))
        for name in ("weight", "local", "deterministic")
        for steps in (1,)
    }
    torch.testing.assert_close(fits["local"].network[0].weight, fits["weight"].network[0].weight)
    longer = [
        replace(SET, sampling=name).fit(net, data, Gaussian(), training=Training(iterations=60, batch_size=20))
        for name in ("weight", "local", "deterministic")
    ]
    assert len({float(each.network[0].weight[0, 0]) for each in longer}) == 3
    for each in longer:
        assert each.evaluate(data)["rmse"] < 0.75 * float(data[1].std())


@pytest.mark.filterwarnings("ignore:the targets of output 0 have mean:dubito.DubitoWarning")
def test_many_outputs_get_a_full_covariance_and_one_a_number(tmp_path) -> None:
    x, y = table()
    full = SET.fit(mlp(), (x, y), Gaussian(), training=Training(iterations=30, batch_size=40))
    assert full.likelihood.scale_tril.shape == (2, 2)
    one = SET.fit(mlp(outputs=1), (x, y[:, :1]), Gaussian(), training=Training(iterations=30, batch_size=40))
    tril = one.group("output_tril")["2.weight"]
    torch.testing.assert_close(one.likelihood.std(), tril.reshape(1))
    given = SET.fit(mlp(), (x, y), Gaussian(std=0.3), training=Training(iterations=3, batch_size=40))
    assert float(given.likelihood.std()) == pytest.approx(0.3)
    for each in (full, one, given):
        each.save(tmp_path / "p")
        again = dubito.load(tmp_path / "p", each.network)
        assert torch.equal(again.sample_outputs(x, 3), each.sample_outputs(x, 3))
    scaled = SET.fit(mlp(), (x, y * 50), Gaussian(), training=Training(iterations=30, batch_size=40))
    assert 20 < float(scaled.likelihood.std()[0] / full.likelihood.std()[0]) < 100  # floors follow the targets


def test_sampled_covariances_widen_the_draws() -> None:
    data, training = table(), Training(iterations=30, batch_size=40)
    mode = replace(SET, effective_data=12.0).fit(mlp(), data, Gaussian(), training=training)
    wide = replace(mode.method, covariance="sampled").fit(mlp(), data, Gaussian(), training=training)
    block = mode.blocks[1]
    mean = block.matrix(mode.weights())
    for posterior, widened in ((mode, False), (wide, True)):
        mean = block.matrix(posterior.weights())
        draws = torch.stack([posterior.matrices(block, torch.Generator().manual_seed(s), mean) for s in range(6000)])
        variance = posterior.distribution("2.weight").variance.mT
        # E Σ = U / (u − m − 1), the mode U / (u + m + 1): with u = 12 and m = 2 a factor of 15 / 9.
        factor = 15 / 9 if widened else 1.0
        ratio = draws.var(0) / variance / factor
        assert (ratio - 1).abs().max() < 0.2


# -- settings that choose themselves -----------------------------------------------------------------------------------


def test_open_settings_are_chosen() -> None:
    data, training = table(rows=160), Training(iterations=40, batch_size=160)
    alone = BALI().fit(mlp(), data, Gaussian(), training=training, seed=3)
    chosen = alone.method
    assert chosen.effective_data is not None and chosen.output_floor is not None


def test_much_noise_asks_for_no_floor_and_given_settings_stay() -> None:
    x = noise(200, 3)
    y = 3 * noise(200, 1, seed=1)
    posterior = BALI(effective_data=123.0).fit(
        mlp(outputs=1), (x, y), Gaussian(), training=Training(iterations=30, batch_size=200)
    )
    assert posterior.method.effective_data == 123.0
    assert float(posterior.likelihood.std()) > 1.5
    few = BALI().fit(mlp(), table(rows=20), Gaussian(), training=Training(iterations=2))
    assert few.method.effective_data == 20.0  # too few rows to judge by


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"update_rate": 0.0}, r"update_rate must be a number in \(0, 1\]"),
        ({"update_rate": 1.5}, "update_rate"),
        ({"step_size": -1.0}, "step_size"),
        ({"momentum": 1.0}, "momentum"),
        ({"refactor_every": 0}, "refactor_every"),
        ({"hidden_floor": -0.1}, "hidden_floor"),
        ({"effective_data": 0.0}, "effective_data"),
        ({"sampling": "weights"}, "deterministic, local, weight"),
        ({"covariance": "mean"}, "mode, sampled"),
        ({"schedule": 0.2}, "schedule must be"),
    ],
)
def test_settings_check_themselves(settings: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        BALI(**settings)


def test_bad_input_is_found_before_work_starts() -> None:
    net, (x, y) = mlp(), table()
    with pytest.raises(ConfigError, match=r"'0' has 6 and a step sees 4 rows; raise hidden_floor"):
        replace(SET, hidden_floor=0.0).fit(net, (x, y), Gaussian(), training=Training(iterations=1, batch_size=4))
    with pytest.raises(ConfigError, match=r"'0' has 6 and effective_data is 5"):
        replace(SET, covariance="sampled", effective_data=5.0).fit(net, (x, y), Gaussian())
    with pytest.raises(ConfigError, match='needs precision="full"'):
        SET.fit(net, (x, y), Gaussian(), training=Training(iterations=1, precision="bf16"))
    with pytest.raises(DataError, match="targets must be finite"):
        SET.fit(net, (x, y * torch.nan), Gaussian())
    lookup = nn.Sequential(nn.Embedding(5, 3), nn.Flatten())
    with pytest.raises(NetworkError, match=r"found none among 0\.weight"):
        SET.fit(lookup, (torch.arange(5)[:, None], torch.zeros(5, 3)), Gaussian())


def test_divergence_ends_with_an_error() -> None:
    x, y = table()
    wild = replace(SET, step_size=1e30, hidden_floor=1e-3, schedule=Constant())
    with pytest.raises(dubito.TrainingError, match="step"):
        wild.fit(mlp(dtype=torch.float32), (x, y), Gaussian(), training=Training(iterations=200, batch_size=40))


def test_the_schedule_is_the_papers() -> None:
    assert BALI().schedule == Step(at=(0.6, 0.8), by=0.2)


def test_digits_are_learned() -> None:
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x, y = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
    net = seeded(lambda: nn.Sequential(nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 10)))
    method = BALI(effective_data=300.0, step_size=0.25, update_rate=0.1, prior_scale=10.0)
    posterior = method.fit(net, (x[:1200], y[:1200]), Categorical(), training=Training(iterations=60, batch_size=1200))
    assert posterior.evaluate((x[1200:], y[1200:]), num_samples=8)["accuracy"] > 0.85
