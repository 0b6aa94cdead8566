"""Running sums for weights that multiply their layer's inputs: factors, moments along a basis, the diagonal."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..devices import moved
from ..layers.form import PIECE, Product
from ..layers.grams import add_gram, mirrored
from ..layers.layout import Layout, per_row, rows_first
from ..layers.record import BlockPart, Call, by_row, count
from .sums import BLOCK, Sums, Wanted, add_squares, row_blocks

#: Rows that layers with one position per row wait for: products over few rows are slow.
TOGETHER = 1024


@dataclass(eq=False)
class Waiting:
    """Rows of layers with one position per row, until there are enough of them.

    Attributes:
        inputs: [G, B, n].
        gradients: [G, B, m], the first ones of these rows.
        squares: Σ g^∘2 over the further gradients of the same rows, with their weights; None if there are none.
        turned: the same of (U_Gᵀ g)^∘2.
        roots: of the rows' weights, [B]; None where all rows count once.
    """

    inputs: Tensor
    gradients: Tensor
    squares: Tensor | None = None
    turned: Tensor | None = None
    roots: Tensor | None = None


class ProductSums(Sums):
    """The sums of a weight that multiplies its layer's inputs.

    Args:
        part: the weight, or its part.
        wanted: what to sum.
        like: a tensor of the dtype and device of the sums.
    """

    def __init__(self, part: BlockPart, wanted: Wanted, like: Tensor) -> None:
        product = part.product
        assert product is not None
        self.part, self.product, self.biased = part, product, part.bias is not None
        groups, m, n = product.groups, product.rows, product.columns + self.biased
        sides = None if wanted.basis is None else (wanted.basis[1].shape[-1], wanted.basis[0].shape[-1])
        super().__init__(
            inputs=like.new_zeros(groups, n, n) if wanted.factors else None,
            gradients=like.new_zeros(groups, m, m) if wanted.factors else None,
            eigenvalues=None if sides is None else like.new_zeros(groups, *sides),
            diagonal=like.new_zeros(groups, m, n) if wanted.diagonal else None,
        )
        self.dtype = like.dtype
        self.waiting: list[Waiting] = []
        self.share = (1.0, self.biased)
        #: Of the weights of the next rows, by which A counts them; their gradients have them as a factor already.
        self.roots: Tensor | None = None
        order = None if product.order is None else moved(product.order, like.device)
        if order is not None and self.biased:
            order = torch.cat([order, order.new_full((1,), n - 1)])
        self.order = order
        if wanted.basis is not None:
            vectors, self.left = wanted.basis
            self.right = vectors if order is None else vectors[:, order]

    def add(self, calls: list[Call], rows: int, weight: float, first: bool, last: bool) -> None:
        """Add what the calls saw of a batch of rows, for a share `weight` of their gradients.

        Args:
            calls: of the weight.
            rows: of the batch.
            weight: of these gradients.
            first: whether these are the first gradients for the batch; its inputs count once.
            last: whether they are the last.
        """
        if not calls:
            return
        positions = sum(map(_positions, calls)) // rows
        if positions == 1 and calls[0].active is None:
            self._wait(calls[0], rows, weight, first, last)
            return
        if self.inputs is not None and first:
            for call in calls:
                self._add_inputs(call)
        if self.gradients is not None:
            self._add_gradients(calls, rows, weight)
        if self.eigenvalues is None and self.diagonal is None:
            return
        cases = max(_cases(call, rows) for call in calls)
        size = self.product.groups * max(positions, cases * self.product.rows) * (self.product.columns + 1)
        for part in row_blocks(rows, size):
            self._add_block(calls, rows, part, positions, weight)

    def _with_bias(self, call: Call) -> bool:
        """Whether a call adds the bias that is the last column."""
        return self.biased and call.bias == self.part.bias

    def _add_inputs(self, call: Call) -> None:
        """A += Σ_t a_t a_tᵀ, in any order of positions."""
        assert self.inputs is not None and isinstance(call.form, Product)
        x, active, roots = call.inputs.to(self.dtype), call.active, self.roots
        positions = _positions(call)
        if active is not None:
            x = x * active.unsqueeze(-1)
        if roots is not None:
            x = x * per_row(roots, call.layout, x)
            active = None if active is None else active * per_row(roots.square(), call.layout, active)
            positions = roots.square().sum() * (positions // len(roots))
        width = self.product.columns
        call.form.add_moment(self.inputs[:, :width, :width], x)
        if self._with_bias(call):
            ones = positions if active is None else active.sum()
            self.inputs[:, :width, width] += call.form.total(x if roots is None else x * per_row(roots, call.layout, x))
            self.inputs[:, width, width] += ones

    def _add_gradients(self, calls: list[Call], rows: int, weight: float) -> None:
        """G += 1/T Σ_t g_t g_tᵀ, with T all positions of a row."""
        assert self.gradients is not None
        if all(call.active is None for call in calls):
            scale = weight * rows / sum(map(_positions, calls))
            for call in calls:
                assert isinstance(call.form, Product) and call.gradient is not None
                _add_outer(self.gradients, call.form.outputs(call.gradient.to(self.dtype)), scale)
            return
        lengths = sum(_lengths(call, rows) for call in calls)
        roots = torch.as_tensor(lengths).to(self.gradients).clamp(min=1).rsqrt()
        for call in calls:
            assert isinstance(call.form, Product)
            _, g = call.rows(rows, slice(None))
            matrices = by_row(call.form.outputs(g.to(self.dtype)), rows, 3)
            _add_outer(self.gradients, matrices * roots.reshape(-1, 1, 1, 1), weight)

    def _wait(self, call: Call, rows: int, weight: float, first: bool, last: bool) -> None:
        """One position per row: keep inputs and gradients until there are enough rows."""
        assert isinstance(call.form, Product)
        _, g = call.rows(rows, slice(None))
        g = call.form.outputs(g.to(self.dtype))[..., 0].transpose(0, 1)
        if first:
            if self.share != (weight, self._with_bias(call)):
                self.flush()
                self.share = (weight, self._with_bias(call))
            x, _ = call.rows(rows, slice(None))
            a = call.form.inputs(x.to(self.dtype))[:, :, 0].transpose(0, 1)
            self.waiting.append(Waiting(a, g, roots=self.roots))
        else:
            self._add_further(self.waiting[-1], g, weight)
        if last:
            waiting = sum(batch.inputs.shape[1] for batch in self.waiting)
            size = self.product.groups * (self.product.columns + self.product.rows)
            if waiting >= TOGETHER or waiting * size > 4 * BLOCK:
                self.flush()

    def _add_further(self, waiting: Waiting, g: Tensor, weight: float) -> None:
        """Further gradients of rows that wait: Σ_s g_s^∘2 (a^∘2)ᵀ = (Σ_s g_s^∘2) (a^∘2)ᵀ."""
        if self.gradients is not None:
            add_gram(self.gradients, g, weight)
        if self.diagonal is not None:
            squares = g.square().mul_(weight)
            waiting.squares = squares if waiting.squares is None else waiting.squares.add_(squares)
        if self.eigenvalues is not None:
            turned = _times(g, self.left).square_().mul_(weight)
            waiting.turned = turned if waiting.turned is None else waiting.turned.add_(turned)

    def flush(self) -> None:
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        weight, biased = self.share[0], self.biased and self.share[1]
        width = self.product.columns
        a, g = _joined([batch.inputs for batch in waiting]), _joined([batch.gradients for batch in waiting])
        if self.inputs is not None and self.gradients is not None:
            roots = [batch.roots for batch in waiting if batch.roots is not None]
            ones = torch.cat(roots)[:, None] if roots else a.new_ones(1, 1).expand(a.shape[1], 1)
            counted = a * ones if roots else a
            add_gram(self.inputs[:, :width, :width], counted)
            if biased:
                self.inputs[:, :width, width] += (counted * ones if roots else a).sum(1)
                self.inputs[:, width, width] += ones.square().sum() if roots else a.shape[1]
            add_gram(self.gradients, g, weight)
        # (g aᵀ)^∘2 = g^∘2 (a^∘2)ᵀ, so the sum over rows is one product.
        if self.diagonal is not None:
            squares = _with_further(g.square(), weight, [batch.squares for batch in waiting])
            _add_product(self.diagonal[..., :width], squares.mT, a.square())
            if biased:
                self.diagonal[..., width].add_(squares.sum(1))
        if self.eigenvalues is not None:
            # Λ = Σ_i (U_Gᵀ g_i)^∘2 ((U_Aᵀ a_i)^∘2)ᵀ
            squares = _with_further(_times(g, self.left).square_(), weight, [batch.turned for batch in waiting])
            turned = _with_row(a, self.right, width) if biased else _times(a, self.right[:, :width])
            _add_product(self.eigenvalues, squares.mT, turned.square_())

    def _add_block(self, calls: list[Call], rows: int, part: slice, positions: int, weight: float) -> None:
        """Several positions: they add up inside a row, before squaring."""
        gradients = None
        if self.diagonal is not None or positions > self.product.rows:
            gradients = self._gradients(calls, rows, part, positions)
        if self.eigenvalues is not None:
            # (U_Gᵀ δ U_A)^∘2, turning whichever is shorter: δ or the inputs
            if positions > self.product.rows:
                assert gradients is not None
                turned = self.left.mT @ _times(gradients, self.right)
            else:
                a, g, ones = self._matrices(calls, rows, part)
                width = a.shape[-1]
                inputs = _with_row(a, self.right, width) if ones else _times(a, self.right[:, :width])
                turned = (self.left.mT @ g) @ inputs
            add_squares(self.eigenvalues, turned, weight)
        if self.diagonal is not None:
            assert gradients is not None
            add_squares(self.diagonal, gradients, weight)

    def _gradients(self, calls: list[Call], rows: int, part: slice, positions: int) -> Tensor:
        """δ of some rows, [b, G, m, n]."""
        if len(calls) > 1 and positions * self.product.groups * self.product.columns <= PIECE:
            a, g = self.part.matrices(calls, rows, part, self.dtype)  # all calls in one product
            return g @ a
        total = None
        for call in calls:
            assert isinstance(call.form, Product)
            x, g = (tensor.to(self.dtype) for tensor in call.rows(rows, part))
            products = call.form.products(x, g)
            if self.biased:
                column = call.form.outputs(g).sum(-1, keepdim=True) * self._with_bias(call)
                products = torch.cat([products, column], -1)
            if _cases(call, rows) > 1:
                products = products.unflatten(0, (count(part, rows), -1)).sum(1)
            total = products if total is None else total.add_(products)
        assert total is not None
        return total

    def _matrices(self, calls: list[Call], rows: int, part: slice) -> tuple[Tensor, Tensor, bool]:
        """Inputs [b, G, T, n], gradients [b, G, m, T], and whether a column of ones belongs behind the inputs."""
        call = calls[0]
        if len(calls) > 1 or call.active is not None or self.biased > self._with_bias(call):
            return *self.part.matrices(calls, rows, part, self.dtype), False
        assert isinstance(call.form, Product)
        x, g = call.rows(rows, part)
        size = count(part, rows)
        a = by_row(call.form.inputs(x.to(self.dtype)), size, 2)
        return a, by_row(call.form.outputs(g.to(self.dtype)), size, 3), self.biased

    def finish(self) -> None:
        """Bring the sums into their final form: symmetric, columns in the weight's order."""
        if self.inputs is not None:
            self.inputs = mirrored(self.inputs)
        if self.gradients is not None:
            self.gradients = mirrored(self.gradients)
        if self.order is None:
            return
        inverse = self.order.argsort()
        if self.inputs is not None:
            self.inputs = self.inputs[:, inverse][:, :, inverse]
        if self.diagonal is not None:
            self.diagonal = self.diagonal[..., inverse]


