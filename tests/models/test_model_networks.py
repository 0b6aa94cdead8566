"""What the networks compute, against references written out from their parameters."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from dubito import models
from dubito.errors import ConfigError, UnknownNameError


def images(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=dtype)


def evaluated(network: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """The network in evaluation mode and float64, its batch norms at random statistics."""
    network = network.double().eval()
    generator = torch.Generator().manual_seed(4)
    for name, buffer in network.named_buffers():
        if "running" in name:
            buffer.copy_(torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype) + 0.5)
    return network, network.state_dict()


def norm(state: dict[str, Tensor], name: str, maps: Tensor) -> Tensor:
    mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
    scaled = (maps - mean[:, None, None]) / (variance + 1e-5).sqrt()[:, None, None]
    return scaled * state[f"{name}.weight"][:, None, None] + state[f"{name}.bias"][:, None, None]


def conv(state: dict[str, Tensor], name: str, maps: Tensor, stride: int = 1) -> Tensor:
    weight = state[f"{name}.weight"]
    return F.conv2d(maps, weight, state.get(f"{name}.bias"), stride, padding=weight.shape[-1] // 2)


def post_block(state: dict[str, Tensor], name: str, maps: Tensor, stride: int) -> Tensor:
    """A block read from torchvision's names of its parameters."""
    if f"{name}.conv3.weight" in state:
        branch = norm(state, f"{name}.bn1", conv(state, f"{name}.conv1", maps)).relu()
        branch = norm(state, f"{name}.bn2", conv(state, f"{name}.conv2", branch, stride)).relu()
        branch = norm(state, f"{name}.bn3", conv(state, f"{name}.conv3", branch))
    else:
        branch = norm(state, f"{name}.bn1", conv(state, f"{name}.conv1", maps, stride)).relu()
        branch = norm(state, f"{name}.bn2", conv(state, f"{name}.conv2", branch))
    if f"{name}.downsample.0.weight" in state:
        maps = norm(state, f"{name}.downsample.1", conv(state, f"{name}.downsample.0", maps, stride))
    return (branch + maps).relu()


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(("name", "depths"), [("resnet18", (2, 2, 2, 2)), ("resnet50", (3, 4, 6, 3))])
def test_resnet_computes_he_et_al(name: str, depths: tuple[int, ...], small: bool) -> None:
    network, state = evaluated(models.make(name, num_classes=5, base=4, small_images=small))
    inputs = images(2, 3, 32, 32, dtype=torch.float64)
    maps = norm(state, "bn1", conv(state, "conv1", inputs, 1 if small else 2)).relu()
    if not small:
        maps = F.max_pool2d(maps, 3, 2, 1)
    for stage, depth in enumerate(depths, 1):
        for index in range(depth):
            stride = 2 if stage > 1 and index == 0 else 1
            maps = post_block(state, f"layer{stage}.{index}", maps, stride)
    logits = maps.flatten(2).mean(-1) @ state["fc.weight"].T + state["fc.bias"]
    torch.testing.assert_close(network(inputs), logits)


@pytest.mark.parametrize(
    ("name", "arguments", "depths", "size"),
    [
        ("wide_resnet", {"depth": 10, "width": 2, "base": 4}, (1, 1, 1), 8),
        ("wide_resnet", {"depth": 16, "width": 1, "base": 4}, (2, 2, 2), 8),
        ("tfp_resnet18", {}, (1, 1, 1, 1), 4),
    ],
)
def test_pre_activation_networks(name: str, arguments: dict, depths: tuple[int, ...], size: int) -> None:
    network, state = evaluated(models.make(name, **arguments))
    inputs = images(2, 3, 32, 32, dtype=torch.float64)
    maps = conv(state, "conv1", inputs)
    for stage, depth in enumerate(depths, 1):
        for index in range(depth):
            block, stride = f"layer{stage}.{index}", 2 if stage > 1 and index == 0 else 1
            active = norm(state, f"{block}.bn1", maps).relu()
            branch = norm(state, f"{block}.bn2", conv(state, f"{block}.conv1", active, stride)).relu()
            branch = conv(state, f"{block}.conv2", branch)
            if f"{block}.shortcut.weight" in state:
                maps = conv(state, f"{block}.shortcut", active, stride)
            maps = maps + branch
    assert maps.shape[-2:] == (size, size)
    pooled = norm(state, "bn", maps).relu().flatten(2).mean(-1)
    torch.testing.assert_close(network(inputs), pooled @ state["fc.weight"].T + state["fc.bias"])


