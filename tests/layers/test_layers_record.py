"""Recorded passes: what users do around layers, and what a record leaves behind, beyond the layer contract."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from dubito.errors import NetworkError
from dubito.inputs import call, take
from dubito.layers import Layout, Survey, survey
from dubito.layers.record import BlockPart, Call, Record, recorded


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def check(network: nn.Module, inputs, rows: int, *, tolerance: float = 1e-12) -> Survey:
    """Every parameter's gradient of every row against autograd, one row at a time, with a nonlinear loss."""
    network.eval()
    seen = survey(network, inputs)
    assert seen.reasons == {}
    named, record = dict(network.named_parameters()), Record(seen.layout_of)
    with recorded(network, named, record) as shell:
        call(shell, inputs).sin().sum().backward()
    for row in range(rows):
        loss = call(network, take(inputs, slice(row, row + 1))).sin().sum()
        for (name, _), truth in zip(named.items(), torch.autograd.grad(loss, list(named.values())), strict=True):
            part = BlockPart(name, None, None)
            gradient = part.gradients(record.of(part.key), rows, slice(row, row + 1)).reshape(truth.shape)
            assert (gradient - truth).norm() <= tolerance * truth.norm(), name
    return seen


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4, affine=False)
        self.conv, self.shortcut = (nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), nn.Conv2d(4, 6, 1, stride=2))
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.relu(self.norm(self.stem(inputs)))
        out = self.conv(hidden)
        out += self.shortcut(hidden)  # in place on a recorded output
        return self.head(input=self.relu(out).mean((2, 3)))


def test_residual_blocks_with_batch_norm_and_in_place_operations() -> None:
    network = Residual().double()
    with torch.no_grad():
        network.norm.running_mean.copy_(normal(4, seed=3))
        network.norm.running_var.copy_(normal(4, seed=4).square() + 0.5)
    check(network, normal(7, 2, 6, 5), 7)


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_of_rows_and_dtypes(dtype: torch.dtype, rows: int) -> None:
    network = nn.Sequential(nn.Linear(4, 7), nn.ReLU(inplace=True), nn.Linear(7, 3, bias=False)).to(dtype)
    check(network, normal(rows, 2, 4, dtype=dtype), rows, tolerance=1e-12 if dtype == torch.float64 else 3e-6)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.tied = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.tied.weight = self.twice.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.twice(torch.tanh(self.first(inputs))))
        self.twice(inputs.new_ones(len(inputs), 5) * inputs[:, :1])  # a call whose answer nobody reads
        return self.tied(torch.tanh(self.twice(hidden)))


