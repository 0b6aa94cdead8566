"""Posteriors of independent blocks: at few rows many draws go through the network in one pass.

Blocks whose draws are products from both sides are functions there, and no matrix is written out.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .curvature import Block
from .distributions.two_sided import TwoSided, products_saved
from .draws.base import repeated
from .errors import NetworkError
from .fitting import answered, read
from .inputs import Inputs, TensorOptions, call, checked_inputs, rows_of, take
from .layers import Context, Form, Layout, Survey, Use
from .layers.context import name_of
from .layers.kinds import Standin, plain
from .layers.linear import Dense
from .layers.passes import asking
from .layers.shell import noise_of
from .posterior import Drawer, Posterior
from .precision import full_precision

#: From a block and the generator of a draw to the tensors of its parameters by name.
BlockDrawer: TypeAlias = Callable[[Block, torch.Generator | None], Mapping[str, Tensor]]
#: Rows at which Python costs more than products, so that draws share a pass whatever they are.
FEW = 8


class OtherUse(NetworkError):
    """The network uses its layers otherwise than in the survey."""


class DrawsOfRows(Context):
    """A pass in which the same rows stand for several draws, one draw after the other.

    Every draw has its generator, from which the blocks take noise in the order in which the network uses them.

    Args:
        order: the blocks of every use.
        generators: of the draws.
        roots: of the blocks that are answered as functions, by the weight's name.
        drawn: draws the others.
    """

    def __init__(
        self,
        order: Sequence[tuple[Block, ...]],
        generators: Sequence[torch.Generator],
        roots: Mapping[str, TwoSided],
        drawn: BlockDrawer,
    ) -> None:
        self.generators, self.roots, self.drawn = generators, roots, drawn
        self._coming = iter(order)

    def use(
        self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, active: Tensor | None = None
    ) -> Tensor:
        names = name_of(weight), name_of(bias)
        blocks: tuple[Block, ...] = next(self._coming, ())
        expected = {name for block in blocks for name in block.parameters}
        if not blocks or isinstance(x, Standin) or expected != {name for name in names if name is not None}:
            raise OtherUse(f"the network must use {names} as it did in the survey")
        root, full = self.roots.get(blocks[0].weight), full_precision(x.device)
        if root is not None:
            mean = form.apply(x, plain(weight), plain(bias))
            with full:
                return self._function(root, x.to(root.left.dtype), mean.to(root.left.dtype))
        answers, tensors = [], {names[0]: plain(weight), names[1]: plain(bias)}
        for cases, generator in zip(x.chunk(len(self.generators)), self.generators, strict=True):
            with full:
                for block in blocks:
                    tensors.update(self.drawn(block, generator))
            answers.append(form.apply(cases, tensors[names[0]], tensors[names[1]]))
        return torch.cat(answers)

    def _function(self, root: TwoSided, x: Tensor, mean: Tensor) -> Tensor:
        """M x + L (E ∘ s) (R x), the noise E of each draw on its own rows."""
        turned = root.turned(x.reshape(-1, x.shape[-1])).unflatten(0, (len(self.generators), -1))
        noisy = turned.new_empty(*turned.shape[:2], mean.shape[-1])
        for cases, answers, generator in zip(turned, noisy, self.generators, strict=True):
            torch.mm(cases, root.noise(generator).mT, out=answers)
        flat = mean.reshape(-1, mean.shape[-1])
        return torch.addmm(flat, noisy.flatten(0, 1), root.left.mT).view(mean.shape)

    def without_rule(self, function: Any, standins: Sequence[Standin], reason: str | None) -> None:
        raise OtherUse(f"the network must use {standins[0].parameter!r} by a rule, as it did in the survey")


class BlockPosterior(Posterior):
    """A posterior of independent blocks, one after the other in every draw."""

    @abstractmethod
    def drawn_blocks(self) -> Sequence[Block]:
        """The blocks, in the order in which a draw takes its noise."""

    @abstractmethod
    def block_drawer(self) -> BlockDrawer:
        """What draws single blocks for several draws in a row."""

    def root(self, block: Block) -> TwoSided | None:
        """What turns a block's noise into its deviation, where that is a product from both sides."""
        return None

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return self.weights() | dict(self.drawer()(index, generator))

    def drawer(self) -> Drawer:
        blocks, drawn = self.drawn_blocks(), self.block_drawer()
        return lambda index, generator: {
            name: tensor for block in blocks for name, tensor in drawn(block, generator).items()
        }

    def _outputs(
        self, inputs: Inputs, num_samples: int, seed: int, max_rows: int, keep_graph: bool = False
    ) -> Iterator[Tensor]:
        """Many draws in one pass where rows are few, or so few that functions take fewer products than matrices."""
        options = TensorOptions.of(self.network)
        inputs = checked_inputs(inputs, options)
        rows = rows_of(inputs)
        together = min(num_samples, max_rows // rows)
        order = None if keep_graph or not together else self._order(inputs)
        roots = self._roots(rows, inputs) if order else {}
        first, last = 0, num_samples if order and (roots or rows <= FEW) else 0
        try:
            while order and first < last:
                indices = range(first, min(first + together, num_samples))
                generators = [self.generator(seed, index, options.device) for index in indices]
                context = DrawsOfRows(order, generators, roots, self.block_drawer())
                outputs = self._together(context, inputs)
                first += len(outputs)
                yield from outputs
        except OtherUse:
            pass
        if first < num_samples:
            yield from islice(super()._outputs(inputs, num_samples, seed, max_rows, keep_graph), first, None)

    def _together(self, context: DrawsOfRows, inputs: Inputs) -> Sequence[Tensor]:
        """The outputs of the context's draws, [B, ...] each, from one pass."""
        draws = len(context.generators)
        names = [name for block in self.drawn_blocks() for name in block.parameters]
        with torch.no_grad(), asking(self.network, context, names) as shell:
            outputs = read(
                lambda rows: call(shell, repeated(rows, draws)).unflatten(0, (draws, rows_of(rows))).transpose(0, 1),
                inputs,
            )
        return outputs.unbind(1)

    def _order(self, inputs: Inputs) -> list[tuple[Block, ...]] | None:
        """The blocks of every use, where each is used once, in the order of draws, with the rows first."""
        if "survey" not in self.details:  # of an older file
            return None
        of = {name: block for block in self.drawn_blocks() for name in block.parameters}
        order = []
        for use in self.survey(inputs).uses:
            blocks = tuple(dict.fromkeys(of[name] for name in (use.weight, use.bias) if name in of))
            if blocks and not single(use):
                return None
            order += [blocks] if blocks else []
        ordered = [block for blocks in order for block in blocks] == list(self.drawn_blocks())
        return order if ordered and self._silent(inputs) else None

    def _silent(self, inputs: Inputs) -> bool:
        """Whether the network draws no noise of its own, which would differ from draw to draw."""
        if noise_of(self.network) is None:  # no pass has told yet
            answered(self.network, take(inputs, slice(1)))
        return noise_of(self.network) is False

    def _roots(self, rows: int, inputs: Inputs) -> dict[str, TwoSided]:
        """Of the blocks that have one, if functions of so many rows take fewer products than matrices in all."""
        surveyed = self.survey(inputs)
        cases = {block: rows * dense_cases(block, surveyed) for block in self.drawn_blocks()}
        dense = {block: count for block, count in cases.items() if count}
        if sum(products_saved(block.rows, block.columns, count) for block, count in dense.items()) <= 0:
            return {}
        roots = {block.weight: self.root(block) for block in dense}
        return {name: root for name, root in roots.items() if root is not None}


def single(use: Use) -> bool:
    """Whether a use is one call on a whole parameter, with the rows of all draws one after the other."""
    return (use.calls, use.steps, use.parts, use.bias_parts) == (1, False, 1, 1) and use.layout in (
        Layout.ROWS,
        Layout.FLAT,
    )


def dense_cases(block: Block, surveyed: Survey) -> float:
    """How many inputs a row gives a block's layer; 0 where it is no dense layer."""
    (use,) = surveyed.of(block.weight)
    dense = block.kronecker and block.groups == 1 and isinstance(use.form, Dense) and use.bias == block.bias
    return use.size / (block.columns - (block.bias is not None)) if dense else 0.0
