"""J P⁻¹ Jᵀ of one weight matrix: what its distribution adds to variances and covariances of the network's outputs.

The Jacobian of a row's output c is J_c = Σ_t g_ct a_tᵀ over the positions t that its layer sees. With one position
it stays factored; with several it is formed for as many outputs, or rows of the weight, as fit into `CHUNK` numbers.
Of a layer whose outputs are the network's, g_c is a unit vector and takes no product at all.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...distributions import EigenKroneckerNormal, KroneckerNormal, SparseInformationNormal, StructuredNormal
from ...distributions.linalg import sandwich

#: Numbers of the largest temporary array: beyond, it leaves the cache.
CHUNK = 1 << 20
#: A difference that leaves less than this many roundings of its first term is to be taken again.
CANCELLED = 1e4


def in_basis(normal: StructuredNormal, inputs: Tensor) -> Tensor:
    """Inputs [..., n] along the eigenvectors, where P⁻¹ = (U_G ⊗ U_A) diag(1/p) (U_G ⊗ U_A)ᵀ has some."""
    return inputs @ normal.input_vectors if isinstance(normal, _EIGENBASIS) else inputs


def output_covariance(
    normals: Sequence[StructuredNormal],
    inputs: Tensor,
    gradients: Sequence[Tensor],
    *,
    pairs: bool,
    precise: bool,
) -> Tensor:
    """Variances [P, B, C], the diagonals of J P⁻¹ Jᵀ, or covariances between all outputs of a row [P, B, C, C].

    Args:
        normals: of one m × n matrix under P posteriors: the same information at other scales or under other priors.
        inputs: a, [B, T, n], `in_basis`.
        gradients: g, [B, c, m, T] of some outputs each, C together.
        pairs: covariances, not variances alone.
        precise: sums of squares in float64 in place of differences, which are NaN where too little is left of them.
    """
    basis, kernels = _basis(normals[0]), [_kernel(normal, precise) for normal in normals]
    factored = inputs.shape[1] == 1 and not isinstance(kernels[0], _SquaresKernel)
    count, m = sum(part.shape[1] for part in gradients), gradients[0].shape[2]
    size = m if factored else m * inputs.shape[2]
    together = count if pairs or factored else min(count, max(1, CHUNK // size))
    by_rows = []
    for rows in slices(len(inputs), CHUNK // (together * size)):
        a, by_outputs = inputs[rows], []
        for g in torch.cat([part[rows] for part in gradients], 1).split(together, 1):
            if factored:
                g = g[..., 0] if basis is None else g[..., 0] @ basis
                values = [kernel.factored(a[:, 0], g, pairs) for kernel in kernels]
            else:
                jacobians = _Jacobians(a, g, basis)
                values = [kernel.formed(jacobians, pairs) for kernel in kernels]
            by_outputs.append(torch.stack(values))
        by_rows.append(torch.cat(by_outputs, 2))
    return torch.cat(by_rows, 1)


def unit_variance(normals: Sequence[StructuredNormal], inputs: Tensor) -> Tensor:
    """Variances [P, N, m] of a layer's answers W a themselves, whose gradients are unit vectors.

    Args:
        normals: of W, as in `output_covariance`.
        inputs: a, [N, n], `in_basis`.
    """
    return torch.stack([_kernel(normal, False).units(inputs) for normal in normals])


def joint_covariance(normal: StructuredNormal, inputs: Tensor, gradients: Tensor) -> Tensor:
    """J P⁻¹ Jᵀ between the outputs of all rows, [B·C, B·C], differentiable in inputs and gradients.

    Args:
        normal: of one m × n matrix.
        inputs: a, [B, T, n], `in_basis`.
        gradients: g, [B, C, m, T].
    """
    basis, kernel = _basis(normal), _kernel(normal, True)
    if inputs.shape[1] == 1 and not isinstance(kernel, _SquaresKernel):
        g = gradients[..., 0] if basis is None else gradients[..., 0] @ basis
        return kernel.between_rows(inputs[:, 0], g)
    return kernel.formed(_Jacobians(inputs, gradients, basis, joint=True), True)[0]


def contracted(left: Tensor, right: Tensor, pairs: bool) -> Tensor:
    """Products of vectors [..., C, k]: of all pairs [..., C, C], or of each with its like [..., C]."""
    return left @ right.mT if pairs else (left * right).sum(-1)


def slices(count: int, step: int) -> Iterator[slice]:
    """Whole numbers below `count` in steps of at least one."""
    step = max(1, step)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _lean(function: Callable[..., Any], *arguments: Any) -> Any:
    """A function's value; what it makes on the way is made again in a backward pass, not stored for it."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


