"""Statistics of blocks over the data: one pass for Kronecker factors, a second one along their eigenvectors."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..distributions.linalg import eigh
from ..errors import ConfigError, DataError
from ..inputs import Batch, call, map_tensors, rows_of, take
from ..layers.shell import leased
from ..layers.taps import Port, tapped
from ..likelihoods import BuiltLikelihood
from ..sources import OrderedSource, Source
from .blocks import Block, Statistics
from .find import Taps
from .kinds import Curvature
from .labels import LabelNoise
from .products import ProductSums
from .sums import DiagonalSums, Sums, Wanted

if TYPE_CHECKING:
    from ..training.processes import Processes

#: The sums of every block's taps, by block name.
BlockSums = dict[str, list[DiagonalSums | ProductSums]]


def statistics(
    network: nn.Module,
    taps: Taps,
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
    watch: Callable[[Tensor, Tensor], None] | None = None,
) -> dict[str, Statistics]:
    """Means over the rows of what each block saw, by block name.

    Eigenvalues take a second pass over the data, with the same labels, unless `basis` is given. Blocks without
    Kronecker factors always get the diagonal, and nothing else.

    Args:
        network: in evaluation mode.
        taps: from `find_blocks`.
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
        watch: told the outputs and targets of every batch of this process once, so that who wants to judge the
            network's answers needs no pass of their own.
    """
    like = next(network.parameters())
    like = torch.zeros((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    factors = kronecker or (eigenvalues and basis is None)
    found = {name: Statistics() for name in taps.blocks}
    watchers = [watch] if watch is not None else []

    def once(wanted: Mapping[str, Wanted]) -> None:
        """One pass over the data."""
        sums = _sums(network, taps, wanted, like)
        told = watchers.pop() if watchers else None
        _fill(network, sums, source, likelihood, kind, batch_size, seed, processes, told)
        for name in list(sums):
            found[name] = _with(found[name], taps.blocks[name], sums.pop(name))

    products = [name for name, block in taps.blocks.items() if block.kronecker]
    others = {name: Wanted(diagonal=True) for name in taps.blocks if name not in products}
    if factors:
        # Where there is a second pass, the diagonal comes from it, where patches are at hand.
        first = Wanted(factors=True, diagonal=diagonal and not eigenvalues)
        once({**dict.fromkeys(products, first), **({} if eigenvalues else others)})
        decompose(found, processes)
    if eigenvalues or not factors:
        frames = found if basis is None else basis
        second = {
            name: Wanted(diagonal=diagonal, basis=_frame(taps.blocks[name], frames) if eigenvalues else None)
            for name in products
            if eigenvalues or diagonal
        }
        once({**second, **others})
        if eigenvalues and basis is not None:
            for name in products:
                vectors, left = _frame(taps.blocks[name], basis)
                found[name] = replace(found[name], input_vectors=vectors, gradient_vectors=left)
    if not kronecker:
        found = {name: replace(each, inputs=None, gradients=None) for name, each in found.items()}
    return found


def decompose(found: dict[str, Statistics], processes: "Processes | None" = None) -> None:
    """Put the eigendecompositions of A and G beside them; processes share them out, the largest first."""
    jobs = []
    for name, each in found.items():
        for side, matrices in (("input", each.inputs), ("gradient", each.gradients)):
            if matrices is not None:
                jobs.append((name, side, matrices))
    loads = [0] * (1 if processes is None else processes.count)
    results = []
    for name, side, matrices in sorted(jobs, key=lambda job: -len(job[2]) * job[2].shape[-1] ** 3):
        owner = loads.index(min(loads))
        loads[owner] += len(matrices) * matrices.shape[-1] ** 3
        values, vectors = matrices.new_empty(matrices.shape[:2]), torch.empty_like(matrices)
        if processes is None or processes.rank == owner:
            for group, matrix in enumerate(matrices):
                values[group], vectors[group] = eigh(matrix, name=f"the {side} factor of {name!r}")
        results.append((owner, values, vectors))
        found[name] = replace(found[name], **{f"{side}_eigenvalues": values, f"{side}_vectors": vectors})
    if processes is not None:  # only now, so that nobody waits for another's decomposition
        for owner, values, vectors in results:
            processes.broadcast([values, vectors], owner)


def _frame(block: Block, basis: Mapping[str, Statistics]) -> tuple[Tensor, Tensor]:
    """The eigenvectors of a block's A and G."""
    own = basis.get(block.name, Statistics())
    vectors, left = own.input_vectors, own.gradient_vectors
    shapes = (block.groups, block.columns), (block.groups, block.rows)
    if vectors is None or left is None or (tuple(vectors.shape[:2]), tuple(left.shape[:2])) != shapes:
        raise ConfigError(
            f"basis must hold eigenvectors as columns, [{shapes[0]}, ...] and [{shapes[1]}, ...], for "
            f"{block.name!r}; take them from statistics of the same network with eigenvalues=True"
        )
    return vectors, left


