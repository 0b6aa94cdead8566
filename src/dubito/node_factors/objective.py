"""The loss of methods with distributions on the nodes: passes over a batch, tiled into one or made one by one."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ConfigError, NetworkError
from ..inputs import Batch, Inputs, TensorOptions, map_tensors, rows_of, take
from ..layers import Layout, Survey, reasons, survey
from ..layers.declared import points_of, shared_weights
from ..layers.factors import Factors, NodeFactors
from ..layers.loop_kernels import Patches
from ..layers.passes import asked
from ..layers.shell import seeded
from ..likelihoods import at_least_float
from ..objective import Loss, Objective
from ..posterior import Posterior
from .beside import with_draw, with_rates
from .loop import accumulated, free_bytes, half_precision, one_pass
from .posterior import NodePosterior, Stds

#: Tensors that a step keeps per layer: its input, the scaled input, the output, the scaled output, gradients.
KEPT = 5
#: Activations beyond this leave the caches of CPUs, and their pages are mapped and zeroed at every step.
CPU_TENSOR_BYTES = 4 * 2**20
#: All passes through the network at once, one after the other, or whichever memory allows.
Arrangement = Literal["auto", "tile", "loop"]


@dataclass(frozen=True)
class Drawn:
    """What the passes over a batch share; methods add their noise.

    Attributes:
        stds: standard deviations of the factors by side and name.
        beside: a draw of the Normal weights by name, the same in all passes.
        patches: what convolutions keep from pass to pass.
    """

    stds: Stds
    beside: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)
    patches: Patches = field(default_factory=dict, kw_only=True)


class NodeObjective(Objective):
    """The negative evidence bound, its expectation estimated by P passes with factors of their own.

    Args:
        draft: the posterior under training.
        arrangement: of the passes.
        log_mixture: train on the log of the mean likelihood of the passes instead of the mean of the logs.
        factor_rate: multiplies the learning rate of the factors.
        num_data: the number of training rows.
        modes: modules by name that stay in evaluation mode while training.
    """

    draft: NodePosterior
    asks = True
    #: Whether the method treats tables of vectors.
    embeddings: bool = True

    def __init__(
        self,
        draft: NodePosterior,
        *,
        arrangement: Arrangement = "auto",
        log_mixture: bool = False,
        factor_rate: float = 1.0,
        num_data: float,
        modes: Mapping[str, bool] | None = None,
    ) -> None:
        super().__init__(draft, num_data=num_data, modes=modes)
        if draft.normals is not None:
            draft.normals.check_prior()
        self.arrangement: Arrangement = arrangement
        self.log_mixture, self.factor_rate = log_mixture, factor_rate
        self.noisy = draft.num_atoms is None
        self.row_size = self.largest = 0.0
        self.parts_late = False

    @property
    @abstractmethod
    def passes(self) -> int:
        """P: how often a batch goes through the network."""

    @abstractmethod
    def drawn(self, batch: Batch, generator: torch.Generator | None) -> Drawn:
        """Noise of the factors for a batch: for all rows that processes share, of which these take theirs."""

    @abstractmethod
    def factors(self, name: str, chosen: slice, drawn: Any) -> NodeFactors:
        """The factors of some passes on the nodes of a weight."""

    @abstractmethod
    def biases(self, chosen: slice, drawn: Any) -> dict[str, Tensor]:
        """Biases of some passes by name, [P, C], or [P, n, C] where rows have their own."""

    @abstractmethod
    def divergence(self, stds: Stds) -> Tensor:
        """The divergence of the factors that the loss counts, from their standard deviations."""

    # -- where factors can stand ---------------------------------------------------------------------------

    def bind(self, inputs: Inputs) -> None:
        draft = self.draft
        if "shared" in draft.details:
            return
        stored = draft.details.get("survey")
        facts = Survey.from_json(stored) if stored else survey(draft.network, inputs)
        shared = shared_weights(draft.uses, facts, additive=draft.method.additive)
        if shared and self.arrangement == "tile":
            raise ConfigError(
                f"a tile needs factors per row, which these weights cannot have: {shared}; take arrangement='loop'"
            )
        treated = {*draft.uses, *draft.varied_biases, *draft.random}
        points = points_of(draft.network, facts, treated, draft.method.subset, embeddings=self.embeddings)
        draft.details |= {"shared": shared, "points": points, "survey": facts.to_json()}
        reasons.warn_points(draft.method, points, draft.network)
        sizes = [use.size for use in facts.uses if use.weight in draft.uses]
        self.row_size, self.largest = sum(sizes), max(sizes, default=0.0)
        rows_first = all(use.layout is Layout.ROWS for use in facts.uses if use.weight in draft.uses)
        self.parts_late = not shared and rows_first and self.passes > 1 and self._parts_late(inputs)

    @torch.no_grad()
    def _parts_late(self, inputs: Inputs) -> bool:
        """Whether repeating rows at the first layers with factors gives what repeating the inputs gives."""
        few = take(inputs, slice(2))
        if rows_of(few) < 2:
            return False
        batch = Batch(few, torch.zeros(2))
        stream = torch.Generator(TensorOptions.of(self.draft.network).device).manual_seed(0)
        drawn = self.drawn(batch, stream)
        network = self.draft.network
        with seeded(network, 0, "parts late"):
            try:
                late = self._tiled(batch, drawn, late=True, training=None)
            except (RuntimeError, ValueError, IndexError):  # rows that were repeated meet rows that were not
                return False
        with seeded(network, 0, "parts late"):
            early = self._tiled(batch, drawn, late=False, training=None)
        return late.shape == early.shape and torch.allclose(late, early, rtol=1e-3, atol=1e-5)

    def tiles(self, batch: Batch) -> bool:
        """Whether all passes go through the network at once: where asked for, else where memory makes it faster."""
        if self.draft.shared or self.arrangement == "loop":
            return False
        if self.arrangement == "tile":
            return True
        like, rows = TensorOptions.of(self.draft.network), self.passes * rows_of(batch.inputs)
        size = rows * (torch.finfo(like.dtype).bits // 8)
        if like.device.type == "cpu":
            return size * self.largest <= CPU_TENSOR_BYTES
        return KEPT * size * self.row_size <= 0.5 * free_bytes(like.device)

    # -- passes --------------------------------------------------------------------------------------------

    def all_drawn(self, batch: Batch, generator: torch.Generator | None) -> tuple[Drawn, Tensor | None]:
        """Noise for a batch with a draw of the Normal weights, if there are any, and their divergence."""
        drawn, normals = self.drawn(batch, generator), self.draft.normals
        return (drawn, None) if normals is None else with_draw(drawn, normals, generator)

    def weights(self, drawn: Drawn) -> dict[str, Tensor]:
        """The network's weights, as all passes have them before factors come."""
        return {**self.draft.weights(), **drawn.beside}

    def outputs(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        """Outputs of all passes, one after the other, [P·n, ...]."""
        drawn, _ = self.all_drawn(batch, generator)
        if self.tiles(batch):
            return self._tiled(batch, drawn, late=self.parts_late, training=self.modes)
        return torch.cat([self.one_pass(index, batch, drawn) for index in range(self.passes)])

    def _tiled(self, batch: Batch, drawn: Drawn, *, late: bool, training: Mapping[str, bool] | None) -> Tensor:
        """Outputs of all passes at once, [P·n, ...]."""
        draft, everything = self.draft, slice(0, self.passes)
        inputs = batch.inputs
        if not late and self.passes > 1:
            inputs = map_tensors(lambda t: t.repeat(self.passes, *(1 for _ in t.shape[1:])), inputs)
        context = Factors(
            {name: self.factors(name, everything, drawn) for name in draft.uses},
            self.biases(everything, drawn),
            passes=self.passes,
            rows=rows_of(batch.inputs),
            additive=draft.method.additive,
        )
        lease = asked(draft.network, context, context.names, self.weights(drawn), training=training)
        return lease.outputs(inputs)

    def one_pass(self, index: int, batch: Batch, drawn: Drawn) -> Tensor:
        """Outputs of one pass, [n, ...]."""
        return one_pass(self, index, batch, drawn)

    # -- loss ----------------------------------------------------------------------------------------------

    def batch_loss(
        self, batch: Batch, kl_weight: float, generator: torch.Generator | None, *, checked: bool = True
    ) -> Loss:
        drawn, beside_kl = self.all_drawn(batch, generator)
        if self.tiles(batch):
            outputs = self._tiled(batch, drawn, late=self.parts_late, training=self.modes)
            nll = self._nll(outputs.view(self.passes, -1, *outputs.shape[1:]), batch, checked)
        elif self.passes > 1 and not self.log_mixture and torch.is_grad_enabled() and not half_precision():
            nll = accumulated(self, batch, drawn, checked)
        else:
            nll = self._nll((self.one_pass(p, batch, drawn) for p in range(self.passes)), batch, checked)
        kl = self.divergence(drawn.stds)
        kl = kl if beside_kl is None else kl + beside_kl
        # L / N of [rank-1, Eq. 2], whose −log p(W) is the weight decay
        return Loss(nll + (kl_weight / self.num_data) * kl, nll, kl)

    def log_prob(self, outputs: Tensor, batch: Batch, index: int, checked: bool) -> tuple[Tensor, Tensor | None]:
        """Log-likelihood of each row in one pass, and what the rows weigh."""
        outputs = at_least_float(outputs)
        targets, weights = self.judged(outputs, batch, checked)
        return self.draft.likelihood.log_prob(outputs, targets, index), weights

    def _nll(self, passes: Iterable[Tensor], batch: Batch, checked: bool) -> Tensor:
        """Negative log-likelihood of the passes' outputs, mean over the rows   [rank-1, Section 3.4]."""
        scored = [self.log_prob(out, batch, p, checked) for p, out in enumerate(passes)]
        stacked, weights = torch.stack([rows for rows, _ in scored]), scored[0][1]
        if self.log_mixture:  # log 1/K Σ_k p(y | x, θ_k)
            stacked = stacked.logsumexp(0) - torch.tensor(float(self.passes)).log().to(stacked)
        return -(stacked if weights is None else stacked * weights).mean()

    def kl(self) -> Tensor:
        kl, normals = self.divergence(self.draft.stds()), self.draft.normals
        return kl if normals is None else kl + normals.kl()

    def parameter_groups(
        self, lr: float, *, variational_lr: float | None = None, weight_decay: float = 0.0
    ) -> list[dict[str, Any]]:
        groups = super().parameter_groups(lr, variational_lr=variational_lr, weight_decay=weight_decay)
        biases = [values for _, values in self.draft.other_biases.items()]
        known = {id(values) for values in biases}
        for group in groups:
            if group["name"] == "variational":
                group["params"] = [p for p in group["params"] if id(p) not in known]
                group["lr"] *= self.factor_rate
        # The biases of the other components are weights like those of the first.
        groups[0]["params"] = [*groups[0]["params"], *biases]
        groups = [group for group in groups if group["params"]]
        normals = self.draft.normals
        return groups if normals is None else with_rates(groups, normals, self.draft.network, self.factor_rate)

    def posterior(self) -> Posterior:
        if "shared" not in self.draft.details:
            raise NetworkError(
                "where rows can have their own factors is learned from a batch: call loss(...) once first"
            )
        if self.draft.normals is not None:
            self.draft.normals.limit()
        return super().posterior()


def check_arrangement(value: str) -> None:
    """Refuse what is no arrangement of passes."""
    if value not in ("auto", "tile", "loop"):
        raise ConfigError(f'arrangement must be "auto", "tile" or "loop", got {value!r}')


def halved(
    half: Tensor, rows: slice, generator: torch.Generator | None, *, passes: int = 0, axis: int = 0
) -> tuple[Tensor, Tensor]:
    """Some rows of noise whose second half is the first with other signs, and signs [P, nodes] for passes.

    Noise costs more than what is made of it, so two halves of the rows, and all passes, share its size with signs of
    their own: where its law is symmetric each draw has that law, and none is correlated with another.

    Args:
        half: noise of the first half of the rows, which stand on `axis`.
        rows: those to give.
        generator: of the signs.
        passes: P.
        axis: of the rows.
    """
    shape = (passes + 1, *half.shape[axis + 1 :])
    signs = torch.randint(2, shape, generator=generator, device=half.device).to(half.dtype).mul_(2).sub_(1)
    whole = torch.cat([half, half * signs[-1]], axis)
    return whole.narrow(axis, rows.start, rows.stop - rows.start), signs[:-1]
