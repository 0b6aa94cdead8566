"""Kronecker factors and eigenvalues: A, G, Λ and Φ against what every row shows by itself."""

import copy
import sys
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from curvature_reference import check_squares, close, fitted, normal, numbers, rowwise, softmax_root
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import GGN, Bernoulli, ConfigError, Empirical, Fisher, Gaussian
from dubito.curvature import Curvature, Statistics

ROWS = 64


class Convolved(nn.Module):
    """Grouped, dilated, strided, circular and plain convolutions, an in-place ReLU, a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, (3, 2), padding=(1, 0), bias=False)
        self.conv = nn.Conv2d(8, 6, 3, stride=2, padding=2, groups=2, dilation=2)
        self.wide = nn.Conv2d(8, 6, 3, padding=1)
        self.wrapped = nn.Conv2d(6, 5, (1, 3), padding=(0, 1), padding_mode="circular")
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.relu(self.stem(inputs))
        hidden = self.relu(self.conv(hidden) + self.wide(hidden)[..., ::2, ::2])
        return self.head(self.wrapped(hidden).mean((2, 3)))


class Sequences(nn.Module):
    """Linear layers on [B, T, F] and time first."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.time, self.head = nn.Linear(4, 6), nn.Linear(6, 2, bias=False), nn.Linear(2, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu_(self.rows(inputs))
        return self.head(torch.tanh(self.time(hidden.transpose(0, 1))).mean(0))


class Shared(nn.Module):
    """A layer called twice, and one with its weight but without its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.tied = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.tied.weight = self.twice.weight
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.twice(torch.tanh(self.first(inputs))))
        return self.head(torch.tanh(self.tied(torch.tanh(self.twice(hidden)))))


def mlp(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(inplace=True), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, outputs))


NETWORKS = {
    "mlp": (mlp, (4,)),
    "convolved": (Convolved, (2, 6, 5)),
    "sequences": (Sequences, (3, 4)),
    "shared": (Shared, (4,)),
}


def patches(layer: nn.Module, x: Tensor) -> Tensor:
    """The inputs of one row as [G, T, n], by plain indexing."""
    if isinstance(layer, nn.Linear):
        return x.reshape(1, -1, layer.in_features)
    pads = [pad for pad in reversed(layer.padding) for _ in range(2)]
    x = F.pad(x, pads, mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)[0]
    height, width = ((layer.kernel_size[i] - 1) * layer.dilation[i] + 1 for i in range(2))
    found = []
    for top, left in product(
        range(0, x.shape[1] - height + 1, layer.stride[0]), range(0, x.shape[2] - width + 1, layer.stride[1])
    ):
        window = x[:, top : top + height : layer.dilation[0], left : left + width : layer.dilation[1]]
        found.append(window.reshape(layer.groups, -1))
    return torch.stack(found, 1)


def by_position(layer: nn.Module, g: Tensor) -> Tensor:
    """The gradients of one row as [G, T, m]."""
    if isinstance(layer, nn.Linear):
        return g.reshape(1, -1, layer.out_features)
    return g.reshape(layer.groups, layer.out_channels // layer.groups, -1).mT


def seen(network: nn.Module, row: Tensor) -> Iterator[tuple[str, nn.Module, Tensor, Tensor]]:
    """For every call: the weight's name, the layer, its inputs and its outputs, still in the graph."""
    calls = []
    names = {id(parameter): name for name, parameter in network.named_parameters()}

    def record(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        calls.append((names[id(layer.weight)], layer, args[0].detach().clone(), output))
        return output.clone()  # in-place operations after it leave the output alone

    handles = [m.register_forward_hook(record) for m in network.modules() if hasattr(m, "weight")]
    outputs = network(row)
    for handle in handles:
        handle.remove()
    calls.append(("", network, row, outputs))
    yield from calls


def factors(network: nn.Module, inputs: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """A and G by weight name, from every row alone."""
    network = copy.deepcopy(network).double().eval()
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    for row in inputs.double().split(1):
        *calls, (_, _, _, outputs) = seen(network, row)
        columns = softmax_root(outputs[0].detach()).mT
        for name in dict.fromkeys(name for name, *_ in calls):
            own = [call for call in calls if call[0] == name]
            a, positions = 0, sum(by_position(layer, y).shape[1] for _, layer, _, y in own)
            g = 0
            biased = any(layer.bias is not None for _, layer, _, _ in own)
            for _, layer, x, y in own:
                column = patches(layer, x)
                if biased:
                    one = torch.full((*column.shape[:2], 1), float(layer.bias is not None)).double()
                    column = torch.cat([column, one], -1)
                a = a + column.mT @ column
                for c in columns:
                    (gradient,) = torch.autograd.grad(outputs, y, c[None], retain_graph=True)
                    each = by_position(layer, gradient)
                    g = g + each.mT @ each / positions
            before = sums.get(name, (0, 0))
            sums[name] = (before[0] + a / len(inputs), before[1] + g / len(inputs))
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NETWORKS)
def test_factors(name: str, dtype: torch.dtype) -> None:
    build, shape = NETWORKS[name]
    network, inputs = build().to(dtype).eval(), normal(ROWS, *shape, dtype=dtype)
    expected = factors(network, inputs)
    targets = torch.zeros(ROWS, dtype=torch.long)
    for batch_size in (1, 7, 64):
        blocks, found, left_out = fitted(network, inputs, targets, batch_size=batch_size, kronecker=True)
        assert not left_out and all(block.kronecker for block in blocks)
        for block in blocks:
            each = found[block.name]
            close(each.inputs, expected[block.weight][0], ("A", block.name, batch_size))
            close(each.gradients, expected[block.weight][1], ("G", block.name, batch_size))
            assert each.diagonal is None and each.eigenvalues is None
            decomposition(each)


def decomposition(found: Statistics) -> None:
    """The eigenvectors and eigenvalues are those of the factors, in ascending order."""
    for matrix, vectors, values in (
        (found.inputs, found.input_vectors, found.input_eigenvalues),
        (found.gradients, found.gradient_vectors, found.gradient_eigenvalues),
    ):
        tolerance = 1e-4 if matrix.dtype == torch.float32 else 1e-11
        torch.testing.assert_close(vectors * values[:, None] @ vectors.mT, matrix, rtol=0, atol=tolerance)
        identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype).expand_as(matrix)
        torch.testing.assert_close(vectors.mT @ vectors, identity, rtol=0, atol=tolerance)
        assert (values.diff() >= 0).all() and (values >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NETWORKS)
