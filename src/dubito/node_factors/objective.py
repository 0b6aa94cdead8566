"""The loss of methods with doubt on the nodes: passes over a batch, tiled into one or made one by one."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ConfigError, NetworkError
from ..inputs import Batch, Inputs, Place, map_tensors, rows_of, take
from ..layers import shell
from ..layers.node_noise import Patches, Sides, by_row, factors_on
from ..layers.shell import Lease, seeded
from ..layers.sites import LAYERS, Site
from ..layers.trace import Layout, trace
from ..likelihoods import at_least_float
from ..objective import Loss, Objective
from ..posterior import Posterior
from .collected import collected, gradients
from .memory import tile_fits
from .posterior import NodePosterior, Stds

#: All passes through the network at once, one after the other, or whichever memory allows.
Arrangement = Literal["auto", "tile", "loop"]


@dataclass(frozen=True)
class Drawn:
    """What the passes over a batch share; methods add their noise.

    Attributes:
        stds: standard deviations of the factors by side and name.
        patches: what convolutions keep from pass to pass.
    """

    stds: Stds
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

    def __init__(
        self,
        draft: NodePosterior,
        *,
        arrangement: Arrangement = "auto",
        log_mixture: bool = False,
        factor_rate: float = 1.0,
        num_data: int,
        modes: Mapping[str, bool] | None = None,
    ) -> None:
        super().__init__(draft, num_data=num_data, modes=modes)
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
        """Noise for a batch: for all rows that processes share, of which these take theirs."""

    @abstractmethod
    def sides(self, site: Site, chosen: slice, drawn: Any) -> Sides:
        """The factors of some passes on the sides of a weight."""

    @abstractmethod
    def biases(self, chosen: slice, drawn: Any) -> dict[str, Tensor]:
        """Biases of some passes by name, [P, C], or [P, n, C] where rows have their own."""

    @abstractmethod
    def divergence(self, stds: Stds) -> Tensor:
        """The divergence that the loss counts, from the factors' standard deviations."""

    # -- where factors can stand ---------------------------------------------------------------------------

    def bind(self, inputs: Inputs) -> None:
        draft = self.draft
        if "shared" in draft.details:
            return
        modules = draft.network.named_modules(remove_duplicate=False)
        visits = trace(draft.network, inputs, [name for name, m in modules if isinstance(m, LAYERS)])
        additive = draft.method.additive
        shared = [s.parameter for s in draft.sites if not by_row(s, draft.network, visits, additive=additive)]
        if shared and self.arrangement == "tile":
            raise ConfigError(
                f"a tile needs factors per row, which these weights cannot have: {shared}; take arrangement='loop'"
            )
        draft.details["shared"] = shared
        sizes = [visit.size for visit in visits.values()]
        self.row_size, self.largest = sum(sizes), max(sizes, default=0.0)
        called = [visits[name] for site in draft.sites for name in site.modules if name in visits]
        rows_first = all(visit.layout is Layout.ROWS for visit in called)
        self.parts_late = not shared and rows_first and self.passes > 1 and self._parts_late(inputs)

    @torch.no_grad()
    def _parts_late(self, inputs: Inputs) -> bool:
        """Whether repeating rows at the first layers with factors gives what repeating the inputs gives."""
        few = take(inputs, slice(2))
        if rows_of(few) < 2:
            return False
        batch = Batch(few, torch.zeros(2))
        stream = torch.Generator(Place.of(self.draft.network).device).manual_seed(0)
        drawn = self.drawn(batch, stream)
        network = self.draft.network
        with seeded(network, 0, "parts late"):
            try:
                late = self._tiled(shell.take(network), batch, drawn, late=True)
            except (RuntimeError, ValueError, IndexError):  # rows that were repeated meet rows that were not
                return False
        with seeded(network, 0, "parts late"):
            early = self._tiled(shell.take(network), batch, drawn, late=False)
        return late.shape == early.shape and torch.allclose(late, early, rtol=1e-3, atol=1e-5)

    def tiles(self, batch: Batch) -> bool:
        """Whether all passes go through the network at once."""
        if self.draft.shared or self.arrangement == "loop":
            return False
        if self.arrangement == "tile":
            return True
        place, rows = Place.of(self.draft.network), rows_of(batch.inputs)
        return tile_fits(self.passes * rows, self.row_size, self.largest, place)

    # -- passes --------------------------------------------------------------------------------------------

    def outputs(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        """Outputs of all passes, one after the other, [P·n, ...]."""
        drawn = self.drawn(batch, generator)
        if self.tiles(batch):
            return self._tiled(self.lease(), batch, drawn, late=self.parts_late)
        return torch.cat([self.one_pass(index, batch, drawn) for index in range(self.passes)])

    def _tiled(self, lease: Lease, batch: Batch, drawn: Drawn, *, late: bool) -> Tensor:
        """Outputs of all passes at once, [P·n, ...]."""
        draft, everything = self.draft, slice(0, self.passes)
        inputs = batch.inputs
        if not late and self.passes > 1:
            inputs = map_tensors(lambda t: t.repeat(self.passes, *(1 for _ in t.shape[1:])), inputs)
        factors = factors_on(
            lease.module,
            {site: self.sides(site, everything, drawn) for site in draft.sites},
            self.biases(everything, drawn),
            passes=self.passes,
            rows=rows_of(batch.inputs),
            additive=draft.method.additive,
        )
        lease.enter(factors)
        return lease.outputs(inputs)

    def one_pass(self, index: int, batch: Batch, drawn: Drawn) -> Tensor:
        """Outputs of one pass, [n, ...]."""
        draft, chosen = self.draft, slice(index, index + 1)
        weights, shared = draft.weights(), draft.shared
        own: dict[Site, Sides] = {}
        folded: dict[str, Tensor] = {}
        for site in draft.sites:
            sides = self.sides(site, chosen, drawn)
            if site.parameter in shared:
                folded[site.parameter] = draft.perturbed(site, weights[site.parameter], sides)
            else:
                own[site] = sides
        biases = self.biases(chosen, drawn)
        rows, additive = rows_of(batch.inputs), draft.method.additive
        kept = {"additive": additive, "patches": drawn.patches}
        lease = self.lease()
        lease.enter(factors_on(lease.module, own, biases, passes=1, rows=rows, **kept))
        if folded:
            lease.fill(folded | {n: v[0] for n, v in biases.items()})
        return lease.outputs(batch.inputs)

    # -- loss ----------------------------------------------------------------------------------------------

    def batch_loss(
        self, batch: Batch, kl_weight: float, generator: torch.Generator | None, *, checked: bool = True
    ) -> Loss:
        drawn = self.drawn(batch, generator)
        if self.tiles(batch):
            outputs = self._tiled(self.lease(), batch, drawn, late=self.parts_late)
            each = outputs.view(self.passes, -1, *outputs.shape[1:])
            nll = self._nll([self._log_prob(one, batch, p, checked) for p, one in enumerate(each)])
        elif self.passes > 1 and not self.log_mixture and torch.is_grad_enabled() and not half_precision():
            nll = self._accumulated(batch, drawn, checked)
        else:
            each = (self.one_pass(index, batch, drawn) for index in range(self.passes))
            nll = self._nll([self._log_prob(one, batch, p, checked) for p, one in enumerate(each)])
        kl = self.divergence(drawn.stds)
        return Loss(nll + (kl_weight / self.num_data) * kl, nll, kl)

    def _log_prob(self, outputs: Tensor, batch: Batch, index: int, checked: bool) -> Tensor:
        """Log-likelihood of each row in one pass."""
        outputs, likelihood, targets = at_least_float(outputs), self.draft.likelihood, batch.targets
        if not checked:
            likelihood.check_outputs(outputs)
            targets = likelihood.check_targets(outputs, targets)
        return likelihood.log_prob(outputs, targets, index)

    def _nll(self, log_probs: list[Tensor]) -> Tensor:
        """Negative log-likelihood of the passes, mean over the rows   [rank-1, Section 3.4]."""
        stacked = torch.stack(log_probs)
        if not self.log_mixture:
            return -stacked.mean()
        return torch.tensor(float(self.passes)).log().to(stacked) - stacked.logsumexp(0).mean()

    def _accumulated(self, batch: Batch, drawn: Drawn, checked: bool) -> Tensor:
        """The mean over passes, each one's gradient taken before the next: one pass is in memory at a time."""
        leaves = {key: value.detach().requires_grad_() for key, value in drawn.stds.items()}
        apart = replace(drawn, stds=leaves)
        learned: list[Tensor] = []
        parts: list[Tensor] = []
        sums: list[Tensor | None] = []
        for index in range(self.passes):
            log_prob = self._log_prob(self.one_pass(index, batch, apart), batch, index, checked)
            if not parts:  # not before: a likelihood may take its shape from the first outputs
                learned = [p for p in self.draft.parameters() if p.requires_grad]
                sums = [None] * (len(learned) + len(leaves))
            part = -log_prob.mean() / self.passes
            sums = gradients(part, [*learned, *leaves.values()], sums)
            parts.append(part.detach())
        return collected(torch.stack(parts).sum(), [*learned, *drawn.stds.values()], sums)

    def kl(self) -> Tensor:
        return self.divergence(self.draft.stds())

    def parameter_groups(
        self, lr: float, *, variational_lr: float | None = None, weight_decay: float = 0.0
    ) -> list[dict[str, Any]]:
        groups = super().parameter_groups(lr, variational_lr=variational_lr, weight_decay=weight_decay)
        biases = [values for _, values in self.draft.other_biases.items()]
        own = {id(values) for values in biases}
        for group in groups:
            if group["name"] == "variational":
                group["params"] = [p for p in group["params"] if id(p) not in own]
                group["lr"] *= self.factor_rate
        # The biases of the other components are weights like those of the first.
        groups[0]["params"] = [*groups[0]["params"], *biases]
        return [group for group in groups if group["params"]]

    def posterior(self) -> Posterior:
        if "shared" not in self.draft.details:
            raise NetworkError(
                "where rows can have their own factors is learned from a batch: call loss(...) once first"
            )
        return super().posterior()


def check_arrangement(value: str) -> None:
    """Refuse what is no arrangement of passes."""
    if value not in ("auto", "tile", "loop"):
        raise ConfigError(f'arrangement must be "auto", "tile" or "loop", got {value!r}')


def half_precision() -> bool:
    """Whether gradients need the scaling that only the whole loss gets."""
    kinds = ("cpu", "cuda", "mps")
    return any(torch.is_autocast_enabled(k) and torch.get_autocast_dtype(k) is torch.float16 for k in kinds)
