"""Statistics of blocks over the data: one pass for Kronecker factors, a second one along their eigenvectors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..devices import on_host
from ..distributions.linalg import eigh
from ..errors import ConfigError, DataError
from ..inputs import Batch, call, map_tensors, rows_of, weighted
from ..layers.linear import Dense
from ..layers.record import Call, Part, recorded
from ..likelihoods import BuiltLikelihood
from ..sources import OrderedSource, Source
from .blocks import Block, Statistics
from .covering import Cover
from .kinds import Curvature
from .labels import LabelNoise
from .products import ProductSums
from .sums import DiagonalSums, Sums, Wanted

if TYPE_CHECKING:
    from ..processes import Processes

#: The sums of the parts of every block, by block name.
BlockSums = dict[str, list[DiagonalSums | ProductSums]]
#: Told outputs, targets and weights of a batch.
Watcher = Callable[[Tensor, Tensor, Tensor | None], None]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What every pass over the data has in common.

    Attributes:
        network: in evaluation mode.
        cover: its blocks.
        source: the rows.
        likelihood: judges outputs and draws labels.
        kind: which curvature.
        batch_size: rows per step; the results do not depend on it.
        seed: of drawn labels.
        processes: share the rows and the eigendecompositions; each gets all results.
    """

    network: nn.Module
    cover: Cover
    source: Source
    likelihood: BuiltLikelihood
    kind: Curvature
    batch_size: int
    seed: int
    processes: "Processes | None" = None

    @property
    def like(self) -> Tensor:
        """A tensor of the dtype and device of sums."""
        weight = next(self.network.parameters())
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return torch.zeros((), dtype=dtype, device=weight.device)


def statistics(
    network: nn.Module,
    cover: Cover,
    source: Source,
    likelihood: BuiltLikelihood,
    kind: Curvature,
    *,
    kronecker: bool = False,
    eigenvalues: bool = False,
    diagonal: bool = False,
    batch_size: int,
    seed: int,
    processes: "Processes | None" = None,
    basis: Mapping[str, Statistics] | None = None,
    watch: Watcher | None = None,
    keep_factors: bool = True,
) -> dict[str, Statistics]:
    """Means over the rows of what each block saw, by block name.

    Eigenvalues take a second pass over the data, with the same labels, unless `basis` is given. Blocks without
    Kronecker factors always get the diagonal, and nothing else.

    Args:
        network: in evaluation mode.
        cover: its blocks.
        source: the rows.
        likelihood: judges outputs and draws labels.
        kind: which curvature.
        kronecker: A and G, with their eigenvalues and eigenvectors.
        eigenvalues: Λ, along those eigenvectors or along those of `basis`.
        diagonal: Φ.
        batch_size: rows per step; the results do not depend on it.
        seed: of drawn labels.
        processes: share the rows and the eigendecompositions; each gets all results.
        basis: eigenvectors for Λ, by block name: all of them, or those along which Λ is wanted.
        watch: told the outputs, targets and weights of every batch of this process once, so that who wants to judge
            the network's answers needs no pass of their own.
        keep_factors: whether A and G come beside their eigenvectors; else each makes room for its own.
    """
    over = Pass(
        network=network,
        cover=cover,
        source=source,
        likelihood=likelihood,
        kind=kind,
        batch_size=batch_size,
        seed=seed,
        processes=processes,
    )
    results = {name: Statistics() for name in cover.blocks}
    factors = (kronecker or (eigenvalues and basis is None)) and bool(_products(cover))
    if factors:
        # Where there is a second pass, the diagonal comes from it, where patches are at hand.
        first = Wanted(factors=True, diagonal=diagonal and not eigenvalues)
        _once(over, results, _wanted(cover, first, others=not eigenvalues), watch)
        decompose(results, processes, keep_factors=keep_factors)
    if eigenvalues or not factors:
        frames = results if basis is None else basis
        frame = {name: _frame(cover.blocks[name], frames) for name in _products(cover)} if eigenvalues else {}
        wanted = {
            name: Wanted(diagonal=diagonal, basis=frame.get(name))
            for name in _products(cover)
            if eigenvalues or diagonal
        }
        _once(over, results, {**wanted, **_wanted(cover, None)}, None if factors else watch)
        for name, (vectors, left) in frame.items():
            results[name] = replace(results[name], input_vectors=vectors, gradient_vectors=left)
    if not kronecker:
        results = {name: replace(means, inputs=None, gradients=None) for name, means in results.items()}
    return results


def _products(cover: Cover) -> list[str]:
    """The blocks with Kronecker factors."""
    return [name for name, block in cover.blocks.items() if block.kronecker]


