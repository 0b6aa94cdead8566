"""S draws of a posterior, made once: functions from inputs to outputs, run one by one or all in one pass."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import DubitoError
from ..fitting import read
from ..inputs import Inputs, TensorOptions, call, checked_inputs, chunks, map_tensors, named_tensors, rows_of, take
from ..layers import Survey
from ..layers.shell import noise_of, seeded
from ..networks import run, with_weights
from ..precision import half_passes

#: Tensors of draws, in groups by parameter name.
Groups = Mapping[str, Mapping[str, Tensor]]
#: Called as the network is, with B rows: the outputs of S draws, [S, B, ...].
JointPass = Callable[..., Tensor]
#: What a pass may raise where the network is none it can run.
FAILURES = (DubitoError, RuntimeError, TypeError, ValueError, IndexError, KeyError)
#: Rows of all draws that go through a network at once, and numbers that its layers then read: more leave the caches.
MOST_ROWS, MOST_NUMBERS = 4096, 1 << 21
#: Draws at a time that are worth a pass of their own, where all do not fit into one.
LEAST_DRAWS = 16


class Draws(ABC):
    """Functions drawn from a posterior.

    Which pass, if any, answers for all of them at once is found by a trial on the first rows: the fastest that answers
    as the draws do one by one. The finding is a number in `ways`, which draws of the same posterior share.

    Args:
        network: the posterior's, in evaluation mode.
        tensors: what differs between draws, [S, ...], in groups by parameter name.
        facts: plain values: the `count` S, the `seed`, the number of the `first` draw, and what a kind needs beside.
        survey: how the network uses its parameters, from checked rows.
        ways: the passes found to work, by kind.

    Attributes:
        passing: whether these draws serve one call, so that no shell is taken for good.
    """

    passing = False

    kind: ClassVar[str]
    #: By their names in files.
    kinds: ClassVar[dict[str, type["Draws"]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Draws.kinds[cls.kind] = cls

    def __init__(
        self,
        network: nn.Module,
        tensors: Groups,
        facts: Mapping[str, Any],
        survey: Callable[[Inputs], Survey],
        ways: dict[str, int],
    ) -> None:
        self.network, self.tensors, self.survey, self.ways = network, tensors, survey, ways
        self.facts = {**facts, "kind": self.kind}
        self.count: int = facts["count"]
        self.like = TensorOptions.of(network)
        self._idle: list[JointPass] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_idle": []}  # passes hold on to the tensors they were made with

    def part(self, indices: range) -> "Draws":
        """Some of these draws, from the first on again after the last."""
        first = indices.start % self.count
        chosen = slice(first, first + len(indices))
        tensors = {key: {name: t[chosen] for name, t in group.items()} for key, group in self.tensors.items()}
        facts = {**self.facts, "count": len(indices), "first": self.facts["first"] + first}
        if "seeds" in facts:
            facts["seeds"] = facts["seeds"][chosen]
        return type(self)(self.network, tensors, facts, self.survey, self.ways)

    # -- what a kind says ----------------------------------------------------------------------------------

    @abstractmethod
    def weights(self, index: int) -> dict[str, Tensor]:
        """The parameters and buffers of a draw that are not the network's own."""

    @property
    def _key(self) -> str:
        """Of what a trial finds: one draw cannot be mixed up by any pass, and half precision may find another."""
        half = half_passes()
        count = "" if self.count > 1 else ", one draw"
        return f"{self.kind}{count}" if half is None else f"{self.kind}{count}, {half.precision}"

    def makers(self, inputs: Inputs) -> Iterator[Callable[[], JointPass]]:
        """Makers of passes for all draws at once, the fastest first; each pass serves one caller at a time.

        Args:
            inputs: checked rows.
        """
        yield from ()

    def block(self, inputs: Inputs) -> int:
        """How many draws at a time are run fastest on these rows."""
        rows, width = rows_of(inputs), self.ways.get("width")
        if width is None:
            width = self.ways["width"] = self._width(inputs)
        block = min(MOST_ROWS // rows, MOST_NUMBERS // (rows * width))
        return block if block >= min(self.count, LEAST_DRAWS) else 1

    def _width(self, inputs: Inputs) -> int:
        """The numbers that all layers read of a row."""
        try:
            layers = sum(use.size for use in self.survey(inputs).uses)
        except FAILURES:
            layers = 0
        return max(1, round(layers), sum(tensor[0].numel() for _, tensor in named_tensors(inputs)))

    def answered(self, index: int, inputs: Inputs) -> Tensor:
        """The outputs of one draw, without noise of the network's own."""
        return run(self.network, self.weights(index), inputs)

    def plain(self, index: int) -> nn.Module:
        """A network of the user's class that is this draw."""
        return with_weights(self.network, self.weights(index))

    def traceable(self, inputs: Inputs = None) -> nn.Module | None:
        """A pass for all draws that tracers can follow: one of the kind's, or network after network.

        Args:
            inputs: checked rows like those that it will read, which some kinds need; others then try their passes.
        """
        try:
            way = self.ways.get(self._key)
            if way is None and inputs is not None:
                way = self.ways[self._key] = self._trial(take(inputs, slice(3)))
            elif way is None:  # not tried: right where every use of every parameter is known
                way = -1 if self.survey(None).reasons else 0
            joint = None if way < 0 else self.joint(way, None)
        except FAILURES:
            joint = None
        return joint if isinstance(joint, nn.Module) else Chain(map(self.plain, range(self.count)))

    # -- outputs -------------------------------------------------------------------------------------------

    def function(self, index: int) -> Callable[[Inputs], Tensor]:
        """One draw, from checked inputs to outputs; differentiable in them."""
        path = "network", self.facts["first"] + index

        def drawn(inputs: Inputs) -> Tensor:
            with seeded(self.network, self.facts["seed"], *path):  # noise of the network's own
                return read(partial(self.answered, index), inputs)

        return drawn

    def outputs(self, inputs: Inputs, max_rows: int, *, keep_graph: bool = False) -> Iterable[Tensor]:
        """Outputs [B, ...] of one draw after the other, or those of all together, [S, B, ...].

        Args:
            inputs: checked rows.
            max_rows: that go through the network at once.
            keep_graph: keep the autograd graph.
        """
        block = 0 if keep_graph or rows_of(inputs) > max_rows else self.block(inputs)
        together = self.together(inputs) if block >= self.count else None
        if together is not None:
            return together
        return self._apart(inputs, max_rows, keep_graph) if block < 2 else self._blocks(inputs, block)

    def once(self, inputs: Inputs, max_rows: int, keep_graph: bool) -> Iterable[Tensor]:
        """The outputs for what the network reads, of draws that are needed no more."""
        self.passing = True
        return self.outputs(checked_inputs(inputs, self.like), max_rows, keep_graph=keep_graph)

    def _blocks(self, inputs: Inputs, block: int) -> Iterator[Tensor]:
        for start in range(0, self.count, block):
            part = self.part(range(start, min(start + block, self.count)))
            part.passing = True
            together = part.together(inputs)
            yield from part._apart(inputs, rows_of(inputs), False) if together is None else together

    def _apart(self, inputs: Inputs, max_rows: int, keep_graph: bool) -> Iterator[Tensor]:
        for index in range(self.count):
            function = self.function(index)
            with torch.set_grad_enabled(keep_graph):
                pieces = [function(piece) for piece in chunks(inputs, max_rows)]
            yield pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def together(self, inputs: Inputs) -> Tensor | None:
        """The outputs of all draws, [S, B, ...], by one pass; None where they must be run one by one."""
        way = self.ways.get(self._key)
        if way is None:
            way = self.ways[self._key] = self._trial(take(inputs, slice(3)))
        if way < 0:
            return None
        try:
            with torch.no_grad():
                joint = self.joint(way, inputs)
                outputs = call(joint, inputs)
        except FAILURES:  # the network runs otherwise on these rows, or not at all: the loop will tell
            return None
        if not self.passing:
            self._idle.append(joint)
        return outputs

    def joint(self, way: int, inputs: Inputs) -> JointPass:
        """A pass of the way that a trial found, in the hands of the caller."""
        try:
            return self._idle.pop()
        except IndexError:
            with torch.inference_mode(False):
                return list(self.makers(inputs))[way]()

    @torch.no_grad()
    def _trial(self, inputs: Inputs) -> int:
        """The number of the first maker whose pass answers as the first and the last draw do, or −1."""
        ends = sorted({0, self.count - 1})
        truth = torch.stack([self.function(index)(inputs) for index in ends])
        if noise_of(self.network):
            return -1
        for way, maker in enumerate(self.makers(inputs)):
            try:
                outputs = call(maker(), inputs)[ends]
            except FAILURES:
                continue
            if outputs.shape == truth.shape and agree(outputs, truth):
                return way
        return -1


class Chain(nn.ModuleList):
    """Networks that answer one after the other, [S, B, ...]."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.stack([call(network, kwargs or args) for network in self])


def agree(outputs: Tensor, truth: Tensor) -> bool:
    """Whether outputs are the same but for rounding; draws that are mixed up differ a lot more."""
    rtol = max(1e-3, 8 * torch.finfo(truth.dtype).eps)
    atol = 0.1 * rtol * float(truth.abs().max())
    return torch.allclose(outputs, truth, rtol=rtol, atol=atol)


def repeated(inputs: Inputs, draws: int) -> Inputs:
    """The rows once for every draw, [S·B, ...]."""
    return map_tensors(lambda tensor: tensor.expand(draws, *tensor.shape).flatten(0, 1), inputs)
