"""From the survey of a network to its blocks: which parameters are covered, how, and why others are not."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from ..errors import NetworkError
from ..inputs import Inputs
from ..layers.dry_run import survey
from ..layers.form import Product
from ..layers.linear import Dense
from ..layers.record import BlockPart, Record
from ..layers.uses import Survey, Use
from .blocks import Block, diagonal_block

#: The largest side of a Kronecker factor: a wider one would not fit into memory nor be decomposed in time.
LARGEST_SIDE = 1 << 14


@dataclass(frozen=True, eq=False)
class Cover:
    """The blocks of a network, and how their parameters are read from recorded passes.

    Attributes:
        survey: of the network.
        blocks: by name.
        parts: of each block, one for each of its weight's parts.
        left_out: why other parameters are not covered, by name.
    """

    survey: Survey
    blocks: Mapping[str, Block]
    parts: Mapping[str, tuple[BlockPart, ...]]
    left_out: Mapping[str, str]

    @property
    def parameters(self) -> list[str]:
        """The parameters that the blocks cover."""
        return [name for block in self.blocks.values() for name in block.parameters]

    def record(self, **options: object) -> Record:
        """A context that records passes as the survey found them."""
        return Record(self.survey.layout_of, **options)  # pyright: ignore[reportArgumentType]

    def only(self, names: Collection[str]) -> "Cover":
        """The same with some of the blocks."""
        blocks = {name: block for name, block in self.blocks.items() if name in names}
        return Cover(self.survey, blocks, {name: self.parts[name] for name in blocks}, self.left_out)


def cover(network: nn.Module, surveyed: Survey, names: Collection[str]) -> Cover:
    """The blocks that cover the named parameters.

    Args:
        network: that was surveyed.
        surveyed: its survey.
        names: the parameters wanted.

    Raises:
        NetworkError: if no parameter can be covered at all.
    """
    left_out = {name: surveyed.reasons[name] for name in names if name in surveyed.reasons}
    covered = [name for name in names if name not in left_out and surveyed.of(name)]
    if not covered:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise NetworkError(f"the curvature needs a layer with a rule, got none ({reasons})")
    shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    blocks: dict[str, Block] = {}
    parts: dict[str, tuple[BlockPart, ...]] = {}
    biases: set[str] = set()
    for name in covered:
        uses = surveyed.of(name)
        bias = _bias(name, uses, surveyed, covered)
        block = _block(name, bias, uses, shapes[name])
        bias = bias if block.kronecker else None
        product = _product(name, uses) if block.kronecker else None
        count = uses[0].parts if uses[0].weight == name else uses[0].bias_parts
        blocks[name] = block
        parts[name] = tuple(BlockPart(name, bias, product, part, count) for part in range(count))
        biases |= {bias} if bias else set()
    chosen = [name for name in blocks if name not in biases]
    by_name = {blocks[name].name: blocks[name] for name in chosen}
    return Cover(surveyed, by_name, {blocks[name].name: parts[name] for name in chosen}, left_out)


def find_blocks(network: nn.Module, inputs: Inputs, names: Collection[str]) -> Cover:
    """The blocks that cover the named parameters of a network, by a survey on a few rows of inputs."""
    return cover(network, survey(network, inputs), names)


def _product(name: str, uses: list[Use]) -> Product | None:
    """How all uses multiply their inputs by the parameter, if they do so alike; else None."""
    form = uses[0].form
    alike = all(use.weight == name and use.form.signature == form.signature for use in uses)
    return form if alike and isinstance(form, Product) else None


def _bias(name: str, uses: list[Use], surveyed: Survey, covered: Collection[str]) -> str | None:
    """The bias that can be the last column of a weight: both are used together, wherever the bias is used."""
    if any(use.weight != name for use in uses):
        return None
    biases = {use.bias for use in uses if use.bias is not None}
    bias = biases.pop() if len(biases) == 1 else None
    if bias is None or bias not in covered:
        return None
    together = all(
        use.weight == name and use.bias == bias and (use.part, use.parts) == (use.bias_part, use.bias_parts)
        for use in surveyed.of(bias)
    )
    return bias if together else None


def _block(name: str, bias: str | None, uses: list[Use], shape: tuple[int, ...]) -> Block:
    product = _product(name, uses)
    if product is None or max(product.rows, product.columns + (bias is not None)) > LARGEST_SIDE:
        return diagonal_block(name, shape)
    path, _, last = name.rpartition(".")
    return Block(
        name=path if last == "weight" and path else name,
        weight=name,
        bias=bias,
        shape=shape,
        groups=product.groups * uses[0].parts,
        rows=product.rows,
        columns=product.columns + (bias is not None),
        kronecker=True,
        turned=isinstance(product, Dense) and product.turned,
    )