def test_eigenvalues_and_diagonal(name: str, dtype: torch.dtype) -> None:
    build, shape = NETWORKS[name]
    check_squares(build().to(dtype), normal(ROWS, *shape, dtype=dtype), sizes=(1, 7, 64))


@pytest.mark.parametrize("name", NETWORKS)
def test_blocks_of_rows_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape = NETWORKS[name]
    for module in ("dubito.curvature.sums", "dubito.curvature.products", "dubito.layers.convolution"):
        monkeypatch.setattr(sys.modules[module], "BLOCK", 300)
    for module in ("dubito.curvature.products", "dubito.layers.convolution", "dubito.layers.form"):
        monkeypatch.setattr(sys.modules[module], "PIECE", 100)
    monkeypatch.setattr(sys.modules["dubito.layers.grams"], "WIDE", 4)
    network, inputs = build().double(), normal(16, *shape)
    check_squares(network, inputs, sizes=(16,))
    expected = factors(network, inputs)
    blocks, found, _ = fitted(network, inputs, torch.zeros(16, dtype=torch.long), kronecker=True)
    for block in blocks:
        close(found[block.name].inputs, expected[block.weight][0])
        close(found[block.name].gradients, expected[block.weight][1])


def test_wide_layers() -> None:
    """Wide enough for symmetric products in blocks, in float32."""
    network = nn.Sequential(nn.Linear(300, 260), nn.Tanh(), nn.Linear(260, 3))
    inputs = normal(40, 300, dtype=torch.float32)
    expected = factors(network, inputs)
    blocks, found, _ = fitted(network, inputs, torch.zeros(40, dtype=torch.long), kronecker=True)
    for block in blocks:
        close(found[block.name].inputs, expected[block.weight][0])
        close(found[block.name].gradients, expected[block.weight][1])


class Sometimes(Shared):
    """Of the calls of a shared weight, only the one without its bias is read where there are many rows."""

    never = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        more = self.twice(hidden)
        hidden = torch.tanh(self.tied(hidden.unflatten(0, (-1, 1)))).sum(1)
        return self.head(hidden if self.never or len(inputs) > 3 else hidden + more)