def test_shared_layers_add_up_inside_an_example() -> None:
    network, inputs = Shared().double(), normal(7, 4)
    seen = check(network, inputs, 7)
    record = Record(seen.layout_of)
    with recorded(network, dict(network.named_parameters()), record) as shell:
        shell(inputs).sin().sum().backward()
    assert len(record.uses["twice.weight", 0]) == 4
    calls = record.of(("twice.weight", 0))
    assert len(calls) == 3  # the call nobody reads has no gradient
    a, g = BlockPart("twice.weight", "twice.bias", None).matrices(calls, 7, slice(None))
    assert a.shape == (7, 1, 3, 6) and a[0, 0, :, -1].tolist() == [1, 1, 0]  # the tied layer adds no bias
    for row in range(7):
        loss = network(inputs[row : row + 1]).sin().sum()
        weight, bias = torch.autograd.grad(loss, (network.twice.weight, network.twice.bias))
        torch.testing.assert_close((g @ a)[row, 0, :, :-1], weight, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close((g @ a)[row, 0, :, -1], bias, rtol=1e-12, atol=1e-14)


def test_hooks_of_the_users_change_inputs_and_outputs() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double()
    network[0].register_forward_hook(lambda _, __, output: output * 3)
    network[0].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    check(network, normal(5, 4), 5)


class Named(nn.Module):
    """Inputs by name, one of them tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(7, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, *, tokens: Tensor, numbers: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(tokens).mean(1) + self.body(numbers)))


def test_inputs_by_name() -> None:
    tokens = torch.randint(7, (5, 3), generator=torch.Generator().manual_seed(0))
    check(Named().double(), {"tokens": tokens, "numbers": normal(5, 3)}, 5)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(inputs, src_key_padding_mask=mask)[:, :2]


def test_padded_encoders_are_not_nested() -> None:
    network = Padded().double().eval()
    mask = torch.tensor([[False, False, True]]).expand(4, 3).contiguous()
    seen = survey(network, (normal(4, 3, 8), mask))
    assert {use.layout for use in seen.uses} == {Layout.ROWS}
    assert network.encoder.use_nested_tensor


def test_every_backward_pass_replaces_the_gradients() -> None:
    network, inputs = nn.Sequential(nn.Linear(4, 3), nn.Tanh()).double(), normal(5, 4)
    record, gradients = Record(), []
    with recorded(network, ["0.weight"], record) as shell:
        outputs = shell(inputs)
        for column in range(3):
            outputs.backward(torch.eye(3, dtype=torch.float64)[column].expand(5, 3), retain_graph=True)
            (one,) = record.of(("0.weight", 0))
            assert one.gradient is not None
            gradients.append(one.gradient.clone())
            record.forget_gradients()
            assert record.of(("0.weight", 0)) == []
    for column, gradient in enumerate(gradients):
        slope = (1 - network(inputs)[:, column].square()).detach()
        torch.testing.assert_close(gradient, torch.eye(3).double()[column] * slope[:, None])
    record.clear()
    assert record.calls == [] and record.uses == {}


def test_gradients_are_told_of_as_they_come() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    order: list[tuple[str | None, bool]] = []

    def ready(one: Call) -> None:
        order.append((one.weight, one.gradient is not None))

    with recorded(network, dict(network.named_parameters()), Record(ready=ready)) as shell:
        shell(normal(5, 4)).sum().backward()
    assert order == [("2.weight", True), ("0.weight", True)]


def test_an_error_while_a_gradient_is_read_comes_out() -> None:
    network = nn.Sequential(nn.Linear(4, 3)).double()

    def ready(one: Call) -> None:
        raise KeyError("read")

    with pytest.raises(KeyError, match="read"), recorded(network, ["0.weight"], Record(ready=ready)) as shell:
        shell(normal(5, 4)).sum().backward()


# -- the network is left as it was -------------------------------------------------------------------------------


@pytest.fixture
def network() -> Iterator[nn.Sequential]:
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)).double()
    net[0].bias.requires_grad_(False)
    yield net


def untouched(net: nn.Sequential) -> bool:
    hooks = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in net.modules())
    flags = [p.requires_grad for p in net.parameters()] == [True, False, True, True]
    plain = all(type(p) is nn.Parameter and p.grad is None for p in net.parameters())
    return not hooks and flags and plain and not any("forward" in vars(module) for module in net.modules())


def test_no_gradient_of_weights_is_computed(network: nn.Sequential) -> None:
    record = Record()
    with recorded(network, dict(network.named_parameters()), record) as shell:
        assert not any(p.requires_grad for m in shell.modules() for p in m._parameters.values() if p is not None)
        shell(normal(5, 4)).sum().backward()
        assert untouched(network)
    assert all(call.gradient is not None for call in record.calls)


def test_frozen_networks_are_recorded_too(network: nn.Sequential) -> None:
    network.requires_grad_(False)
    record = Record()
    with recorded(network, dict(network.named_parameters()), record) as shell:
        shell(normal(5, 4)).sum().backward()
    assert all(record.of((name, 0)) for name, _ in network.named_parameters())
    assert not any(p.requires_grad for p in network.parameters())


def test_an_error_leaves_the_network_as_it_was(network: nn.Sequential) -> None:
    with pytest.raises(RuntimeError), recorded(network, dict(network.named_parameters()), Record()) as shell:
        shell(normal(5, 3))
    assert untouched(network)


# -- another use than the survey's -------------------------------------------------------------------------------


class Switching(nn.Module):
    """Uses its weight for rows, or for columns, as told by the first number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if x[0, 0] > 0 else x @ self.weight.t()


class Moving(nn.Module):
    """Scales by its weight, or adds it, as told by the first number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if x[0, 0] > 0 else x + self.weight


@pytest.mark.parametrize("operator", ["product", "sum"])
def test_another_use_of_a_parameter_is_refused(operator: str) -> None:
    """In operators too, where PyTorch takes a TypeError for a reason to try the other operand."""
    network = Switching() if operator == "product" else Moving()
    inputs = normal(3, 4).abs()
    seen = survey(network, inputs)
    with (
        pytest.raises(NetworkError, match=r"as it did on the rows it was surveyed with.*now uses it"),
        recorded(network, ["weight"], Record(seen.layout_of)) as shell,
    ):
        shell(-inputs)


def test_a_pass_that_watches_the_bias_alone_is_placed() -> None:
    network, inputs = nn.Linear(4, 3).double(), normal(5, 2, 4)
    record = Record(survey(network, inputs).layout_of)
    with recorded(network, ["bias"], record) as shell:
        shell(inputs).sum().backward()
    gradients = BlockPart("bias", None, None).gradients(record.of(("bias", 0)), 5, slice(None))
    torch.testing.assert_close(gradients, torch.full((5, 3), 2.0, dtype=torch.float64))