def _wanted(cover: Cover, first: Wanted | None, *, others: bool = True) -> dict[str, Wanted]:
    """What to sum: `first` for blocks with Kronecker factors, the diagonal for `others`."""
    products = {} if first is None else dict.fromkeys(_products(cover), first)
    rest = {name: Wanted(diagonal=True) for name, block in cover.blocks.items() if not block.kronecker}
    return {**products, **(rest if others else {})}


def _once(over: Pass, results: dict[str, Statistics], wanted: Mapping[str, Wanted], watch: Watcher | None) -> None:
    """One pass over the data, whose means join the results."""
    sums = _sums(over, wanted)
    _fill(over, sums, watch)
    for name in list(sums):
        results[name] = _with(results[name], over.cover.blocks[name], sums.pop(name))


def decompose(
    results: dict[str, Statistics], processes: "Processes | None" = None, *, keep_factors: bool = True
) -> None:
    """Put eigendecompositions beside A and G, or in their place; processes share them out, the largest first."""
    jobs = []
    for name, means in results.items():
        for side, matrices in (("input", means.inputs), ("gradient", means.gradients)):
            if matrices is not None:
                jobs.append((name, side, matrices))
    loads = [0] * (1 if processes is None else processes.count)
    shared = []
    jobs.sort(key=lambda job: len(job[2]) * job[2].shape[-1] ** 3)
    while jobs:
        name, side, matrices = jobs.pop()
        owner = loads.index(min(loads))
        loads[owner] += len(matrices) * matrices.shape[-1] ** 3
        values, vectors = matrices.new_empty(matrices.shape[:2]), torch.empty_like(matrices)
        if processes is None or processes.rank == owner:
            for group, matrix in enumerate(matrices):
                values[group], vectors[group] = eigh(matrix, name=f"the {side} factor of {name!r}")
        shared.append((owner, values, vectors))
        decomposed = {f"{side}_eigenvalues": values, f"{side}_vectors": vectors}
        results[name] = replace(results[name], **decomposed if keep_factors else {**decomposed, f"{side}s": None})
    if processes is not None:  # only now, so that nobody waits for another's decomposition
        for owner, values, vectors in shared:
            processes.broadcast([values, vectors], owner)


def _frame(block: Block, basis: Mapping[str, Statistics]) -> tuple[Tensor, Tensor]:
    """The eigenvectors of a block's A and G."""
    known = basis.get(block.name, Statistics())
    vectors, left = known.input_vectors, known.gradient_vectors
    shapes = (block.groups, block.columns), (block.groups, block.rows)
    if vectors is None or left is None or (tuple(vectors.shape[:2]), tuple(left.shape[:2])) != shapes:
        raise ConfigError(
            f"basis must hold eigenvectors as columns, [{shapes[0]}, ...] and [{shapes[1]}, ...], for "
            f"{block.name!r}; take them from statistics of the same network with eigenvalues=True"
        )
    return vectors, left