def test_a_call_that_nobody_reads_counts_nowhere() -> None:
    network, inputs, targets = Sometimes().double(), normal(8, 4), torch.zeros(8, dtype=torch.long)
    found = fitted(network, inputs, targets, kronecker=True, eigenvalues=True, diagonal=True)[1]["twice"]
    hidden = torch.tanh(network.first(inputs)).detach()
    close(found.inputs[0, :-1, :-1], hidden.mT @ hidden / 8)
    assert found.inputs[0, -1].abs().max() == 0 and found.diagonal[..., -1].abs().max() == 0
    network.never = True
    weight = rowwise(network, inputs, ["twice.weight"], softmax_root)["twice.weight"]
    own = torch.cat([weight, torch.zeros(8, 3, 6, 1, dtype=torch.float64)], -1)
    close(found.diagonal[0], own.square().sum(1).mean(0))
    turned = found.gradient_vectors[0].mT @ own @ found.input_vectors[0]
    close(found.eigenvalues[0], turned.square().sum(1).mean(0))


# -- what is asked for, a basis that is given, labels -----------------------------------------------------------


def test_only_what_is_asked_for() -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    inputs, targets = normal(ROWS, 4), torch.zeros(ROWS, dtype=torch.long)
    fields = {
        "kronecker": {
            "inputs",
            "gradients",
            "input_vectors",
            "gradient_vectors",
            "input_eigenvalues",
            "gradient_eigenvalues",
        },
        "eigenvalues": {
            "eigenvalues",
            "input_vectors",
            "gradient_vectors",
            "input_eigenvalues",
            "gradient_eigenvalues",
        },
        "diagonal": {"diagonal"},
    }
    for asked in (*([one] for one in fields), ["kronecker", "diagonal"], list(fields), []):
        _, found, _ = fitted(network, inputs, targets, **dict.fromkeys(asked, True))
        expected = set().union(*(fields[one] for one in asked)) if asked else set()
        assert {key for key, value in vars(found["0"]).items() if value is not None} == expected
        assert {key for key, value in vars(found["1.weight"]).items() if value is not None} == {"diagonal"}


def test_one_pass_and_two_passes_give_the_same_diagonal() -> None:
    network, inputs, targets = mlp().double(), normal(ROWS, 4), torch.zeros(ROWS, dtype=torch.long)
    runs = [
        fitted(network, inputs, targets, kind=Fisher(draws=2), diagonal=True, **wanted)[1]
        for wanted in ({}, {"kronecker": True}, {"eigenvalues": True})
    ]
    for name in runs[0]:
        close(runs[1][name].diagonal, runs[0][name].diagonal)
        close(runs[2][name].diagonal, runs[0][name].diagonal)


@pytest.mark.parametrize("kind", [Fisher(), Fisher(draws=3), GGN(), Empirical()])
def test_drawn_labels_are_the_same_in_both_passes_and_in_all_batches(kind: Curvature) -> None:
    """Λ comes from the second pass; along the axes of the first pass's own G it must rebuild its trace."""
    network, inputs, targets = mlp().double(), normal(ROWS, 4), numbers(3, ROWS)
    runs = {
        size: fitted(network, inputs, targets, kind=kind, batch_size=size, kronecker=True, eigenvalues=True,
                     diagonal=True)[1]
        for size in (1, 7, 64)
    }  # fmt: skip
    basis = runs[64]
    for size, found in runs.items():
        for name, each in found.items():
            close(each.gradients, basis[name].gradients, (name, size))
            close(each.diagonal, basis[name].diagonal, (name, size))
            close(each.eigenvalues.sum(), each.diagonal.sum(), (name, size))
        # One position per row: Σ over inputs' eigenvectors of Λ for the bias alone is the diagonal of U_Gᵀ G U_G.
        last = found["4"]
        squares = (last.gradient_vectors.mT @ last.gradients @ last.gradient_vectors).diagonal(0, 1, 2)
        close(last.gradient_eigenvalues, squares, size)
        frozen = fitted(network, inputs, targets, kind=kind, batch_size=size, eigenvalues=True, basis=basis)[1]
        for name, each in frozen.items():
            close(each.eigenvalues, basis[name].eigenvalues, (name, size))
            assert torch.equal(each.input_vectors, basis[name].input_vectors)
            assert each.inputs is None


