"""Ensembles of other people's networks: made by a factory, trained already, of Transformers and PEFT."""

import copy

import pytest
import torch
from torch import nn

import dubito
from dubito import Categorical, ConfigError, DeepEnsemble, Gaussian, NetworkError, Training, seeds
from dubito.networks import renewed

STILL = Training(epochs=1, lr=1e-12, batch_size=8)
QUICK = Training(epochs=2, lr=1e-2, batch_size=8)


class Scaled(nn.Module):
    """A network with a parameter of its own, which no rule draws anew."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.full((3,), value)), nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(self.scale * x)


def rows(count: int = 24):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def plain(seed: int = 0) -> nn.Module:
    with seeds.forked(seed):
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


# -- factories ---------------------------------------------------------------------------------------------


def test_a_factory_makes_the_other_members():
    numbers = []

    def start(member: int) -> nn.Module:
        numbers.append(member)
        return Scaled(10.0 * member)

    posterior = DeepEnsemble(members=3).fit(Scaled(), rows(), Categorical(), training=STILL, start=start)
    assert numbers == [1, 2]
    scales = [float(posterior.draw(member, None)["scale"].mean()) for member in range(3)]
    assert scales == pytest.approx([1.0, 10.0, 20.0])


@pytest.mark.parametrize("start", [Scaled, lambda value=2.0: Scaled(value)], ids=["class", "default"])
def test_a_factory_without_arguments_draws_under_the_members_seed(start):
    net, before = Scaled(), torch.random.get_rng_state()
    fits = [
        DeepEnsemble(members=3).fit(net, rows(), Categorical(), training=STILL, start=start, seed=3) for _ in range(2)
    ]
    assert torch.equal(torch.random.get_rng_state(), before)
    draws = [[fit.draw(member, None)["layer.weight"] for member in range(3)] for fit in fits]
    for first, again in zip(*draws, strict=True):
        assert torch.equal(first, again)
    assert not torch.allclose(draws[0][1], draws[0][2], atol=1e-3)
    assert float(fits[0].draw(1, None)["scale"].mean()) == pytest.approx(1.0 if start is Scaled else 2.0)


def test_a_factory_serves_the_protocol_and_a_frozen_layer_stays():
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    net[0].requires_grad_(False)
    auto = Training.auto(iterations=4, every=2, priors=(None,))

    def start():
        made = copy.deepcopy(net).requires_grad_(True)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.fill_(0.5)
        return made

    x, y = rows()
    with pytest.warns(dubito.DubitoWarning):
        posterior = DeepEnsemble(members=2).fit(net, (x, y), Categorical(), training=auto, start=start)
    member = posterior.fold(1)
    assert torch.equal(member[0].weight, net[0].weight)
    assert not member[0].weight.requires_grad and member[2].weight.requires_grad
    torch.testing.assert_close(member[2].weight, torch.full((2, 8), 0.5), atol=0.05, rtol=0)


def test_factories_that_do_not_fit_are_refused():
    def fit(start):
        DeepEnsemble(members=2).fit(Scaled(), rows(), Categorical(), training=STILL, start=start)

    with pytest.raises(NetworkError, match=r"start\(1\) differs in 1, such as 'layer.weight'.*\(2, 4\)"):

        def wider(member):
            made = Scaled()
            made.layer = nn.Linear(4, 2)
            return made

        fit(wider)
    with pytest.raises(NetworkError, match=r"start\(\) differs in 1, such as 'scale', which is missing"):
        fit(lambda: nn.ModuleDict({"layer": nn.Linear(3, 2)}))
    with pytest.raises(NetworkError, match="got int"):
        fit(lambda: 3)
    with pytest.raises(ConfigError, match="start must be a function"):
        fit(Scaled())  # a network is callable, but not a function that makes one
    with pytest.raises(NetworkError, match=r"anew: scale; give .* or pass start="):
        DeepEnsemble(members=2).fit(Scaled(), rows(), Categorical(), training=STILL)


# -- networks that are trained already ---------------------------------------------------------------------


def test_trained_networks_become_an_ensemble(tmp_path):
    nets = [plain(seed).train() for seed in range(3)]
    x, _ = rows()
    for net in nets:
        net(x)  # statistics of its own
    nets[1].requires_grad_(False)
    states = [copy.deepcopy(net.state_dict()) for net in nets]
    posterior = DeepEnsemble.from_networks(nets, Gaussian(std=0.3))
    expected = torch.stack([copy.deepcopy(net).eval()(x) for net in nets]).detach()
    prediction = posterior.predict(x)
    torch.testing.assert_close(prediction.means, expected)
    torch.testing.assert_close(prediction.aleatoric_std, torch.full((24, 1), 0.3))
    assert posterior.num_components == 3 and all(net.training for net in nets)
    for net, state in zip(nets, states, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    posterior.save(tmp_path / "e.safetensors")
    again = dubito.load(tmp_path / "e.safetensors", plain())
    assert torch.equal(again.predict(x).means, prediction.means)


def test_noise_comes_from_each_members_residuals():
    x, _ = rows(200)
    y = torch.stack([3 + 5 * x[:, 0], x[:, 1]], 1) + torch.tensor([0.5, 0.1]) * torch.randn(
        200, 2, generator=torch.Generator().manual_seed(0)
    )
    nets = [nn.Linear(3, 2) for _ in range(2)]
    with torch.no_grad():
        for number, net in enumerate(nets):
            net.weight.zero_()
            net.weight[0, 0], net.weight[1, 1] = 5.0, 1.0
            net.bias.copy_(torch.tensor([3.0 + number, 0.0]))
    posterior = DeepEnsemble.from_networks(nets, Gaussian(), data=(x, y))
    for number, net in enumerate(nets):
        torch.testing.assert_close(posterior.likelihood.std(number), (y - net(x)).square().mean(0).sqrt().detach())
    # The same networks in the units of standardised targets answer the same.
    mean, std = y.mean(0), y.std(0)
    for net in nets:
        with torch.no_grad():
            net.weight.div_(std[:, None])
            net.bias.sub_(mean).div_(std)
    scaled = DeepEnsemble.from_networks(nets, Gaussian(standardise=True), data=(x, y))
    torch.testing.assert_close(scaled.predict(x).log_prob(y), posterior.predict(x).log_prob(y), rtol=1e-4, atol=1e-4)


def test_frozen_copies_and_a_single_network_work():
    net = plain().requires_grad_(False)
    posterior = DeepEnsemble.from_networks([net], Gaussian(std=1.0))
    assert posterior.num_components == 1
    torch.testing.assert_close(posterior.predict(rows()[0]).mean, net.eval()(rows()[0]))


def test_networks_that_do_not_fit_are_refused():
    with pytest.raises(NetworkError, match=r"networks\[1\] differs in 11.*missing"):
        DeepEnsemble.from_networks([plain(), nn.Linear(3, 1)], Gaussian(std=1.0))
    with pytest.raises(ConfigError, match="pass data=, or Gaussian"):
        DeepEnsemble.from_networks([plain()], Gaussian())
    with pytest.raises(ConfigError, match="at least one network"):
        DeepEnsemble.from_networks([], Categorical())
    with pytest.raises(dubito.DataError, match="without any error"):
        x = rows()[0]
        net = nn.Linear(3, 1)
        DeepEnsemble.from_networks([net], Gaussian(), data=(x, net(x).detach()))


# -- Transformers and PEFT ---------------------------------------------------------------------------------

FOREIGN = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}


def transformer(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    with seeds.forked(0):
        if kind == "bert":
            config = transformers.BertConfig(vocab_size=200, max_position_embeddings=12, num_labels=3, **SMALL)
            return transformers.BertForSequenceClassification(config)
        if kind == "vit":
            config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **SMALL)
            return transformers.ViTForImageClassification(config)
        if kind == "gpt2":
            config = transformers.GPT2Config(vocab_size=200, n_embd=32, n_layer=2, n_head=2, n_positions=12)
            return transformers.GPT2LMHeadModel(config)
        if kind == "t5":
            sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}
            return transformers.T5EncoderModel(transformers.T5Config(vocab_size=200, **sizes))
        config = transformers.LlamaConfig(vocab_size=200, num_key_value_heads=2, **SMALL)
        return transformers.LlamaForCausalLM(config)


@FOREIGN
@pytest.mark.parametrize("kind", ["bert", "vit", "gpt2", "t5", "llama"])
def test_members_of_transformers_start_as_transformers_do(kind):
    net = transformer(kind)
    for parameter in net.parameters():
        parameter._is_hf_initialized = True  # as after `from_pretrained`
    with seeds.forked(7):
        made = renewed(net)
    names = dict(made.named_parameters())
    for name, tensor in net.named_parameters():
        new = names[name]
        if tensor.numel() == 1 or float(tensor.std()) == 0:  # ones of norms, zeros of biases
            assert torch.equal(new, tensor), name
        else:
            assert not torch.equal(new, tensor), name
            error = 3 * (2 / min(tensor.numel(), 1000)) ** 0.5  # of a ratio of two standard deviations, thrice
            assert float((new.std() / tensor.std()).log().abs()) < error + 0.05, name


@FOREIGN
@pytest.mark.parametrize("how", [True, "gaussian"])
def test_members_with_adapters_start_with_b_at_zero(how):
    peft = pytest.importorskip("peft")
    with seeds.forked(1):
        config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"], init_lora_weights=how)
        net = peft.get_peft_model(transformer("bert"), config)
    inputs = {"input_ids": torch.randint(1, 200, (8, 6), generator=torch.Generator().manual_seed(0))}
    targets = torch.arange(8) % 3
    posterior = DeepEnsemble(members=2).fit(net, (inputs, targets), Categorical(), training=STILL)
    first, second = (posterior.draw(member, None) for member in range(2))
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    assert any("lora_A" in name for name in names) and any("classifier" in name for name in names)
    for name in names:
        if "lora_B" in name:
            assert float(second[name].abs().max()) < 1e-6
        elif "bias" not in name:
            assert not torch.allclose(first[name], second[name], atol=1e-4), name
            assert float(second[name].std()) == pytest.approx(float(first[name].std()), rel=0.35), name
    frozen = next(name for name, p in net.named_parameters() if not p.requires_grad)
    assert torch.equal(first[frozen], second[frozen])


@FOREIGN
def test_adapters_without_a_rule_ask_for_a_factory():
    peft = pytest.importorskip("peft")
    config = peft.LoHaConfig(r=2, target_modules=["query"])
    net = peft.get_peft_model(transformer("bert"), config)
    with pytest.raises(NetworkError, match="pass start="), seeds.forked(0):
        renewed(net)
