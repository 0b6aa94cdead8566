"""Per-example truth for curvature tests: every row alone through the plain network, in float64, by autograd."""

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from dubito import GGN, Categorical
from dubito.curvature import Block, Curvature, Statistics, find_blocks, statistics
from dubito.inputs import TensorOptions, call, map_tensors, take
from dubito.likelihoods import Likelihood
from dubito.sources import as_source

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}

#: From the outputs of one row, flattened [C], to a root R [C, S] of the Hessian or of the Fisher: R Rᵀ = H.
Root = Callable[[Tensor], Tensor]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def numbers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def softmax_root(logits: Tensor) -> Tensor:
    """A root of diag(p) − p pᵀ by its eigenvectors: not the root that the library uses."""
    probs = logits.softmax(-1)
    values, vectors = torch.linalg.eigh(probs.diag() - probs[:, None] * probs)
    return vectors * values.clamp(min=0).sqrt()


def double(inputs: Any) -> Any:
    return map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, inputs)


def rowwise(network: nn.Module, inputs: Any, names: Collection[str], root: Root) -> dict[str, Tensor]:
    """Gradients of every row by itself for every column of the root, [N, S, *shape] by parameter name."""
    network = copy.deepcopy(network).double().eval().requires_grad_(True)
    parameters = [network.get_parameter(name) for name in names]
    inputs = double(inputs)
    count = len(inputs if isinstance(inputs, Tensor) else next(iter(_leaves(inputs))))
    rows = []
    for i in range(count):
        outputs = call(network, take(inputs, slice(i, i + 1)))[0].flatten()
        columns = root(outputs.detach()).mT
        grads = [torch.autograd.grad(outputs, parameters, c, retain_graph=True) for c in columns]
        rows.append([torch.stack(each) for each in zip(*grads, strict=True)])
    return {name: torch.stack(each) for name, each in zip(names, zip(*rows, strict=True), strict=True)}


def _leaves(inputs: Any) -> list[Tensor]:
    if isinstance(inputs, Tensor):
        return [inputs]
    values = inputs.values() if isinstance(inputs, dict) else inputs
    return [leaf for value in values for leaf in _leaves(value)]


def matrices(block: Block, gradients: dict[str, Tensor]) -> Tensor:
    """Rowwise gradients as [N, S, G, m, n]: the bias as the last column."""
    weight = gradients[block.weight]
    weight = weight.reshape(*weight.shape[:2], block.groups, block.rows, -1)
    if block.bias is None:
        return weight
    bias = gradients[block.bias].reshape(*weight.shape[:4], 1)
    return torch.cat([weight, bias], -1)


def fitted(
    network: nn.Module,
    inputs: Any,
    targets: Tensor,
    likelihood: Likelihood = Categorical(),
    kind: Curvature = GGN(),
    *,
    batch_size: int = 16,
    seed: int = 0,
    names: Collection[str] | None = None,
    **wanted: Any,
) -> tuple[list[Block], dict[str, Statistics], dict[str, str]]:
    """Blocks, their statistics, and what was left out."""
    network.eval()
    chosen = tuple(name for name, _ in network.named_parameters()) if names is None else names
    covered = find_blocks(network, take(inputs, slice(8)), chosen)
    blocks = list(covered.blocks.values())
    left_out = covered.left_out
    with torch.no_grad():
        built = likelihood.build(call(network, take(inputs, slice(2)))).requires_grad_(False)
    source = as_source((inputs, targets), TensorOptions.of(network))
    found = statistics(network, covered, source, built, kind, batch_size=batch_size, seed=seed, **wanted)
    return blocks, found, left_out


def close(actual: Tensor | None, expected: Tensor, what: object = "", factor: float = 1.0) -> None:
    """Relative error in the Frobenius norm, against the project's bars."""
    assert actual is not None, what
    assert actual.shape == expected.shape, what
    error = float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-300))
    assert error < factor * TOLERANCE[actual.dtype], (what, error)


def check_squares(
    network: nn.Module,
    inputs: Any,
    *,
    targets: Tensor | None = None,
    root: Root = softmax_root,
    kronecker: Collection[str] | None = None,
    left_out: Collection[str] = (),
    sizes: tuple[int, ...] = (3,),
    **options: Any,
) -> dict[str, Statistics]:
    """Φ and Λ of all blocks against rowwise gradients; returns the statistics of the last batch size.

    Args:
        network: any.
        inputs: rows.
        targets: zeros by default.
        root: of the likelihood's Hessian.
        kronecker: the names of the blocks that must have Kronecker factors; None for all blocks.
        left_out: the parameters that must be left out.
        sizes: batch sizes.
        options: for `fitted`.
    """
    count = len(_leaves(inputs)[0])
    targets = torch.zeros(count, dtype=torch.long) if targets is None else targets
    covered = [name for name, _ in network.named_parameters() if name not in left_out]
    gradients = rowwise(network, inputs, covered, root)
    found: dict[str, Statistics] = {}
    for size in sizes:
        blocks, found, missing = fitted(
            network, inputs, targets, batch_size=size, kronecker=True, eigenvalues=True, diagonal=True, **options
        )
        assert set(missing) == set(left_out), missing
        assert sorted(name for block in blocks for name in block.parameters) == sorted(covered)
        expected = {block.name for block in blocks} if kronecker is None else set(kronecker)
        assert {block.name for block in blocks if block.kronecker} == expected
        for block in blocks:
            own, each = matrices(block, gradients), found[block.name]
            close(each.diagonal, own.square().sum(1).mean(0), block.name)
            if not block.kronecker:
                assert each.inputs is None and each.eigenvalues is None
                continue
            assert each.gradient_vectors is not None and each.input_vectors is not None
            turned = each.gradient_vectors.double().mT @ own @ each.input_vectors.double()
            close(each.eigenvalues, turned.square().sum(1).mean(0), block.name)
            # An orthogonal change of basis keeps the sum of squares.
            torch.testing.assert_close(each.eigenvalues.sum((1, 2)), each.diagonal.sum((1, 2)), rtol=1e-5, atol=0)
    return found