def test_a_basis_turns_eigenvalues_for_other_rows() -> None:
    network, targets = mlp().double(), torch.zeros(ROWS, dtype=torch.long)
    basis = fitted(network, normal(ROWS, 4), targets, kronecker=True)[1]
    inputs = normal(ROWS, 4, seed=5)
    blocks, found, _ = fitted(network, inputs, targets, eigenvalues=True, basis=basis)
    gradients = rowwise(network, inputs, [name for b in blocks for name in b.parameters], softmax_root)
    for block in blocks:
        own = torch.cat([gradients[block.weight], gradients[block.bias][..., None]], -1)
        each = basis[block.name]
        turned = each.gradient_vectors[0].mT @ own @ each.input_vectors[0]
        close(found[block.name].eigenvalues[0], turned.square().sum(1).mean(0))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_basis_of_some_eigenvectors_gives_their_eigenvalues(name: str) -> None:
    build, shape = NETWORKS[name]
    network, inputs, targets = build().double(), normal(16, *shape), torch.zeros(16, dtype=torch.long)
    whole = fitted(network, inputs, targets, eigenvalues=True)[1]
    basis = {
        key: Statistics(input_vectors=each.input_vectors[..., -2:], gradient_vectors=each.gradient_vectors[..., 1:])
        for key, each in whole.items()
    }
    some = fitted(network, inputs, targets, eigenvalues=True, basis=basis)[1]
    for key, each in some.items():
        close(each.eigenvalues, whole[key].eigenvalues[:, 1:, -2:], key)


def test_a_basis_must_fit() -> None:
    network, inputs, targets = mlp().double(), normal(8, 4), torch.zeros(8, dtype=torch.long)
    basis = fitted(network, inputs, targets, kronecker=True)[1]
    for wrong in ({"0": basis["0"]}, {**basis, "2": basis["0"]}, {**basis, "2": Statistics()}):
        with pytest.raises(ConfigError, match=r"basis must hold eigenvectors as columns, .* for '2'"):
            fitted(network, inputs, targets, eigenvalues=True, basis=wrong)


COVARIANCE = ((0.5, 0.1, 0.0), (0.1, 0.4, -0.1), (0.0, -0.1, 0.3))
LIKELIHOODS = {
    "bernoulli": (Bernoulli(), lambda f: (f.sigmoid() * (1 - f.sigmoid())).sqrt().diag(), torch.zeros(ROWS, 3)),
    "std per output": (
        Gaussian(std=(0.5, 1.0, 2.0)),
        lambda f: torch.tensor([2.0, 1.0, 0.5]).double().diag(),
        torch.zeros(ROWS, 3),
    ),
    "covariance": (
        Gaussian(covariance=COVARIANCE),
        lambda f: torch.linalg.cholesky(torch.tensor(COVARIANCE, dtype=torch.float64).inverse()),
        torch.zeros(ROWS, 3),
    ),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihoods(name: str) -> None:
    likelihood, root, targets = LIKELIHOODS[name]
    check_squares(mlp().double(), normal(ROWS, 4), targets=targets, root=root, likelihood=likelihood)


def test_dense_outputs_with_drawn_labels() -> None:
    """One label per pixel: δ of a row with its drawn labels, which another run with the same seed repeats."""
    network = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 3, 1)).double()
    inputs, targets = normal(12, 2, 5, 4), numbers(3, 12, 5, 4)
    runs = [
        fitted(network, inputs, targets, kind=Fisher(draws=2), batch_size=size, kronecker=True, diagonal=True)[1]
        for size in (1, 5, 12)
    ]
    for name in runs[0]:
        for run in runs[1:]:
            close(run[name].diagonal, runs[0][name].diagonal)
            close(run[name].gradients, runs[0][name].gradients)
    empirical = fitted(network, inputs, targets, kind=Empirical(), diagonal=True, eigenvalues=True)[1]

    def gradient(i: int) -> list[Tensor]:
        loss = F.cross_entropy(network(inputs[i : i + 1]), targets[i : i + 1], reduction="sum")
        return list(torch.autograd.grad(loss, [network[0].weight, network[0].bias]))

    rows = [torch.cat([w.flatten(1), b[:, None]], 1) for w, b in map(gradient, range(12))]
    own = torch.stack(rows)
    each = empirical["0"]
    close(each.diagonal[0], own.square().mean(0))
    turned = each.gradient_vectors[0].mT @ own @ each.input_vectors[0]
    close(each.eigenvalues[0], turned.square().mean(0))


def test_half_precision_networks_are_summed_in_single_precision() -> None:
    network, inputs = mlp().to(torch.bfloat16), normal(ROWS, 4, dtype=torch.bfloat16)
    found = fitted(
        network, inputs, torch.zeros(ROWS, dtype=torch.long), kronecker=True, eigenvalues=True, diagonal=True
    )[1]
    expected = factors(network, inputs)
    for name, each in found.items():
        assert each.eigenvalues.dtype == each.inputs.dtype == torch.float32
        # The pass itself runs in half precision, with 8 bits of mantissa.
        error = (each.inputs.double() - expected[f"{name}.weight"][0]).norm() / expected[f"{name}.weight"][0].norm()
        assert error < 0.02
