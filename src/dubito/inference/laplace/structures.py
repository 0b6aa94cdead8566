"""How much of the curvature a Laplace posterior keeps: which tensors, and the distribution they stand for.

A structure turns a block's `Statistics` into the tensors that are stored, and stored tensors into the
distribution of one of the block's matrices. Tensors have a leading axis of groups.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict, get_args

import torch
from torch import Tensor

from ...curvature import Block, Statistics
from ...distributions import (
    DiagonalNormal,
    EigenKroneckerNormal,
    KroneckerNormal,
    SparseInformationNormal,
    StructuredNormal,
    select,
)
from ...distributions.linalg import eigh
from ...distributions.selection import EigenvalueSelection, resolve_rank
from ...distributions.selection import Rule as SelectionMethod
from ...distributions.sparse_information import Guard
from ...errors import require_count, unknown_name
from ...hints import Checked

#: The K of `INF` where none is asked for.
DEFAULT_RANK = 100

#: Tensors of a block by kind, each with a leading axis of groups.
BlockTensors = dict[str, Tensor]


class Needs(TypedDict):
    """Which statistics a structure is made of, as `statistics` takes them."""

    kronecker: bool
    eigenvalues: bool
    diagonal: bool


class Structure(Checked, ABC):
    """How much of the curvature is kept."""

    #: The name that `summary` shows.
    title: ClassVar[str]
    needs: ClassVar[Needs]
    #: Whose arguments have the names of the tensors that are stored.
    distribution: ClassVar[Callable[..., StructuredNormal]]

    @abstractmethod
    def keep(self, block: Block, statistics: Statistics) -> BlockTensors:
        """What is stored of a block's statistics."""

    def chosen(self, block: Block, statistics: Statistics) -> dict[str, Any]:
        """Plain facts of what was chosen for a block, for `summary`."""
        return {}

    def normal(
        self, mean: Tensor, tensors: BlockTensors, *, num_data: float, prior_precision: float
    ) -> StructuredNormal:
        """The distribution of one m × n matrix from its stored tensors, without the axis of groups."""
        return self.distribution(mean, **tensors, num_data=num_data, prior_precision=prior_precision)

    @abstractmethod
    def shapes(self, block: Block, tensors: BlockTensors) -> dict[str, tuple[int, ...]]:
        """Of what is stored of a block, by kind; where the structure leaves a size open, as the tensors have it."""

    @abstractmethod
    def joined(self, block: Block, tensors: BlockTensors, weight: float, statistics: Statistics) -> BlockTensors:
        """What is stored after more data: `weight` times the old means and the rest of the new ones.

        `statistics` are in the basis that `basis` gave.
        """

    def basis(self, tensors: BlockTensors) -> Statistics | None:
        """The frozen eigenvectors in which statistics of more data are needed, where there are any."""
        return None

    def facts(self, block: Block, tensors: BlockTensors) -> dict[str, Any]:
        """Plain facts of what is stored of a block, for `summary`."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Diagonal(Structure):
    """The exact diagonal: every weight independent of the others."""

    title = "diagonal"
    needs = Needs(kronecker=False, eigenvalues=False, diagonal=True)
    distribution = DiagonalNormal

    def keep(self, block: Block, statistics: Statistics) -> BlockTensors:
        return {"diagonal": present(statistics.diagonal)}

    def shapes(self, block: Block, tensors: BlockTensors) -> dict[str, tuple[int, ...]]:
        return {"diagonal": (block.groups, block.rows, block.columns)}

    def joined(self, block: Block, tensors: BlockTensors, weight: float, statistics: Statistics) -> BlockTensors:
        return {"diagonal": mixed(tensors["diagonal"], statistics.diagonal, weight)}


@dataclass(frozen=True, kw_only=True)
class KFAC(Structure):
    """The Kronecker product A ⊗ G per layer [Martens and Grosse 2015; Ritter et al. 2018; INF, Eq. 1]."""

    title = "KFAC"
    needs = Needs(kronecker=True, eigenvalues=False, diagonal=False)
    distribution = KroneckerNormal

    def keep(self, block: Block, statistics: Statistics) -> BlockTensors:
        return {
            "output_vectors": present(statistics.gradient_vectors),
            "output_eigenvalues": present(statistics.gradient_eigenvalues),
            "input_vectors": present(statistics.input_vectors),
            "input_eigenvalues": present(statistics.input_eigenvalues),
        }

    def shapes(self, block: Block, tensors: BlockTensors) -> dict[str, tuple[int, ...]]:
        groups, m, n = block.groups, block.rows, block.columns
        vectors = {"output_vectors": (groups, m, m), "input_vectors": (groups, n, n)}
        return {**vectors, "output_eigenvalues": (groups, m), "input_eigenvalues": (groups, n)}

    def joined(self, block: Block, tensors: BlockTensors, weight: float, statistics: Statistics) -> BlockTensors:
        # The factors are means over data and can be had again, U diag(s) Uᵀ: no basis needs to be frozen.
        updated: BlockTensors = {}
        for side, new in (("output", statistics.gradients), ("input", statistics.inputs)):
            vectors, values = tensors[f"{side}_vectors"], tensors[f"{side}_eigenvalues"]
            factors = mixed((vectors * values.unsqueeze(-2)) @ vectors.mT, new, weight)
            pairs = [eigh(factor, name=f"the {side} factor of {block.name!r}") for factor in factors]
            updated[f"{side}_vectors"] = torch.stack([basis for _, basis in pairs])
            updated[f"{side}_eigenvalues"] = torch.stack([spectrum for spectrum, _ in pairs])
        return updated


@dataclass(frozen=True, kw_only=True)
class EFB(Structure):
    """KFAC's eigenbasis with the exact second moments Λ along it [George et al. 2018; INF, Eq. 2]."""

    title = "EFB"
    needs = Needs(kronecker=True, eigenvalues=True, diagonal=False)
    distribution = EigenKroneckerNormal

    def keep(self, block: Block, statistics: Statistics) -> BlockTensors:
        return {
            "output_vectors": present(statistics.gradient_vectors),
            "input_vectors": present(statistics.input_vectors),
            "eigenvalues": present(statistics.eigenvalues),
        }

    def shapes(self, block: Block, tensors: BlockTensors) -> dict[str, tuple[int, ...]]:
        groups, m, n = block.groups, block.rows, block.columns
        vectors = {"output_vectors": (groups, m, m), "input_vectors": (groups, n, n)}
        return {**vectors, "eigenvalues": (groups, m, n)}

    def joined(self, block: Block, tensors: BlockTensors, weight: float, statistics: Statistics) -> BlockTensors:
        return {**tensors, "eigenvalues": mixed(tensors["eigenvalues"], statistics.eigenvalues, weight)}

    def basis(self, tensors: BlockTensors) -> Statistics:
        return frozen_basis(tensors)


