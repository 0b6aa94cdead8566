"""Taps: inputs and output gradients of layers rebuild every example's own gradient."""

from collections.abc import Iterator

import pytest
import torch
from dubito.layers.ports import specs
from dubito.layers.taps import Link, Port, Tap, tapped
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dubito.layers.trace import Layout
from dubito.layers.uses import Product

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def taps_of(network: nn.Module, path: str, layout: Layout = Layout.ROWS) -> list[Tap]:
    """Taps for the weight and the bias of one layer."""
    (spec,) = specs(network.get_submodule(path))
    port = Port(path, "", layout)
    roles = {"weight": spec.weight, "bias": spec.bias}
    return [
        Tap(f"{path}.{name}", None, (Link(port, role.use),))
        for name, role in roles.items()
        if role is not None
    ]


def tap_all(network: nn.Module, layout: Layout = Layout.ROWS) -> list[Tap]:
    kinds = (nn.Linear, nn.Conv2d)
    paths = [path for path, module in network.named_modules() if isinstance(module, kinds)]
    return [tap for path in paths for tap in taps_of(network, path, layout)]


def ports(taps: list[Tap]) -> list[Port]:
    return list({id(link.port): link.port for tap in taps for link in tap.links}.values())


def check(network: nn.Module, inputs: Tensor, layout: Layout = Layout.ROWS) -> None:
    """Taps against torch.func, row by row, with a nonlinear loss."""
    network.eval()
    coefficients = normal(*network(inputs).shape[1:], dtype=inputs.dtype, seed=7)

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return (functional_call(network, parameters, (row[None],))[0] * coefficients).sin().sum()

    parameters = {name: p.detach() for name, p in network.named_parameters()}
    expected = vmap(grad(loss), (None, 0))(parameters, inputs)
    taps = tap_all(network, layout)
    assert sorted(tap.parameter for tap in taps) == sorted(parameters)
    rows = len(inputs)
    with tapped(network, ports(taps)):
        (network(inputs) * coefficients).sin().sum().backward()
        for tap in taps:
            truth = expected[tap.parameter]
            own = tap.gradients(rows, slice(None)).reshape(truth.shape)
            error = (own - truth).norm() / truth.norm()
            assert error < TOLERANCE[inputs.dtype], (tap.parameter, error)
            part = slice(1, 3) if rows > 2 else slice(0, 1)
            torch.testing.assert_close(tap.gradients(rows, part).reshape(truth[part].shape), own[part])
            if tap.product is not None:
                a, g = tap.matrices(rows, part)
                again = g @ a
                if tap.product.order is not None:
                    again = again[..., tap.product.order.argsort()]
                torch.testing.assert_close(again.reshape(truth[part].shape), own[part])


CONVOLUTIONS = {
    "plain": nn.Conv2d(3, 5, (3, 2)),
    "strided": nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 2)),
    "dilated": nn.Conv2d(3, 4, (2, 3), dilation=(2, 1), padding=(0, 1), bias=False),
    "grouped": nn.Conv2d(4, 6, (3, 2), groups=2, padding=1),
    "depthwise": nn.Conv2d(4, 8, 3, groups=4, stride=2),
    "valid": nn.Conv2d(3, 5, 3, padding="valid"),
    "same": nn.Conv2d(3, 5, (3, 5), padding="same", dilation=(1, 2)),
    "same, even kernel": nn.Conv2d(3, 5, (2, 4), padding="same"),
    "circular": nn.Conv2d(3, 5, (3, 2), padding=(1, 2), padding_mode="circular"),
    "reflect": nn.Conv2d(4, 6, 3, padding=(2, 1), padding_mode="reflect", groups=2, stride=2),
    "replicate, same": nn.Conv2d(3, 5, 3, padding="same", padding_mode="replicate"),
    "pointwise": nn.Conv2d(3, 5, 1),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, dtype: torch.dtype) -> None:
    layer = CONVOLUTIONS[name].to(dtype)
    network = nn.Sequential(layer, nn.ReLU(inplace=True), nn.Flatten(), nn.Flatten())
    check(network, normal(4, layer.in_channels, 6, 7, dtype=dtype))


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_layers(dtype: torch.dtype, rows: int) -> None:
    network = nn.Sequential(nn.Linear(4, 7), nn.ReLU(inplace=True), nn.Linear(7, 3, bias=False)).to(dtype)
    check(network, normal(rows, 4, dtype=dtype))
    check(network, normal(rows, 5, 4, dtype=dtype))
    check(network, normal(rows, 2, 3, 4, dtype=dtype))


