"""INF's Lemma 1 on layers of trained networks, under the guard that keeps the precision positive.

The lemma says that at full rank V Λ Vᵀ + D is no farther from the exact information, in Frobenius norm, than EFB's
V Λ Vᵀ. It is proved for D with its sign. With the congruence guard, S V Λ Vᵀ S + max(D, 0), it is no theorem; here
is how often it fails. The paper has no such numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from dubito import GGN, MAP, Categorical, Gaussian, seeds
from dubito.curvature import Block, Statistics, find_blocks, statistics
from dubito.data import Part, load
from dubito.distributions.linalg import kronecker_diagonal, sandwich
from dubito.inputs import Batch
from dubito.likelihoods import BuiltLikelihood
from dubito.models import lenet, mlp
from dubito.sources import TensorSource
from dubito.training import Training

from ..runner import provenance
from ..runner.experiment import Cell, Experiment, Metric, Outcome, Scale, Table, Variant
from ..settings import explicit
from .table_1 import TABLES_OF_UCI

#: Numbers of the largest temporary array.
CHUNK = 1 << 24
#: Of the information's squared norm: below this EFB is exact but for rounding, and there is nothing to compare.
EXACT = 1e-12


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Whose layers are looked at, after a training by Adam in double precision.

    Args:
        network: "mlp" or "lenet", with one convolution of 6 and one of 16 channels.
        hidden: units of the hidden dense layers.
        train: training rows.
        rows: the first of them whose information is taken, exactly.
        iterations: training steps, 64 rows each.
        lr: learning rate.
    """

    network: str = "mlp"
    hidden: tuple[int, ...] = (50,)
    train: int = 100_000
    rows: int = 2000
    iterations: int = 1000
    lr: float = 1e-2


def load_cell(cell: Cell) -> Part:
    """Standardised training rows in double precision."""
    name = cell.data if cell.data == "mnist" else f"uci/{cell.data}"
    split = 0 if cell.data == "mnist" else cell.split
    return load(name, split, standardise=True, validation=0, dtype=torch.float64).train


def generate_cell(cell: Cell) -> Part:
    """Made-up rows."""
    stream = seeds.generator(cell.seed, "made-up rows", cell.data)
    if cell.data == "mnist":
        inputs = torch.randn(40, 1, 28, 28, generator=stream, dtype=torch.float64)
        return Part(inputs, torch.arange(40) % 10)
    inputs = torch.randn(60, 4, generator=stream, dtype=torch.float64)
    return Part(inputs, inputs[:, :1].sin())


def run_cells(cells: Sequence[Cell], data: Sequence[Part], settings: Layers, steps: int | None) -> list[Outcome]:
    """Errors of guarded INF over those of EFB and of KFAC, layer by layer."""
    return [run_cell(cell, part, settings, steps) for cell, part in zip(cells, data, strict=True)]


def run_cell(cell: Cell, part: Part, settings: Layers, steps: int | None) -> Outcome:
    """Train one network and compare all of its layers."""
    inputs, targets = part.inputs[: settings.train], part.targets[: settings.train]
    classes = 10 if not targets.is_floating_point() else 0
    seed = cell.split + cell.seed
    if settings.network == "lenet":
        net = lenet(channels=(6, 16), dense=settings.hidden, same_padding=False, seed=seed)
    else:
        inputs = inputs.flatten(1)
        net = mlp(inputs.shape[1], settings.hidden, num_classes=classes or 1, seed=seed)
    training = explicit(Training, iterations=steps or settings.iterations, batch_size=64, lr=settings.lr)
    likelihood = explicit(Categorical) if classes else explicit(Gaussian, std=1.0)
    data = (inputs, targets)
    point = provenance.fit(explicit(MAP), net.double(), data, likelihood, training=training, seed=seed, progress=False)
    few = slice(20 if steps else settings.rows)
    errors = layer_errors(point.network, point.likelihood, inputs[few], targets[few])
    ratios = {name: own["inf"] / own["efb"] for name, own in errors.items()}
    above_kfac = sum(own["inf"] > own["kfac"] for own in errors.values())
    found = {
        "layers": float(len(ratios)),
        "failures": float(sum(ratio > 1 for ratio in ratios.values())),
        "largest": max(ratios.values(), default=0.0),
        "above_kfac": float(above_kfac),
    }
    return Outcome(metrics=found, details={"errors": errors})


def layer_errors(
    network: nn.Module, likelihood: BuiltLikelihood, inputs: Tensor, targets: Tensor
) -> dict[str, dict[str, float]]:
    """Relative Frobenius errors of KFAC, EFB and guarded INF at full rank, where EFB is not exact."""
    network = network.requires_grad_(True)
    covered = find_blocks(network, inputs[:8], list(dict(network.named_parameters())))
    blocks = list(covered.blocks.values())
    source = TensorSource(Batch(inputs, targets))
    means = statistics(
        network, covered, source, likelihood, GGN(), kronecker=True, eigenvalues=True, diagonal=True,
        batch_size=256, seed=0,
    )  # fmt: skip
    found = {}
    for block in blocks:
        deltas = row_gradients(network, likelihood, block, inputs)
        squares = squared_errors(deltas, len(inputs), means[block.name])
        norm = squares.pop("information")
        if squares["efb"] > EXACT * norm:
            found[block.name] = {name: max(value / norm, 0.0) ** 0.5 for name, value in squares.items()}
    return found