@dataclass(frozen=True, kw_only=True)
class INF(Structure):
    """Sparse information form: a few Kronecker eigenvectors and the exact diagonal [Lee et al. 2020: INF, Eq. 4].

    Args:
        rank: K, how many of a layer's largest eigenvalues to keep: a whole number, or, as a float, a fraction
            of them; of each group where a layer has several. None keeps 100, or all of a smaller layer.
        max_rank: the largest L = a·g, the size of the rectangle that holds them; K is lowered until it fits.
        guard: "congruence" keeps the diagonal exact and the precision positive; "clamp" is what the authors'
            code does.
        selection: "algorithm1" of the paper, or "rectangle", which captures at least as much for the same L.
    """

    rank: int | float | None = None
    max_rank: int = 1000
    guard: Guard = "congruence"
    selection: SelectionMethod = "algorithm1"

    title = "INF"
    needs = Needs(kronecker=True, eigenvalues=True, diagonal=True)

    def __post_init__(self) -> None:
        if self.rank is not None:
            resolve_rank(self.rank, 1)
        require_count(max_rank=self.max_rank)
        if self.guard not in get_args(Guard):
            raise unknown_name("guard", self.guard, get_args(Guard))
        if self.selection not in get_args(SelectionMethod):
            raise unknown_name("selection", self.selection, get_args(SelectionMethod))

    def keep(self, block: Block, statistics: Statistics) -> BlockTensors:
        # U_g, U_a and Λ_1:L of the rectangle, and Φ, from which D follows   [INF, Algorithm 1, Eq. 3 and 4]
        eigenvalues, selected = present(statistics.eigenvalues), self._selected(statistics)
        rows, columns = selected.output_index, selected.input_index
        return {
            "output_vectors": present(statistics.gradient_vectors)[..., rows].contiguous(),
            "input_vectors": present(statistics.input_vectors)[..., columns].contiguous(),
            "eigenvalues": eigenvalues[:, rows][:, :, columns].contiguous(),
            "diagonal": present(statistics.diagonal),
        }

    def shapes(self, block: Block, tensors: BlockTensors) -> dict[str, tuple[int, ...]]:
        groups, m, n = block.groups, block.rows, block.columns
        _, rows, columns = tensors["eigenvalues"].shape
        return {
            "output_vectors": (groups, m, rows),
            "input_vectors": (groups, n, columns),
            "eigenvalues": (groups, rows, columns),
            "diagonal": (groups, m, n),
        }

    def normal(
        self, mean: Tensor, tensors: BlockTensors, *, num_data: float, prior_precision: float
    ) -> SparseInformationNormal:
        return SparseInformationNormal(
            mean,
            tensors["output_vectors"],
            tensors["input_vectors"],
            tensors["eigenvalues"],
            tensors["diagonal"],
            num_data=num_data,
            prior_precision=prior_precision,
            guard=self.guard,
        )

    def joined(self, block: Block, tensors: BlockTensors, weight: float, statistics: Statistics) -> BlockTensors:
        return {
            **tensors,
            "eigenvalues": mixed(tensors["eigenvalues"], statistics.eigenvalues, weight),
            "diagonal": mixed(tensors["diagonal"], statistics.diagonal, weight),
        }

    def basis(self, tensors: BlockTensors) -> Statistics:
        return frozen_basis(tensors)

    def _selected(self, statistics: Statistics) -> EigenvalueSelection:
        # Eigenvectors ascend in every group, so groups share one rectangle, chosen by their mean.
        mean = present(statistics.eigenvalues).mean(0)
        rank = DEFAULT_RANK if self.rank is None else self.rank
        return select(mean, rank, method=self.selection, max_size=self.max_rank)

    def chosen(self, block: Block, statistics: Statistics) -> dict[str, Any]:
        """K as asked for, and as far as `max_rank` allows."""
        selected = self._selected(statistics)
        return {"requested_rank": selected.requested_rank, "rank": selected.rank}

    def facts(self, block: Block, tensors: BlockTensors) -> dict[str, Any]:
        """L, the share of the trace inside the rectangle, and the share of negative corrections."""
        zero = torch.zeros_like(tensors["diagonal"][0])
        normals = [
            self.normal(zero, one_group(tensors, group), num_data=1.0, prior_precision=1.0)
            for group in range(block.groups)
        ]
        whole = tensors["diagonal"].sum()  # tr Φ is tr Λ over all eigenvectors, from the same gradients
        return {
            "size": tensors["eigenvalues"][0].numel(),
            "captured": float(tensors["eigenvalues"].sum() / whole) if whole > 0 else 1.0,
            "negative": sum(normal.negative_share for normal in normals) / len(normals),
        }


def present(tensor: Tensor | None) -> Tensor:
    """A statistic that was asked for."""
    assert tensor is not None
    return tensor


def mixed(old: Tensor, new: Tensor | None, weight: float) -> Tensor:
    """Means over old and new rows together: the old ones have `weight` of them."""
    return torch.lerp(present(new).to(old), old, weight)


def frozen_basis(tensors: BlockTensors) -> Statistics:
    """The stored eigenvectors as a basis for the statistics of more data."""
    return Statistics(input_vectors=tensors["input_vectors"], gradient_vectors=tensors["output_vectors"])


def one_group(tensors: Mapping[str, Tensor], group: int) -> BlockTensors:
    """The tensors of one group."""
    return {kind: tensor[group] for kind, tensor in tensors.items()}
