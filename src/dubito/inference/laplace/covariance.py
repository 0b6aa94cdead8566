"""J P⁻¹ Jᵀ of one weight matrix: what its distribution adds to variances and covariances of the network's outputs.

The Jacobian of a row's output c is J_c = Σ_t g_ct a_tᵀ over the positions t that its layer sees. With one position
it stays factored; with several it is formed for as many outputs, or rows of the weight, as fit into `CHUNK` numbers.
Of a layer whose outputs are the network's, g_c is a unit vector and takes no product at all.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...distributions import EigenKroneckerNormal, KroneckerNormal, SparseInformationNormal, StructuredNormal
from ...distributions.linalg import sandwich

#: Numbers of the largest temporary array: beyond, it leaves the cache.
CHUNK = 1 << 20
#: A difference that leaves less than this many roundings of its first term is to be taken again.
CANCELLED = 1e4


class Contraction(NamedTuple):
    """What is wanted of a row's J P⁻¹ Jᵀ.

    Attributes:
        pairs: covariances between all outputs, not variances alone.
        classes: outputs come in sets of so many logits, and after their variances stands one more: that of the centred
            logits, the mean over the classes. 0 for outputs that are no classes.
    """

    pairs: bool = False
    classes: int = 0

    def together(self, count: int, size: int) -> int:
        """How many of `count` outputs of `size` numbers are treated at a time: whole sets that fit into `CHUNK`."""
        classes = self.classes or 1
        return count if self.pairs else min(count, max(1, CHUNK // (size * classes)) * classes)


def in_basis(normal: StructuredNormal, inputs: Tensor) -> Tensor:
    """Inputs [..., n] along the eigenvectors, where P⁻¹ = (U_G ⊗ U_A) diag(1/p) (U_G ⊗ U_A)ᵀ has some."""
    return inputs @ normal.input_vectors if isinstance(normal, _EIGENBASIS) else inputs


def output_covariance(
    normals: Sequence[StructuredNormal],
    inputs: Tensor,
    gradients: Sequence[Tensor],
    contraction: Contraction,
    *,
    precise: bool = False,
) -> Tensor:
    """Variances [P, B, C], the diagonals of J P⁻¹ Jᵀ, or what else is asked for, covariances as [P, B, C, C].

    Args:
        normals: of one m × n matrix under P posteriors: the same information at other scales or under other priors.
        inputs: a, [B, T, n], `in_basis`.
        gradients: g, [B, c, m, T] of some outputs each, C together.
        contraction: what is asked for.
        precise: sums of squares in float64 in place of differences, which are NaN where too little is left of them.
    """
    basis, kernels = _basis(normals[0]), [_kernel(normal, precise) for normal in normals]
    factored = inputs.shape[1] == 1 and not isinstance(kernels[0], _SquaresKernel)
    count, m = sum(part.shape[1] for part in gradients), gradients[0].shape[2]
    size = m if factored else m * inputs.shape[2]
    together = count if factored else contraction.together(count, size)
    by_rows = []
    for rows in slices(len(inputs), CHUNK // (together * size)):
        a, by_outputs = inputs[rows], []
        for g in torch.cat([part[rows] for part in gradients], 1).split(together, 1):
            if factored:
                g = g[..., 0] if basis is None else g[..., 0] @ basis
                values = [kernel.factored(a[:, 0], g, contraction) for kernel in kernels]
            else:
                jacobians = _Jacobians(a, g, basis)
                values = [kernel.formed(jacobians, contraction) for kernel in kernels]
            by_outputs.append(torch.stack(values))
        by_rows.append(torch.cat(by_outputs, 2))
    return torch.cat(by_rows, 1)


def unit_variance(normals: Sequence[StructuredNormal], inputs: Tensor, centred: bool = False) -> Tensor:
    """Variances [P, N, m] of a layer's answers W a themselves, whose gradients are unit vectors.

    Args:
        normals: of W, as in `output_covariance`.
        inputs: a, [N, n], `in_basis`.
        centred: whether the mean variance of the centred answers stands after them, [P, N, m + 1].
    """
    return torch.stack([_kernel(normal, False).units(inputs, centred) for normal in normals])


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
    return kernel.formed(_Jacobians(inputs, gradients, basis, joint=True), Contraction(pairs=True))[0]


def contracted(vectors: Tensor, weight: Tensor | None, contraction: Contraction) -> Tensor:
    """Products x_cᵀ diag(w) x_c' of vectors x [b, C, k] and a weight w, [k] or [b, k]; None is a weight of ones."""
    if contraction.pairs:
        return (vectors if weight is None else vectors * weight.unsqueeze(-2)) @ vectors.mT

    def summed(squares: Tensor) -> Tensor:
        if weight is None or weight.ndim == 1:
            return squares.sum(-1) if weight is None else squares @ weight
        return (weight.unsqueeze(1) @ squares.mT).squeeze(1)  # from the left it takes a quarter of the time

    variances = summed(vectors.square())
    if not contraction.classes:
        return variances
    # J is linear: the mean over classes of Var(f_c − f̄) is that of (x_c − x̄)ᵀ diag(w) (x_c − x̄); nothing cancels.
    sets = vectors.unflatten(1, (-1, contraction.classes))
    centred = summed((sets - sets.mean(2, keepdim=True)).square_().mean(2))
    return torch.cat([variances.unflatten(1, (-1, contraction.classes)), centred.unsqueeze(2)], 2).flatten(1)


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

    def __init__(self, inputs: Tensor, gradients: Tensor, basis: Tensor | None, *, joint: bool = False) -> None:
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

    def factored(self, inputs: Tensor, gradients: Tensor, contraction: Contraction) -> Tensor:
        """For J_c = g_c aᵀ with a [b, n] and g [b, C, m]."""
        # Σ_ij v_ij (g_ci a_j) (g_c'i a_j) = Σ_i g_ci g_c'i Σ_j v_ij a_j²
        return contracted(gradients, inputs.square() @ self.variance().mT, contraction)

    def units(self, inputs: Tensor, centred: bool) -> Tensor:
        """For J_c = e_c aᵀ: variances [N, m] of the layer's outputs at inputs [N, n], and the mean of centred ones."""
        weight = inputs.square() @ self.variance().mT
        if not isinstance(self.normal, _EIGENBASIS):
            return _with_centred(weight) if centred else weight
        vectors = self.normal.output_vectors  # U_Gᵀ e_c is row c of U_G
        parts = slices(len(vectors), CHUNK // len(vectors))
        variances = [weight @ vectors[some].square().mT for some in parts]
        if centred:
            variances.append(weight @ (vectors - vectors.mean(0)).square().mean(0).unsqueeze(1))
        return torch.cat(variances, 1)

    def formed(self, jacobians: _Jacobians, contraction: Contraction) -> Tensor:
        """For Jacobians that are written out."""
        variance = self.variance()

        def term(rows: slice) -> Tensor:
            return contracted(jacobians[rows].flatten(2), variance[rows].flatten(), contraction)

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

    def factored(self, inputs: Tensor, gradients: Tensor, contraction: Contraction) -> Tensor:
        a, g = inputs.to(self.factor), gradients.to(self.factor)
        left, size = self.left.mT.contiguous(), self.left.numel()
        together = contraction.together(g.shape[1], size)

        def taken(rows: slice) -> Tensor:
            shared, by_outputs = self._shared(a[rows]), []
            for some in g[rows].split(together, 1):
                # U_gᵀ (w ∘ g_c aᵀ) U_a = (U_g ∘ g_c)ᵀ Q
                scaled = (some.unsqueeze(2) * left).flatten(1, 2)  # [b, C·g, m]
                projected = (scaled @ shared.mT).view(*some.shape[:2], *self.scale.shape)
                by_outputs.append(self._taken(projected, contraction))
            return torch.cat(by_outputs, 1)

        step = CHUNK // max(self.right.numel(), together * size)
        return self._difference(super().factored(a, g, contraction), step, taken, contraction, inputs)

    def units(self, inputs: Tensor, centred: bool) -> Tensor:
        a, m = inputs.to(self.factor), len(self.left)
        contraction = Contraction(classes=m if centred else 0)
        left, size = self.left.unsqueeze(2), self.scale.numel() * (m if centred else 1)

        def taken(rows: slice) -> Tensor:
            shared = self._shared(a[rows]).mT.unsqueeze(2)  # [b, m, 1, a]
            # U_gᵀ (w ∘ e_c aᵀ) U_a is the product of row c of U_g and row c of Q
            parts = slices(m, m if centred else CHUNK // (size * len(shared)))
            return torch.cat([self._taken(left[i] * shared[:, i], contraction) for i in parts], 1)

        step, first = CHUNK // max(self.right.numel(), size), a.square() @ self.inverse.mT
        return self._difference(_with_centred(first) if centred else first, step, taken, contraction, inputs)

    def formed(self, jacobians: _Jacobians, contraction: Contraction) -> Tensor:
        first = projected = self.factor.new_zeros(())
        for i in jacobians.slices:
            j = jacobians[i].to(self.factor)
            first = first + contracted(j.flatten(2), self.inverse[i].flatten(), contraction)
            projected = projected + sandwich(self.left[i].mT, self.weight[i] * j, self.right)
        taken = self._taken(projected, contraction)
        return self._difference(first, len(taken), taken.__getitem__, contraction, jacobians.inputs)

    def _shared(self, inputs: Tensor) -> Tensor:
        """Qᵀ = (w ∘ a U_a)ᵀ, which all outputs of a row share, [b, a, m]."""
        products = (inputs.unsqueeze(1) * self.right.mT.contiguous()).flatten(0, 1) @ self.weight.mT
        return products.view(len(inputs), -1, len(self.weight))

    def _taken(self, projected: Tensor, contraction: Contraction) -> Tensor:
        """Yᵀ Y from U_gᵀ (s/d ∘ J) U_a of some rows, [b, C, g, a]."""
        columns = (self.scale * projected).flatten(2)
        # (R⁻¹ X)ᵀ = Xᵀ R⁻ᵀ: from the right, rows need not be turned into columns
        solved = torch.linalg.solve_triangular(self.factor.mT, columns.flatten(0, 1), upper=True, left=False).view(
            columns.shape
        )
        return contracted(solved, None, contraction)

    def _difference(
        self, first: Any, step: int, taken: Callable[[slice], Tensor], contraction: Contraction, like: Tensor
    ) -> Tensor:
        """NaN where less is left of a variance than `CANCELLED` roundings of its first term."""
        value = first - torch.cat([taken(rows) for rows in slices(len(first), step)])
        left, whole = (t.diagonal(dim1=1, dim2=2) if contraction.pairs else t for t in (value, first))
        left.masked_fill_(left < CANCELLED * torch.finfo(first.dtype).eps * whole, math.nan)
        return value.to(like)


class _SquaresKernel(_Kernel):
    """The same in float64 as a sum of squares, which rounding cannot make negative, however small it is.

    With x = d^-½ Jᵀ and y = (R Rᵀ)⁻¹ V_sᵀ x, J P⁻¹ Jᵀ = (x − V_s y)ᵀ (x − V_s y) + yᵀ y: the least squares of a
    regression of x on V_s, so that an error of y counts by its square. It takes Jacobians that are written out.
    """

    normal: SparseInformationNormal

    def formed(self, jacobians: _Jacobians, contraction: Contraction) -> Tensor:
        factor = self.normal.precise_cholesky
        left, right, whitening, scale, root = self.normal.parts_in(factor.dtype, factor.device)

        def gathered(i: slice) -> Tensor:
            return sandwich(left[i].mT, whitening[i] * root[i] * jacobians[i].to(factor), right)

        def squares(i: slice) -> Tensor:
            explained = whitening[i] * sandwich(left[i], scale * y, right.mT)
            residual = (root[i] * jacobians[i].to(factor) - explained).flatten(2)
            return contracted(residual, None, contraction)

        projected: Any = scale * sum(_lean(gathered, i) for i in jacobians.slices)
        columns = projected.flatten(2).flatten(0, 1).mT
        y = torch.cholesky_solve(columns, factor).mT.reshape(projected.shape)
        total: Any = sum(_lean(squares, i) for i in jacobians.slices)
        return (total + contracted(y.flatten(2), None, contraction)).to(jacobians.inputs)


def _with_centred(variances: Tensor) -> Tensor:
    """Variances [N, m] of independent logits, and after them the mean of the centred ones': their own less 1/m."""
    mean = variances.mean(1, keepdim=True)
    return torch.cat([variances, mean * (1 - 1 / variances.shape[1])], 1)


_EIGENBASIS = (KroneckerNormal, EigenKroneckerNormal)


def _basis(normal: StructuredNormal) -> Tensor | None:
    """U_G, where there is one."""
    return normal.output_vectors if isinstance(normal, _EIGENBASIS) else None


def _kernel(normal: StructuredNormal, precise: bool) -> _Kernel:
    if isinstance(normal, SparseInformationNormal):
        return _SquaresKernel(normal) if precise else _LowRankKernel(normal)
    return _Kernel(normal)
