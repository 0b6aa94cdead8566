"""J P⁻¹ Jᵀ of one weight matrix: what its distribution adds to variances and covariances of the network's outputs.

The Jacobian of a row's output c is J_c = Σ_t g_ct a_tᵀ over the positions t that its layer sees. With one position
it stays factored; with several it is formed for as many outputs, or rows of the weight, as fit into `CHUNK` numbers.
Of a layer whose outputs are the network's, g_c is a unit vector and takes no product at all.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...distributions import EigenKroneckerNormal, KroneckerNormal, SparseInformationNormal, StructuredNormal
from ...distributions.linalg import sandwich

#: Numbers of the largest temporary array: beyond, it leaves the cache.
CHUNK = 1 << 20


class Share(NamedTuple):
    """What some weights add to the covariance of outputs.

    Attributes:
        value: variances [B, C], or covariances between all outputs of a row [B, C, C].
        rounding: what rounding may have done to the variances, [B, C]: a difference of large numbers has some, a sum
            of squares has none.
    """

    value: Tensor | float = 0.0
    rounding: Tensor | float = 0.0

    def plus(self, other: "Share") -> "Share":
        """The share of both."""
        return Share(self.value + other.value, self.rounding + other.rounding)


def added(totals: Sequence[Share], shares: Sequence[Share]) -> list[Share]:
    """Sums of the shares under each of some posteriors."""
    return [total.plus(share) for total, share in zip(totals, shares, strict=True)]


def joined(shares: Sequence[Share], axis: int) -> Share:
    """Shares of some rows (axis 0) or outputs (axis 1), one after the other."""
    if len(shares) == 1:
        return shares[0]
    columns = (torch.cat(column, axis) if isinstance(column[0], Tensor) else 0.0 for column in zip(*shares))  # pyright: ignore
    return Share(*columns)


def in_basis(normal: StructuredNormal, inputs: Tensor) -> Tensor:
    """Inputs [..., n] along the eigenvectors, where P⁻¹ = (U_G ⊗ U_A) diag(1/p) (U_G ⊗ U_A)ᵀ has some."""
    return inputs @ normal.input_vectors if isinstance(normal, _EIGENBASIS) else inputs


def output_shares(
    normals: Sequence[StructuredNormal],
    inputs: Tensor,
    gradients: Sequence[Tensor],
    *,
    pairs: bool,
    precise: bool = False,
) -> list[Share]:
    """J P⁻¹ Jᵀ of every row, or its diagonal, under each of some distributions.

    Args:
        normals: of one m × n matrix: the same information at several scales or under several priors.
        inputs: a, [B, T, n], `in_basis`.
        gradients: g, [B, c, m, T] of some outputs each, C together.
        pairs: covariances between all outputs of a row, not variances alone.
        precise: sums of squares in float64 in place of differences.
    """
    basis = normals[0].output_vectors if isinstance(normals[0], _EIGENBASIS) else None
    kernels = [_kernel(normal, precise) for normal in normals]
    factored = inputs.shape[1] == 1 and not isinstance(kernels[0], _SquaresKernel)
    count, m = sum(part.shape[1] for part in gradients), gradients[0].shape[2]
    size = m if factored else m * inputs.shape[2]
    together = count if pairs or factored else min(count, max(1, CHUNK // size))
    by_rows = []
    for rows in slices(len(inputs), CHUNK // (together * size)):
        a, g = inputs[rows], gradients[0][rows]
        g = g if len(gradients) == 1 else torch.cat([part[rows] for part in gradients], 1)
        if factored:
            g = g[..., 0] if basis is None else g[..., 0] @ basis
            by_rows.append([kernel.factored(a[:, 0], g, pairs) for kernel in kernels])
            continue
        by_outputs = []
        for some in g.split(together, 1):
            jacobians = _Jacobians(a, some, basis)
            by_outputs.append([kernel.formed(jacobians, pairs) for kernel in kernels])
        by_rows.append([joined(shares, 1) for shares in zip(*by_outputs, strict=True)])
    return [joined(shares, 0) for shares in zip(*by_rows, strict=True)]


def unit_shares(normals: Sequence[StructuredNormal], inputs: Tensor) -> list[Share]:
    """Variances [N, m] of the outputs W a of a layer itself, whose gradients are unit vectors.

    Args:
        normals: of W, as in `output_shares`.
        inputs: a, [N, n], `in_basis`.
    """
    return [_kernel(normal, False).units(inputs) for normal in normals]


def joint_covariance(normal: StructuredNormal, inputs: Tensor, gradients: Tensor) -> Tensor:
    """J P⁻¹ Jᵀ between the outputs of all rows, [B·C, B·C], differentiable in inputs and gradients.

    Args:
        normal: of one m × n matrix.
        inputs: a, [B, T, n], `in_basis`.
        gradients: g, [B, C, m, T].
    """
    basis = normal.output_vectors if isinstance(normal, _EIGENBASIS) else None
    kernel = _kernel(normal, True)
    if inputs.shape[1] == 1 and not isinstance(kernel, _SquaresKernel):
        g = gradients[..., 0] if basis is None else gradients[..., 0] @ basis
        return kernel.between_rows(inputs[:, 0], g)
    value = kernel.formed(_Jacobians(inputs, gradients, basis, joint=True), True).value
    assert isinstance(value, Tensor)
    return value[0]


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

    def factored(self, inputs: Tensor, gradients: Tensor, pairs: bool) -> Share:
        """For J_c = g_c aᵀ with a [b, n] and g [b, C, m]."""
        # Σ_ij v_ij (g_ci a_j) (g_c'i a_j) = Σ_i g_ci g_c'i Σ_j v_ij a_j²
        weight = inputs.square() @ self.variance().mT  # [b, m]
        if not pairs:
            return Share((gradients.square() @ weight.unsqueeze(2)).squeeze(2))
        return Share((gradients * weight.unsqueeze(1)) @ gradients.mT)

    def units(self, inputs: Tensor) -> Share:
        """For J_c = e_c aᵀ: variances [N, m] of the layer's outputs at inputs [N, n]."""
        weight = inputs.square() @ self.variance().mT
        if not isinstance(self.normal, _EIGENBASIS):
            return Share(weight)
        vectors = self.normal.output_vectors  # U_Gᵀ e_c is row c of U_G
        parts = slices(len(vectors), CHUNK // len(vectors))
        return Share(torch.cat([weight @ vectors[some].square().mT for some in parts], 1))

    def formed(self, jacobians: _Jacobians, pairs: bool) -> Share:
        """For Jacobians that are written out."""
        variance = self.variance()

        def term(rows: slice) -> Tensor:
            jacobian = jacobians[rows].flatten(2)
            if not pairs:
                return jacobian.square() @ variance[rows].flatten()
            return contracted(variance[rows].flatten() * jacobian, jacobian, pairs)

        return Share(sum(_lean(term, rows) for rows in jacobians.slices))

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

    All is computed in the type of R. A difference: what rounding leaves of it is for the caller to judge.
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

    def factored(self, inputs: Tensor, gradients: Tensor, pairs: bool) -> Share:
        a, g = inputs.to(self.factor), gradients.to(self.factor)
        first = super().factored(a, g, pairs).value
        count, (m, height), width = g.shape[1], self.left.shape, self.right.shape[1]
        left, together = self.left.mT.contiguous(), count if pairs else max(1, CHUNK // (height * m))
        taken = []
        for rows in slices(len(a), CHUNK // max(width * len(self.right), min(count, together) * height * m)):
            shared, by_outputs = self._shared(a[rows]), []
            for some in g[rows].split(together, 1):
                # U_gᵀ (w ∘ g_c aᵀ) U_a = (U_g ∘ g_c)ᵀ Q
                scaled = (some.unsqueeze(2) * left).flatten(1, 2)  # [b, C·g, m]
                projected = (scaled @ shared.mT).view(-1, some.shape[1], height, width)
                by_outputs.append(self._taken(projected, pairs))
            taken.append(torch.cat(by_outputs, 1))
        return self._difference(first, torch.cat(taken), pairs, inputs)

    def units(self, inputs: Tensor) -> Share:
        a = inputs.to(self.factor)
        first, taken, size = a.square() @ self.inverse.mT, [], self.scale.numel()
        for rows in slices(len(a), CHUNK // max(self.right.numel(), size)):
            shared, by_outputs = self._shared(a[rows]), []  # [b, a, m]
            for some in slices(len(self.left), CHUNK // (size * len(shared))):
                # U_gᵀ (w ∘ e_c aᵀ) U_a is the product of row c of U_g and column c of Q
                column = shared[:, :, some].mT.unsqueeze(2)
                by_outputs.append(self._taken(self.left[some].unsqueeze(2) * column, False))
            taken.append(torch.cat(by_outputs, 1))
        return self._difference(first, torch.cat(taken), False, inputs)

    def formed(self, jacobians: _Jacobians, pairs: bool) -> Share:
        first = projected = torch.zeros(()).to(self.factor)
        for i in jacobians.slices:
            j = jacobians[i].to(self.factor)
            first = first + contracted((self.inverse[i] * j).flatten(2), j.flatten(2), pairs)
            projected = projected + sandwich(self.left[i].mT, self.weight[i] * j, self.right)
        return self._difference(first, self._taken(projected, pairs), pairs, jacobians.inputs)

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

    def _difference(self, first: Any, taken: Tensor, pairs: bool, like: Tensor) -> Share:
        rounding = torch.finfo(first.dtype).eps * (first.diagonal(dim1=1, dim2=2) if pairs else first)
        return Share((first - taken).to(like), rounding.to(like))


class _SquaresKernel(_Kernel):
    """The same in float64 as a sum of squares, which rounding cannot make negative, however small it is.

    With x = d^-½ Jᵀ and y = (R Rᵀ)⁻¹ V_sᵀ x, J P⁻¹ Jᵀ = (x − V_s y)ᵀ (x − V_s y) + yᵀ y: the least squares of a
    regression of x on V_s, so that an error of y counts by its square. It takes Jacobians that are written out.
    """

    normal: SparseInformationNormal

    def formed(self, jacobians: _Jacobians, pairs: bool) -> Share:
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
        return Share((total + contracted(y.flatten(2), y.flatten(2), pairs)).to(jacobians.inputs))


_EIGENBASIS = (KroneckerNormal, EigenKroneckerNormal)


def _kernel(normal: StructuredNormal, precise: bool) -> _Kernel:
    if isinstance(normal, SparseInformationNormal):
        return _SquaresKernel(normal) if precise else _LowRankKernel(normal)
    return _Kernel(normal)