def _positions(call: Call) -> int:
    """Positions of all rows together."""
    assert call.gradient is not None and isinstance(call.form, Product)
    return call.gradient.numel() // (call.form.groups * call.form.rows)


def _cases(call: Call, rows: int) -> int:
    """How many cases (frames) each row has, on an axis with the rows."""
    flat = call.layout in (Layout.FLAT, Layout.FLAT_SECOND)
    return len(call.inputs) // rows if flat else 1


def _lengths(call: Call, rows: int) -> Tensor:
    """Positions of each row that count, [rows]."""
    assert call.gradient is not None
    if call.active is None:
        return torch.full((rows,), _positions(call) // rows, device=call.gradient.device)
    return rows_first(call.active, call.layout, rows).reshape(rows, -1).sum(1)


def _add_product(sums: Tensor, left: Tensor, right: Tensor) -> None:
    """Sums += left · right, of stacks [G, ...]."""
    if len(sums) == 1:
        sums[0].addmm_(left[0], right[0])
    else:
        sums.baddbmm_(left, right)


def _with_further(squares: Tensor, weight: float, further: list[Tensor | None]) -> Tensor:
    """The first gradients' squares by their weight, and those of the further ones."""
    squares = squares if weight == 1 else squares.mul_(weight)
    more = [batch for batch in further if batch is not None]
    return squares.add_(_joined(more)) if more else squares


def _add_outer(sums: Tensor, g: Tensor, scale: float) -> None:
    """Sums [G, m, m] += scale · Σ_n Σ_t g_t g_tᵀ of [N, G, m, T], the upper triangle."""
    count, groups, m, positions = g.shape
    if positions > m:
        for part in g.split(max(1, BLOCK // (groups * m * positions))):
            sums.add_((part @ part.mT).sum(0), alpha=scale)
    else:
        add_gram(sums, g.permute(1, 0, 3, 2).reshape(groups, count * positions, m), scale)


def _times(matrices: Tensor, right: Tensor) -> Tensor:
    """[..., G, k, n] times [G, n, n']; one product where there is one group."""
    if len(right) > 1:
        return matrices @ right
    return (matrices.reshape(-1, matrices.shape[-1]) @ right[0]).view(*matrices.shape[:-1], -1)


def _with_row(matrices: Tensor, right: Tensor, width: int) -> Tensor:
    """The same, with a column of ones behind the matrices that meets the last row."""
    if len(right) > 1:
        return matrices @ right[:, :width] + right[:, width:]
    flat = matrices.reshape(-1, width)
    return torch.addmm(right[0, width], flat, right[0, :width]).view(*matrices.shape[:-1], -1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