def test_projections_stand_where_the_shape_changes() -> None:
    def projected(network: nn.Module) -> list[str]:
        names = dict(network.named_modules())
        return [name for name in names if name.endswith(("shortcut", "downsample"))]

    assert projected(models.wide_resnet(16, 1)) == ["layer2.0.shortcut", "layer3.0.shortcut"]
    assert projected(models.wide_resnet(16, 2)) == [f"layer{stage}.0.shortcut" for stage in (1, 2, 3)]
    assert projected(models.tfp_resnet18()) == [f"layer{stage}.0.shortcut" for stage in (1, 2, 3, 4)]
    assert projected(models.resnet18(base=4)) == [f"layer{stage}.0.downsample" for stage in (2, 3, 4)]
    assert projected(models.resnet50(base=4)) == [f"layer{stage}.0.downsample" for stage in (1, 2, 3, 4)]


def test_densenet_computes_huang_et_al() -> None:
    network, state = evaluated(models.densenet121(num_classes=5))
    inputs = images(1, 3, 32, 32, dtype=torch.float64)
    maps = F.max_pool2d(norm(state, "features.norm0", conv(state, "features.conv0", inputs, 2)).relu(), 3, 2, 1)
    for block, depth in enumerate((6, 12, 24, 16), 1):
        for index in range(1, depth + 1):
            name = f"features.denseblock{block}.denselayer{index}"
            new = conv(state, f"{name}.conv1", norm(state, f"{name}.norm1", maps).relu())
            new = conv(state, f"{name}.conv2", norm(state, f"{name}.norm2", new).relu())
            maps = torch.cat((maps, new), dim=1)
        if block < 4:
            name = f"features.transition{block}"
            maps = F.avg_pool2d(conv(state, f"{name}.conv", norm(state, f"{name}.norm", maps).relu()), 2)
    pooled = norm(state, "features.norm5", maps).relu().flatten(2).mean(-1)
    logits = pooled @ state["classifier.weight"].T + state["classifier.bias"]
    torch.testing.assert_close(network(inputs), logits)


@pytest.mark.parametrize(
    ("name", "entries"), [("resnet18", 122), ("resnet50", 320), ("resnet152", 932), ("densenet121", 727)]
)
def test_state_has_as_many_entries_as_torchvision_files(name: str, entries: int) -> None:
    with torch.device("meta"):
        assert len(models.make(name).state_dict()) == entries


def test_lenet_pools_twice_and_keeps_or_trims_the_border() -> None:
    for same, size in ((True, 7), (False, 4)):
        network = models.lenet(same_padding=same)
        maps = images(2, 1, 28, 28)
        for name in ("conv1", "conv2"):
            layer = network.get_submodule(name)
            maps = F.conv2d(maps, layer.weight, layer.bias, padding=2 if same else 0)
            maps = F.max_pool2d(maps.relu(), 2)
        assert maps.shape[1:] == (64, size, size)
        hidden = (maps.flatten(1) @ network.fc1.weight.T + network.fc1.bias).relu()
        logits = hidden @ network.fc.weight.T + network.fc.bias
        torch.testing.assert_close(network(images(2, 1, 28, 28)), logits)


def test_vgg_pools_after_each_stage() -> None:
    network = models.vgg([[4, 4], [8]], [6], num_classes=3, in_channels=1, batch_norm=True)
    assert list(dict(network.named_children())) == [
        *("conv1_1", "bn1_1", "relu1_1", "conv1_2", "bn1_2", "relu1_2", "pool1"),
        *("conv2_1", "bn2_1", "relu2_1", "pool2", "mean", "flatten", "fc1", "act1", "fc"),
    ]
    assert network[:-5](images(2, 1, 12, 12)).shape == (2, 8, 3, 3)
    assert network.conv1_1.bias is None
    assert models.vgg16().conv1_1.bias is not None