def row_gradients(network: nn.Module, likelihood: BuiltLikelihood, block: Block, inputs: Tensor) -> Tensor:
    """δ with I = 1/N Σ δ δᵀ, one for each row and output, by automatic differentiation, [N·C, m, n]."""
    own = {name: tensor.detach() for name, tensor in network.named_parameters()}
    rest = {name: tensor for name, tensor in own.items() if name not in block.parameters}

    def outputs(chosen: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(network, {**rest, **chosen}, (row[None],))[0]

    chosen = {name: own[name] for name in block.parameters}
    jacobians = vmap(jacrev(outputs), (None, 0))(chosen, inputs)  # [N, C, ...]
    with torch.no_grad():
        roots = likelihood.hessian_root(network(inputs))  # [N, C, C]
    matrices = [jacobians[block.weight].flatten(3).flatten(2).unflatten(2, (block.rows, -1))]
    if block.bias is not None:
        matrices.append(jacobians[block.bias].unsqueeze(-1))
    return torch.einsum("ncmj,nck->nkmj", torch.cat(matrices, -1), roots).flatten(0, 1)


def squared_errors(deltas: Tensor, rows: int, own: Statistics) -> dict[str, float]:
    """‖I − X‖² = ‖I‖² − 2 ⟨I, X⟩ + ‖X‖² for each X, and ‖I‖²; I is never formed where it is large.

    Args:
        deltas: δ, [N·C, m, n].
        rows: N.
        own: means over the same gradients.
    """
    assert own.inputs is not None and own.gradients is not None and own.eigenvalues is not None
    assert own.input_vectors is not None and own.gradient_vectors is not None and own.diagonal is not None
    a, g, exact, values = own.inputs[0], own.gradients[0], own.diagonal[0], own.eigenvalues[0]
    left, right = own.gradient_vectors[0], own.input_vectors[0]
    flat = deltas.flatten(1)
    gram = flat @ flat.mT if len(flat) < flat.shape[1] else flat.mT @ flat
    norm = float(gram.square().sum()) / rows**2
    # F5 of the verified maths: s = √(Φ/ℓ) where ℓ > Φ, D₊ = max(Φ − ℓ, 0)
    ell = kronecker_diagonal(left, right, values)
    shrink = torch.where(ell > exact, exact / ell, 1.0).sqrt()
    rest = (exact - ell).clamp(min=0)
    # ⟨I, X⟩ = 1/N Σ δᵀ X δ
    turned = sandwich(left.mT, shrink * deltas, right)
    inner = float((values * turned.square()).sum()) / rows + float((rest * exact).sum())
    size = shrunk_norm(left, right, values, shrink) + float((2 * shrink.square() * ell * rest).sum())
    size += float(rest.square().sum())
    kfac_inner = float(((g @ deltas @ a) * deltas).sum()) / rows
    kfac_size = float(a.square().sum() * g.square().sum())
    return {
        "information": norm,
        "kfac": norm - 2 * kfac_inner + kfac_size,
        "efb": norm - float(values.square().sum()),  # ⟨I, V Λ Vᵀ⟩ = ‖Λ‖², as Λ is I's own diagonal there
        "inf": norm - 2 * inner + size,
    }


def shrunk_norm(left: Tensor, right: Tensor, values: Tensor, shrink: Tensor) -> float:
    """‖S V Λ Vᵀ S‖² = Σ_ij s_i² s_j² (V Λ Vᵀ)_ij², row by row of V Λ Vᵀ."""
    m, n = shrink.shape
    weight, total = shrink.square(), 0.0
    step = max(1, CHUNK // (m * n))
    for output in range(m):
        for start in range(0, n, step):
            part = right[start : start + step]  # [q, n']
            # row (p, q) of V Λ Vᵀ is U_G (Λ ∘ u_p u_qᵀ) U_Aᵀ
            own = sandwich(left, left[output, :, None] * values * part[:, None, :], right.mT)
            total += float((weight[output, start : start + step, None, None] * weight * own.square()).sum())
    return total


def variants() -> dict[tuple[str, str], Variant]:
    """The paper's networks on its tables, and two image networks small enough for exact blocks."""
    found = {(name, "mlp-50"): Variant(settings=Layers(hidden=(50, 50)), cpu_seconds=12.0) for name in TABLES_OF_UCI}
    images = {"train": 4000, "rows": 200, "iterations": 400, "lr": 1e-3}
    found["mnist", "mlp-16"] = Variant(settings=Layers(hidden=(16, 16), **images), cpu_seconds=60.0)
    found["mnist", "lenet"] = Variant(settings=Layers(network="lenet", hidden=(32,), **images), cpu_seconds=60.0)
    return found


EXPERIMENT = Experiment(
    paper="inf",
    name="inf-lemma-1",
    scales={"paper": Scale(variants=variants(), splits=dict.fromkeys(TABLES_OF_UCI, 3) | {"mnist": 2})},
    load=load_cell,
    generate=generate_cell,
    run=run_cells,
)
TABLES = (
    Table(
        name="inf-lemma-1",
        title="layers on which guarded INF at full rank is farther from the exact information than EFB",
        paper="INF, Lemma 1 (no numbers: there it is a theorem, for a form that need not be positive)",
        plus_minus="none",
        differs="our guard; two hidden layers of 50 units on UCI tables, of 16 or a LeNet on 4,000 MNIST digits",
        experiment=EXPERIMENT,
        metrics=(
            Metric(name="layers", title="layers of a network", lower_is_better=False),
            Metric(name="failures", title="of them farther than EFB", lower_is_better=True),
            Metric(name="above_kfac", title="of them farther than KFAC", lower_is_better=True),
            Metric(name="largest", title="largest error over EFB's", lower_is_better=True),
        ),
        published={},
    ),
)