class Shaped(nn.Module):
    """Layers that see rows in another layout; the shapes are restored at the end."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.layout is Layout.SECOND:
            return self.body(inputs.transpose(0, 1)).transpose(0, 1)
        if self.layout is Layout.FLAT:
            return self.body(inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2])
        turned = inputs.transpose(0, 1)
        return self.body(turned.flatten(0, 1)).unflatten(0, turned.shape[:2]).transpose(0, 1)


@pytest.mark.parametrize("layout", [Layout.SECOND, Layout.FLAT, Layout.FLAT_SECOND])
def test_layouts_of_linear_layers(layout: Layout) -> None:
    check(Shaped(layout).double(), normal(7, 5, 4), layout)


class Frames(nn.Module):
    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout, self.conv = layout, nn.Conv2d(2, 4, (3, 2), groups=2)

    def forward(self, inputs: Tensor) -> Tensor:
        frames = inputs if self.layout is Layout.FLAT else inputs.transpose(0, 1)
        hidden = self.conv(frames.flatten(0, 1)).unflatten(0, frames.shape[:2])
        return hidden if self.layout is Layout.FLAT else hidden.transpose(0, 1)


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.FLAT_SECOND])
def test_convolutions_over_frames(layout: Layout) -> None:
    check(Frames(layout).double(), normal(5, 3, 2, 4, 5), layout)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, affine=False)
        self.conv, self.shortcut = (
            nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False),
            nn.Conv2d(4, 6, 1, stride=2),
        )
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.relu(self.norm(self.stem(inputs)))
        out = self.conv(hidden)
        out += self.shortcut(hidden)  # in place on a tapped layer's output
        return self.head(input=self.relu(out).mean((2, 3)))


def test_residual_blocks_with_batch_norm_and_in_place_operations() -> None:
    network = Residual().double()
    with torch.no_grad():
        network.norm.running_mean.copy_(normal(4, seed=3))
        network.norm.running_var.copy_(normal(4, seed=4).square() + 0.5)
    check(network, normal(7, 2, 6, 5))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.tied = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.tied.weight = self.twice.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.twice(torch.tanh(self.first(inputs))))
        self.twice(inputs.new_ones(len(inputs), 5))  # a call whose answer nobody reads
        return self.tied(torch.tanh(self.twice(hidden)))


def test_shared_layers_add_up_inside_an_example() -> None:
    network, inputs = Shared().double(), normal(7, 4)
    links = (
        Link(Port("twice", "", Layout.ROWS), Product(5, 5), biased=True),
        Link(Port("tied", "", Layout.ROWS), Product(5, 5)),
    )
    tap = Tap("twice.weight", "twice.bias", links)
    with tapped(network, [link.port for link in links]):
        network(inputs).sin().sum().backward()
        assert len(tap.seen()) == 3  # the call nobody reads has no gradient
        own = tap.gradients(7, slice(None)).reshape(7, 5, 5)
        a, g = tap.matrices(7, slice(None))
    assert a.shape == (7, 1, 3, 6) and a[0, 0, :, -1].tolist() == [1, 1, 0]
    for row in range(7):
        loss = network(inputs[row : row + 1]).sin().sum()
        expected = torch.autograd.grad(loss, (network.twice.weight, network.twice.bias))
        torch.testing.assert_close(own[row], expected[0], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close((g @ a)[row, 0, :, :-1], expected[0], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close((g @ a)[row, 0, :, -1], expected[1], rtol=1e-12, atol=1e-14)


def test_uses_of_other_forms_are_no_common_product() -> None:
    port, other = Port("a", "", Layout.ROWS), Port("b", "", Layout.ROWS)
    assert Tap("w", None, (Link(port, Product(2, 3)), Link(other, Product(2, 3)))).product is not None
    assert Tap("w", None, (Link(port, Product(2, 3)), Link(other, Product(3, 2)))).product is None
    (spec,) = specs(nn.Embedding(2, 3))
    assert Tap("w", None, (Link(port, Product(2, 3)), Link(other, spec.weight.use))).product is None


def test_a_hook_of_the_users_own_changes_outputs_after_the_tap() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()
    network[0].register_forward_hook(lambda _, __, output: output * 3)
    network[0].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    check(network, normal(5, 4))


def test_every_backward_pass_replaces_the_gradients() -> None:
    network, inputs = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double(), normal(5, 4)
    taps = tap_all(network)
    seen = []
    with tapped(network, ports(taps)):
        outputs = network(inputs)
        for column in range(3):
            outputs.backward(torch.eye(3, dtype=torch.float64)[column].expand(5, 3), retain_graph=True)
            ((call, _),) = taps[0].seen()
            seen.append(call.gradient.clone())
    for column, gradient in enumerate(seen):
        own = (1 - network(inputs)[:, column].square()).detach()
        torch.testing.assert_close(gradient, torch.eye(3).double()[column] * own[:, None])


def test_gradients_are_told_of_as_they_come() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    taps = tap_all(network)
    order = []

    def ready(port: Port) -> None:
        order.append((port.path, [call.gradient is not None for call in port.calls]))

    with tapped(network, ports(taps), ready):
        network(normal(5, 4)).sum().backward()
    assert order == [("2", [True]), ("0", [True])]


def test_an_error_while_a_gradient_is_read_comes_out() -> None:
    network = nn.Sequential(nn.Linear(4, 3)).double()
    taps = tap_all(network)

    def ready(port: Port) -> None:
        raise KeyError("read")

    with pytest.raises(KeyError, match="read"), tapped(network, ports(taps), ready):
        network(normal(5, 4)).sum().backward()


# -- the network is left as it was --------------------------------------------------------------------------


@pytest.fixture
def network() -> Iterator[nn.Sequential]:
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)).double()
    net[0].bias.requires_grad_(False)
    yield net


def untouched(net: nn.Sequential) -> bool:
    hooks = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in net.modules())
    flags = [p.requires_grad for p in net.parameters()] == [True, False, True, True]
    forwards = not any("forward" in vars(module) for module in net.modules())
    return not hooks and flags and forwards and all(p.grad is None for p in net.parameters())


def test_no_gradient_of_weights_is_computed(network: nn.Sequential) -> None:
    taps = tap_all(network)
    with tapped(network, ports(taps)):
        assert not any(p.requires_grad for p in network.parameters())
        outputs = network(normal(5, 4))
        outputs.sum().backward()
        assert all(p.grad is None for p in network.parameters())
    assert untouched(network)
    assert taps[0].seen() == [] and taps[0].links[0].port.calls == []  # nothing is kept


def test_frozen_networks_are_tapped_too(network: nn.Sequential) -> None:
    network.requires_grad_(False)
    taps = tap_all(network)
    with tapped(network, ports(taps)):
        network(normal(5, 4)).sum().backward()
        assert all(len(tap.seen()) == 1 for tap in taps)
    assert not any(p.requires_grad for p in network.parameters())


def test_an_error_restores_hooks_and_flags(network: nn.Sequential) -> None:
    taps = tap_all(network)
    with pytest.raises(RuntimeError), tapped(network, ports(taps)):
        network(normal(5, 3))
    assert untouched(network)


def test_an_unknown_layer_restores_hooks_and_flags(network: nn.Sequential) -> None:
    taps = tap_all(network)
    with pytest.raises(KeyError), tapped(network, [*ports(taps), Port("9", "", Layout.ROWS)]):
        pass
    assert untouched(network)


def test_padded_encoders_are_tapped() -> None:
    network = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 1).double().eval()
    mask = torch.tensor([[False, False, True]]).expand(4, 3).contiguous()
    tap, _ = taps_of(network, "layers.0.linear1")
    inputs = normal(4, 3, 8)
    with tapped(network, ports([tap])):
        network(inputs, src_key_padding_mask=mask)[:, :2].sin().sum().backward()
        own = tap.gradients(4, slice(None)).reshape(4, 12, 8)
    assert network.use_nested_tensor
    for row in range(4):
        part = slice(row, row + 1)
        loss = network(inputs[part], src_key_padding_mask=mask[part])[:, :2].sin().sum()
        (expected,) = torch.autograd.grad(loss, network.layers[0].linear1.weight)
        torch.testing.assert_close(own[row], expected, rtol=1e-10, atol=1e-12)