def _sums(network: nn.Module, taps: Taps, wanted: Mapping[str, Wanted], like: Tensor) -> BlockSums:
    named = dict(network.named_parameters())
    sums: BlockSums = {}
    for name, want in wanted.items():
        own: list[DiagonalSums | ProductSums] = []
        for tap in taps.taps[name]:
            if tap.product is None:
                first, *rest = named[tap.parameter].shape or (1,)
                own.append(DiagonalSums(tap, (first // tap.parts, *rest), like))
                continue
            part = want
            if want.basis is not None:  # groups of the block that belong to this part
                count = tap.product.groups
                groups = slice(tap.part * count, (tap.part + 1) * count)
                part = replace(want, basis=(want.basis[0][groups], want.basis[1][groups]))
            own.append(ProductSums(tap, part, like))
        sums[name] = own
    return sums


def _with(found: Statistics, block: Block, sums: list[DiagonalSums | ProductSums]) -> Statistics:
    """The statistics with the means of one more pass."""
    means: dict[str, Tensor] = {}
    for each in fields(Sums):
        parts = [getattr(own, each.name) for own in sums]
        if parts[0] is not None:
            means[each.name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    if "diagonal" in means:
        means["diagonal"] = means["diagonal"].reshape(block.groups, block.rows, block.columns)
    return replace(found, **means)


# -- one pass over the data -----------------------------------------------------------------------------------------


def _fill(
    network: nn.Module,
    sums: BlockSums,
    source: Source,
    likelihood: BuiltLikelihood,
    kind: Curvature,
    batch_size: int,
    seed: int,
    processes: "Processes | None",
    watch: Callable[[Tensor, Tensor], None] | None,
) -> None:
    """Fill the sums with means over all rows of all processes."""
    flat = [each for own in sums.values() for each in own]
    if not flat:
        return
    step = _Step(flat)
    noise = LabelNoise(seed)
    count = 0
    with (
        torch.enable_grad(),
        leased(network, detached=True) as shell,
        tapped(shell, step.ports, step.ready),
    ):
        for first_row, batch in _batches(source, batch_size, processes):
            step.rows = rows_of(batch.inputs)
            count += step.rows
            outputs = call(shell, map_tensors(Tensor.detach, batch.inputs))
            kept = outputs.detach()
            if watch is not None:
                watch(kept, batch.targets)
            gradients = kind.seeds(likelihood, kept, batch.targets, noise.at(first_row, kept))
            for number, last, (weight, gradient) in _numbered(gradients):
                step.weight, step.first, step.last = weight, number == 0, last
                if outputs.requires_grad:
                    outputs.backward(gradient, retain_graph=not last)
                step.finish()
            del outputs
            step.clear()
    for each in flat:
        each.flush()
    # As two numbers, each exact in single precision.
    rows = torch.tensor([count % 65536, count // 65536]).to(flat[0].tensors()[0])
    if processes is not None:
        processes.sum([rows, *(tensor for each in flat for tensor in each.tensors())])
    count = int(rows[0]) + 65536 * int(rows[1])
    if count == 0:
        raise DataError("data must hold at least one row, got none")
    for each in flat:
        each.divide(count)
        each.finish()


class _Step:
    """Adds what taps saw to their sums: as soon as a gradient is there, so that it need not be kept.

    Args:
        sums: of all taps.
    """

    def __init__(self, sums: list[DiagonalSums | ProductSums]) -> None:
        self.rows, self.weight, self.first, self.last = 0, 1.0, True, True
        self.sums = sums
        self.by_port: dict[Port, list[DiagonalSums | ProductSums]] = {}
        for each in sums:
            for link in each.tap.links:
                self.by_port.setdefault(link.port, []).append(each)
        self.done: set[DiagonalSums | ProductSums] = set()

    @property
    def ports(self) -> list[Port]:
        """All ports that the taps read."""
        return list(self.by_port)

    def ready(self, port: Port) -> None:
        """A gradient has come: taps that read this one call alone are served at once."""
        own = self.by_port[port]
        if len(port.calls) > 1 or any(len(each.tap.links) > 1 for each in own):
            return
        for each in own:
            self._add(each)
        port.calls[0].gradient = None

    def finish(self) -> None:
        """After the backward pass: serve the taps that read several calls."""
        for each in self.sums:
            if each not in self.done:
                self._add(each)
        self.done.clear()
        for port in self.by_port:
            for each in port.calls:
                each.gradient = None

    def _add(self, each: DiagonalSums | ProductSums) -> None:
        with torch.no_grad():
            each.add(self.rows, self.weight, self.first, self.last)
        self.done.add(each)

    def clear(self) -> None:
        """Forget the batch."""
        for port in self.by_port:
            port.clear()


def _numbered(
    gradients: Iterator[tuple[float, Tensor]],
) -> Iterator[tuple[int, bool, tuple[float, Tensor]]]:
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
                part = slice(start, end)
                yield first + start, Batch(take(batch.inputs, part), batch.targets[part])
            first += len(batch.targets)