class _Jacobians:
    """Jacobians [b, C, m, n] of some rows, formed in slices of the weight's rows that fit into `CHUNK`.

    Args:
        inputs: a, [b, T, n].
        gradients: g, [b, C, m, T].
        basis: U_G, along which the weight's rows are taken.
        joint: all outputs of all rows as those of one row, [1, b·C, m, n].
    """

    def __init__(
        self, inputs: Tensor, gradients: Tensor, basis: Tensor | None, *, joint: bool = False
    ) -> None:
        (rows, count, m, positions), n = gradients.shape, inputs.shape[2]
        size = rows * count * m * n
        height = m if size <= CHUNK else max(1, CHUNK * m // size)
        # U_Gᵀ (g a) or (U_Gᵀ g) a: whichever side is shorter
        late = basis is not None and positions > n and height == m
        self.basis = basis if late else None
        self.inputs, self.joint = inputs, joint
        self.gradients = gradients if basis is None or late else basis.mT @ gradients
        self.slices = list(slices(m, height))
        self._whole: Tensor | None = None

    def __getitem__(self, rows: slice) -> Tensor:
        """Those of some rows of the weight."""
        if self._whole is not None:
            return self._whole
        jacobians = torch.einsum("bcit,btn->bcin", self.gradients[:, :, rows], self.inputs)
        if self.basis is not None:
            jacobians = self.basis.mT @ jacobians
        if self.joint:
            jacobians = jacobians.flatten(0, 1).unsqueeze(0)
        if len(self.slices) == 1 and not torch.is_grad_enabled():  # a graph forms it again
            self._whole = jacobians
        return jacobians


class _Kernel:
    """P⁻¹ in a basis where it is diagonal."""

    def __init__(self, normal: StructuredNormal) -> None:
        self.normal = normal

    def variance(self) -> Tensor:
        """Its diagonal, [m, n]."""
        if isinstance(self.normal, _EIGENBASIS):
            return 1 / self.normal.precision_eigenvalues
        return self.normal.variance

    def factored(self, inputs: Tensor, gradients: Tensor, pairs: bool) -> Tensor:
        """For J_c = g_c aᵀ with a [b, n] and g [b, C, m]."""
        # Σ_ij v_ij (g_ci a_j) (g_c'i a_j) = Σ_i g_ci g_c'i Σ_j v_ij a_j²
        weight = inputs.square() @ self.variance().mT  # [b, m]
        if not pairs:
            return (gradients.square() @ weight.unsqueeze(2)).squeeze(2)
        return (gradients * weight.unsqueeze(1)) @ gradients.mT

    def units(self, inputs: Tensor) -> Tensor:
        """For J_c = e_c aᵀ: variances [N, m] of the layer's outputs at inputs [N, n]."""
        weight = inputs.square() @ self.variance().mT
        if not isinstance(self.normal, _EIGENBASIS):
            return weight
        vectors = self.normal.output_vectors  # U_Gᵀ e_c is row c of U_G
        parts = slices(len(vectors), CHUNK // len(vectors))
        return torch.cat([weight @ vectors[some].square().mT for some in parts], 1)

    def formed(self, jacobians: _Jacobians, pairs: bool) -> Tensor:
        """For Jacobians that are written out."""
        variance = self.variance()

        def term(rows: slice) -> Tensor:
            jacobian = jacobians[rows].flatten(2)
            if not pairs:
                return jacobian.square() @ variance[rows].flatten()
            return contracted(variance[rows].flatten() * jacobian, jacobian, pairs)

        total: Any = sum(_lean(term, rows) for rows in jacobians.slices)
        return total

    def between_rows(self, inputs: Tensor, gradients: Tensor) -> Tensor:
        """For J_bc = g_bc a_bᵀ, between all rows, [b·C, b·C]."""
        (rows, count, m), variance = gradients.shape, self.variance()

        def term(some: slice) -> Tensor:
            # Σ_i g_bci g_b'c'i Σ_j v_ij a_bj a_b'j
            weight = ((inputs * variance[some].unsqueeze(1)) @ inputs.mT).permute(1, 2, 0)  # [b, b', i]
            g = gradients[..., some]
            return (weight.unsqueeze(2) * g.unsqueeze(1)) @ g.mT  # [b, b', C, C']

        step = CHUNK // max(rows * inputs.shape[1], rows**2 * count)
        total: Any = sum(_lean(term, some) for some in slices(m, step))
        return total.transpose(1, 2).reshape(rows * count, rows * count)


class _LowRankKernel(_Kernel):
    """P⁻¹ = diag(1/d) − d^-½ V_s (R Rᵀ)⁻¹ V_sᵀ d^-½, so J P⁻¹ Jᵀ = J diag(1/d) Jᵀ − Yᵀ Y, Y = R⁻¹ V_sᵀ d^-½ Jᵀ.

    All is computed in the type of R.
    """

    normal: SparseInformationNormal

    def __init__(self, normal: SparseInformationNormal) -> None:
        super().__init__(normal)
        self.factor = normal.cholesky
        # Not those that the distribution would store: a grid has many distributions.
        parts = normal.parts_in(self.factor.dtype, self.factor.device)
        self.left, self.right, whitening, self.scale, root = parts
        self.weight = whitening * root  # s/d: V_sᵀ d^-½ J = l ∘ (U_gᵀ (s/d ∘ J) U_a)
        self.inverse = root.square()

    def variance(self) -> Tensor:
        return self.inverse

    def factored(self, inputs: Tensor, gradients: Tensor, pairs: bool) -> Tensor:
        a, g = inputs.to(self.factor), gradients.to(self.factor)
        left, size = self.left.mT.contiguous(), self.left.numel()
        together = g.shape[1] if pairs else min(g.shape[1], max(1, CHUNK // size))

        def taken(rows: slice) -> Tensor:
            shared, by_outputs = self._shared(a[rows]), []
            for some in g[rows].split(together, 1):
                # U_gᵀ (w ∘ g_c aᵀ) U_a = (U_g ∘ g_c)ᵀ Q
                scaled = (some.unsqueeze(2) * left).flatten(1, 2)  # [b, C·g, m]
                projected = (scaled @ shared.mT).view(*some.shape[:2], *self.scale.shape)
                by_outputs.append(self._taken(projected, pairs))
            return torch.cat(by_outputs, 1)

        step = CHUNK // max(self.right.numel(), together * size)
        return self._difference(super().factored(a, g, pairs), step, taken, pairs, inputs)

    def units(self, inputs: Tensor) -> Tensor:
        a, size = inputs.to(self.factor), self.scale.numel()

        def taken(rows: slice) -> Tensor:
            shared = self._shared(a[rows]).mT.unsqueeze(2)  # [b, m, 1, a]
            # U_gᵀ (w ∘ e_c aᵀ) U_a is the product of row c of U_g and row c of Q
            parts = slices(len(self.left), CHUNK // (size * len(shared)))
            return torch.cat(
                [self._taken(self.left[some].unsqueeze(2) * shared[:, some], False) for some in parts], 1
            )

        step = CHUNK // max(self.right.numel(), size)
        return self._difference(a.square() @ self.inverse.mT, step, taken, False, inputs)

    def formed(self, jacobians: _Jacobians, pairs: bool) -> Tensor:
        first = projected = self.factor.new_zeros(())
        for i in jacobians.slices:
            j = jacobians[i].to(self.factor)
            first = first + contracted((self.inverse[i] * j).flatten(2), j.flatten(2), pairs)
            projected = projected + sandwich(self.left[i].mT, self.weight[i] * j, self.right)
        taken = self._taken(projected, pairs)
        return self._difference(first, len(taken), taken.__getitem__, pairs, jacobians.inputs)

    def _shared(self, inputs: Tensor) -> Tensor:
        """Qᵀ = (w ∘ a U_a)ᵀ, which all outputs of a row share, [b, a, m]."""
        products = (inputs.unsqueeze(1) * self.right.mT.contiguous()).flatten(0, 1) @ self.weight.mT
        return products.view(len(inputs), -1, len(self.weight))

    def _taken(self, projected: Tensor, pairs: bool) -> Tensor:
        """Yᵀ Y from U_gᵀ (s/d ∘ J) U_a of some rows, [b, C, g, a]."""
        columns = (self.scale * projected).flatten(2)
        # (R⁻¹ X)ᵀ = Xᵀ R⁻ᵀ: from the right, rows need not be turned into columns
        solved = torch.linalg.solve_triangular(
            self.factor.mT, columns.flatten(0, 1), upper=True, left=False
        ).view(columns.shape)
        return contracted(solved, solved, pairs)

    def _difference(
        self, first: Any, step: int, taken: Callable[[slice], Tensor], pairs: bool, like: Tensor
    ) -> Tensor:
        """NaN where less is left of a variance than `CANCELLED` roundings of its first term."""
        value = first - torch.cat([taken(rows) for rows in slices(len(first), step)])
        left, whole = (t.diagonal(dim1=1, dim2=2) if pairs else t for t in (value, first))
        left.masked_fill_(left < CANCELLED * torch.finfo(first.dtype).eps * whole, math.nan)
        return value.to(like)


class _SquaresKernel(_Kernel):
    """The same in float64 as a sum of squares, which rounding cannot make negative, however small it is.

    With x = d^-½ Jᵀ and y = (R Rᵀ)⁻¹ V_sᵀ x, J P⁻¹ Jᵀ = (x − V_s y)ᵀ (x − V_s y) + yᵀ y: the least squares of a
    regression of x on V_s, so that an error of y counts by its square. It takes Jacobians that are written out.
    """

    normal: SparseInformationNormal

    def formed(self, jacobians: _Jacobians, pairs: bool) -> Tensor:
        factor = self.normal.precise_cholesky
        left, right, whitening, scale, root = self.normal.parts_in(factor.dtype, factor.device)

        def gathered(i: slice) -> Tensor:
            return sandwich(left[i].mT, whitening[i] * root[i] * jacobians[i].to(factor), right)

        def squares(i: slice) -> Tensor:
            explained = whitening[i] * sandwich(left[i], scale * y, right.mT)
            residual = (root[i] * jacobians[i].to(factor) - explained).flatten(2)
            return contracted(residual, residual, pairs)

        projected: Any = scale * sum(_lean(gathered, i) for i in jacobians.slices)
        columns = projected.flatten(2).flatten(0, 1).mT
        y = torch.cholesky_solve(columns, factor).mT.reshape(projected.shape)
        total: Any = sum(_lean(squares, i) for i in jacobians.slices)
        return (total + contracted(y.flatten(2), y.flatten(2), pairs)).to(jacobians.inputs)


_EIGENBASIS = (KroneckerNormal, EigenKroneckerNormal)


def _basis(normal: StructuredNormal) -> Tensor | None:
    """U_G, where there is one."""
    return normal.output_vectors if isinstance(normal, _EIGENBASIS) else None


def _kernel(normal: StructuredNormal, precise: bool) -> _Kernel:
    if isinstance(normal, SparseInformationNormal):
        return _SquaresKernel(normal) if precise else _LowRankKernel(normal)
    return _Kernel(normal)