ACTIVATIONS = {
    "relu": lambda x: x.clamp(min=0),
    "tanh": torch.tanh,
    "leaky_tanh": lambda x: torch.tanh(x) + 0.1 * x,
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_applies_its_activation(activation: str) -> None:
    network = models.mlp(6, (5, 4), num_classes=2, activation=activation)
    inputs = images(3, 2, 3)
    hidden = inputs.flatten(1)
    for layer in (network.fc1, network.fc2):
        hidden = ACTIVATIONS[activation](hidden @ layer.weight.T + layer.bias)
    torch.testing.assert_close(network(inputs), hidden @ network.fc.weight.T + network.fc.bias)


def test_mlp_without_hidden_layers_is_linear() -> None:
    network = models.mlp(3, (), num_classes=2)
    assert [name for name, _ in network.named_parameters()] == ["fc.weight", "fc.bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lstm_reads_the_last_state_of_the_recurrence(dtype: torch.dtype) -> None:
    network = models.clinical_lstm(3, hidden=4, num_classes=2).to(dtype)
    with torch.no_grad():
        network.lstm.bias_ih_l0.add_(images(16))
    inputs = images(5, 6, 3, dtype=dtype)
    state, cell = torch.zeros(2, 5, 4, dtype=dtype)
    weights = network.lstm
    for step in inputs.unbind(1):
        gates = step @ weights.weight_ih_l0.T + state @ weights.weight_hh_l0.T + weights.bias_ih_l0
        into, forget, new, out = gates.chunk(4, dim=1)
        cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
        state = out.sigmoid() * cell.tanh()
    torch.testing.assert_close(network(inputs), state @ network.fc.weight.T + network.fc.bias)


def test_lstm_has_one_bias_with_the_forget_gate_open() -> None:
    network = models.clinical_lstm(3, hidden=4)
    expected = torch.zeros(16)
    expected[4:8] = 1
    assert torch.equal(network.lstm.bias_ih_l0, expected)
    assert "lstm.bias_hh_l0" in dict(network.named_buffers())
    assert not network.lstm.bias_hh_l0.any()


def test_lstm_survives_copies_casts_and_functional_calls() -> None:
    network = models.clinical_lstm(3, hidden=4)
    inputs = images(2, 5, 3)
    logits = network(inputs)
    torch.testing.assert_close(copy.deepcopy(network).double()(inputs.double()).float(), logits)
    other = models.clinical_lstm(3, hidden=4, seed=1)
    drawn = {name: value.detach() for name, value in other.named_parameters()}
    torch.testing.assert_close(functional_call(network, drawn, (inputs,)), other(inputs))
    torch.testing.assert_close(network(inputs), logits)
    other.load_state_dict(network.state_dict())
    torch.testing.assert_close(other(inputs), logits)


def test_imdb_embeds_tokens() -> None:
    network = models.imdb_lstm(vocabulary=11, embedding=3, hidden=4)
    tokens = torch.tensor([[0, 0, 10], [4, 5, 6]])
    states, _ = network.lstm(network.embedding.weight[tokens])
    torch.testing.assert_close(network(tokens), network.fc(states[:, -1]))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("wide_resnet", {"depth": 10, "width": 4}),
        ("resnet18", {"base": 16}),
        ("lenet", {}),
        ("mlp", {"in_features": 300}),
    ],
)
def test_weights_start_by_he(name: str, arguments: dict) -> None:
    layers = [m for m in models.make(name, **arguments).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) > 2
    for layer in layers:
        fan_in = layer.weight[0].numel()
        gain = 1 if layer is layers[-1] else 2
        ratio = float(layer.weight.detach().square().mean()) * fan_in / gain
        # the mean square of n normals has a relative standard error of sqrt(2 / n); five of them
        assert abs(ratio - 1) < 5 * (2 / layer.weight.numel()) ** 0.5
        if isinstance(layer, nn.Conv2d) and layer.bias is not None:
            assert not layer.bias.any()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: models.mlp(0), "in_features must be a whole number"),
        (lambda: models.mlp(4, 5), "hidden must be a list"),
        (lambda: models.mlp(4, (5, 0)), r"hidden\[1\] must be a whole number"),
        (lambda: models.mlp(4, num_classes=0), "num_classes must be"),
        (lambda: models.mlp(4, seed=0.5), "seed must be a whole number"),
        (lambda: models.lenet(kernel_size=4), "odd kernel_size"),
        (lambda: models.lenet(image_size=8, same_padding=False), "raise image_size"),
        (lambda: models.lenet(channels=()), "channels must be a sequence of at least 1"),
        (lambda: models.vgg(()), "stages must be a sequence"),
        (lambda: models.vgg((64, 128)), r"stages must be a list"),
        (lambda: models.wide_resnet(28, 0), "width must be"),
        (lambda: models.wide_resnet(4, 1), "6n \\+ 4"),
        (lambda: models.wide_resnet(27, 1), "got 27"),
        (lambda: models.resnet50(base=1.5), "base must be"),
        (lambda: models.densenet161(in_channels=-1), "in_channels must be"),
        (lambda: models.clinical_lstm(0), "num_features must be"),
        (lambda: models.imdb_lstm(vocabulary=0), "vocabulary must be"),
    ],
)
def test_bad_settings_are_refused(call, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


def test_unknown_activation_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown activation 'rely', did you mean 'relu'"):
        models.mlp(4, activation="rely")