def _sums(over: Pass, wanted: Mapping[str, Wanted]) -> BlockSums:
    shapes = {name: parameter.shape for name, parameter in over.network.named_parameters()}
    sums: BlockSums = {}
    for name, want in wanted.items():
        sums[name] = []
        for part in over.cover.parts[name]:
            if part.product is None:
                first, *rest = shapes[part.parameter] or (1,)
                sums[name].append(DiagonalSums(part, (first // part.parts, *rest), over.like))
                continue
            chosen = want
            if want.basis is not None:  # groups of the block that belong to this part
                count = part.product.groups
                groups = slice(part.part * count, (part.part + 1) * count)
                chosen = replace(want, basis=(want.basis[0][groups], want.basis[1][groups]))
            sums[name].append(ProductSums(part, chosen, over.like))
    return sums


def _with(means: Statistics, block: Block, sums: list[DiagonalSums | ProductSums]) -> Statistics:
    """The statistics with the means of one more pass."""
    further: dict[str, Tensor] = {}
    for field in fields(Sums):
        parts = [getattr(part, field.name) for part in sums]
        if parts[0] is not None:
            further[field.name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    if "diagonal" in further:
        further["diagonal"] = further["diagonal"].reshape(block.groups, block.rows, block.columns)
    return replace(means, **further)


# -- one pass over the data -----------------------------------------------------------------------------------------


def _fill(over: Pass, sums: BlockSums, watch: Watcher | None) -> None:
    """Fill the sums with means over all rows of all processes."""
    flat = [part for block in sums.values() for part in block]
    if not flat:
        return
    count = _add_batches(over, flat, watch)
    for part in flat:
        part.flush()
    # As two numbers, each exact in single precision.
    rows = torch.tensor([count % 65536, count // 65536]).to(flat[0].tensors()[0])
    if over.processes is not None:
        over.processes.sum([rows, *(tensor for part in flat for tensor in part.tensors())])
    count = int(rows[0]) + 65536 * int(rows[1])
    if count == 0:
        raise DataError("data must hold at least one row, got none")
    for part in flat:
        part.divide(count)
        part.finish()


def _add_batches(over: Pass, sums: list[DiagonalSums | ProductSums], watch: Watcher | None) -> int:
    """Add all batches of this process to the sums; returns the number of rows, over which weights have mean 1."""
    step, noise, count = _SumsOfPass(over.cover, sums), LabelNoise(over.seed), 0
    with torch.enable_grad(), recorded(over.network, step.names, step.record) as shell:
        for first_row, batch in _batches(over.source, over.batch_size, over.processes):
            step.rows = rows_of(batch.inputs)
            count += step.rows
            outputs = call(shell, map_tensors(Tensor.detach, batch.inputs))
            answers = outputs.detach()
            if watch is not None:
                watch(answers, batch.targets, batch.weights)
            roots = None if batch.weights is None else batch.weights.to(over.like).sqrt()
            for part in sums:
                if isinstance(part, ProductSums):
                    part.roots = roots
            seen = over.likelihood.observed(batch.targets)
            step.some = seen is not None and not (on_host(seen) and bool(seen.all()))
            gradients = over.kind.seeds(over.likelihood, answers, batch.targets, noise.at(first_row, answers))
            for number, last, (weight, gradient) in _numbered(gradients):
                step.weight, step.first, step.last = weight, number == 0, last
                if outputs.requires_grad:  # δ √w: its squares count w times
                    outputs.backward(weighted(gradient, roots), retain_graph=not last)
                step.finish()
            del outputs
            step.record.clear()
    step.sums, step.by_part = [], {}  # step and record hold each other: sums must not wait for the collector
    return count


class _SumsOfPass:
    """Adds what calls saw to the sums: as soon as a gradient is there, so that it need not be kept.

    Args:
        cover: the blocks.
        sums: of all their parts.
    """

    def __init__(self, cover: Cover, sums: list[DiagonalSums | ProductSums]) -> None:
        self.rows, self.weight, self.first, self.last = 0, 1.0, True, True
        #: Whether some positions have no label: those that none of the others depends on do not count.
        self.some = False
        self.sums = sums
        self.record = cover.record(ready=self.ready)
        self.by_part: dict[Part, DiagonalSums | ProductSums] = {}
        for part_sums in sums:
            part = part_sums.part
            self.by_part[part.key] = part_sums
            if part.bias is not None:
                self.by_part[part.bias, part.part] = part_sums
        self.done: set[DiagonalSums | ProductSums] = set()

    @property
    def names(self) -> list[str]:
        """The parameters that are read."""
        return list(dict.fromkeys(name for name, _ in self.by_part))

    def ready(self, seen: Call) -> None:
        """A gradient has come: sums that read this one call alone are served at once."""
        readers = [self.by_part[place] for place in seen.places]
        if any(len(self.record.uses[reader.part.key]) > 1 for reader in readers):
            return
        for reader in dict.fromkeys(readers):
            self._add(reader)
        seen.gradient = None

    def finish(self) -> None:
        """After the backward pass: serve the sums that read several calls."""
        for part_sums in self.sums:
            if part_sums not in self.done:
                self._add(part_sums)
        self.done.clear()
        self.record.forget_gradients()

    def _add(self, part_sums: DiagonalSums | ProductSums) -> None:
        calls = self.record.of(part_sums.part.key)
        for seen in calls if self.some else ():
            if seen.active is None and seen.gradient is not None and isinstance(seen.form, Dense):
                active = (seen.gradient != 0).any(-1)
                seen.active = active if active.numel() > self.rows else None
        with torch.no_grad():
            part_sums.add(calls, self.rows, self.weight, self.first, self.last)
        self.done.add(part_sums)


def _numbered(gradients: Iterator[tuple[float, Tensor]]) -> Iterator[tuple[int, bool, tuple[float, Tensor]]]:
    """Each item with its number and whether it is the last."""
    number, current = 0, next(gradients, None)
    while current is not None:
        following = next(gradients, None)
        yield number, following is None, current
        number, current = number + 1, following


def _batches(source: Source, batch_size: int, processes: "Processes | None") -> Iterator[tuple[int, Batch]]:
    """This process's rows in batches, each with the number of its first row in the data."""
    first = 0
    if processes is None or processes.count == 1:
        for batch in source.batches(batch_size):
            yield first, batch
            first += len(batch.targets)
    elif isinstance(source, OrderedSource):
        first, end = processes.share(source.num_data)
        for batch in source.read(torch.arange(first, end).split(batch_size)):
            if batch is not None:  # a share may be empty
                yield first, batch
                first += len(batch.targets)
    else:
        for batch in source.batches(batch_size):
            start, end = processes.share(len(batch.targets))
            if end > start:
                yield first + start, batch.rows(slice(start, end))
            first += len(batch.targets)
