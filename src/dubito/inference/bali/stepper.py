"""BALI's update rule: a forward and a backward pass, sums of products, and every layer's regression anew."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypedDict

import torch
from torch import Tensor

from ... import seeds
from ...errors import ConfigError, warn
from ...inputs import Batch, TensorOptions, call, rows_of
from ...layers import Dense
from ...layers.passes import asking
from ...storage.schema import Positive, Within, conform
from ...training import GradientStepper, Plan, Processes, Stepper, StepRecord, Training
from ...training.checkpoint import check_forms, forms_of
from .layer import Layer
from .local import FewCases, LayerNoise
from .posterior import sampled_root
from .products import cases, gram

if TYPE_CHECKING:
    from .method import BALI
    from .objective import BALIObjective

#: A layer's factor serves a step for so many inputs and outputs, and so many steps at most.
WIDE_LAYER, MOST_STEPS = 256, 8
#: Cases are few where so many times them are not more than a layer's inputs and outputs.
FEW = 8
#: What a layer keeps beside the posterior's own tensors.
KEPT = ("sums", "squares", "factor", "before", "jitter", "failures")


@dataclass(eq=False)
class StepSums:
    """What all passes of a step saw.

    Attributes:
        nll: the negative log-likelihood, summed over rows.
        grams: sums of products by block.
        cases: over how many rows and positions each was summed.
        columns: the cases themselves, in place of sums; see `products.cases`.
        drawn: V and X Wᵀ of layers whose drawn weights were not written out; see `FewCases`.
    """

    nll: Tensor
    grams: dict[str, Tensor]
    cases: dict[str, float]
    columns: dict[str, list[Tensor]] = field(default_factory=dict)
    drawn: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, name: str, sums: Tensor, cases: float) -> None:
        """Add the sums of one pass."""
        self.grams[name] = self.grams[name].add_(sums) if name in self.grams else sums
        self.cases[name] = self.cases.get(name, 0.0) + cases


class LayerwiseFacts(TypedDict):
    """What steps keep beside tensors: Π (1 − β_s), and settings that rows have chosen."""

    remainder: Annotated[float, Within(0, 1)]
    chosen: NotRequired[tuple[Positive, Positive | None]]
    points: NotRequired[dict[str, Any]]


class LayerwiseStepper(Stepper):
    """What is the same for one network and for a stack of replicas.

    Args:
        layers: what is known of each block, by name.
        method: the settings.
        last: name of the block that learns from the targets themselves, or None.
        plan: of the run.
        processes: who share it.
    """

    def __init__(
        self, layers: dict[str, Layer], method: "BALI", last: str | None, plan: Plan, processes: Processes
    ) -> None:
        self.layers, self.method, self.last = layers, method, last
        self.plan, self.processes = plan, processes
        self.remainder = 1.0  # Π (1 − β_s)
        #: After how many steps each layer is factorised anew.
        self.every = {
            name: method.refactor_every or min(MOST_STEPS, max(1, layer.sums.shape[-1] // WIDE_LAYER))
            for name, layer in layers.items()
        }
        for layer in layers.values():
            self._check(layer)

    def _check(self, layer: Layer) -> None:
        """Refuse settings under which a layer's noise covariance has no density."""
        outputs, rows = layer.mean.shape[1], self.plan.step_rows
        if rows < outputs and not layer.prior.floor.all():
            raise ConfigError(
                f"a floor of 0 needs batches of at least as many rows as a layer has outputs, but {layer.name!r} "
                f"has {outputs} and a step sees {rows} rows; raise hidden_floor or output_floor, or batch_size"
            )
        least = float(layer.prior.data.min())
        if self.method.covariance == "sampled" and least <= outputs - 1:
            raise ConfigError(
                f"a sampled covariance needs effective_data above the outputs of a layer less one, but "
                f"{layer.name!r} has {outputs} and effective_data is {least:g}; raise it, or take covariance='mode'"
            )

    #: Whether means and roots of layers follow every step, and not only when the posterior is read.
    eager = True

    @abstractmethod
    def commit(self) -> None:
        """Put what was inferred where the next step reads it."""

    def width(self, name: str) -> int:
        """The side of a block's sums of products."""
        return self.layers[name].sums.shape[-1]

    def rate(self, number: int) -> float:
        """β at a step."""
        return self.method.update_rate * self.method.schedule.factor(self.plan.progress(number))

    @property
    def correction(self) -> float:
        """b_t = 1 − Π (1 − β_s), for rates that change."""
        return 1 - self.remainder

    @torch.no_grad()
    def learn(self, number: int, seen: StepSums, weights: Mapping[str, Tensor]) -> float:
        """Take in what a step saw and infer all layers; returns the rate."""
        rate, momentum = self.rate(number), self.method.momentum
        self.remainder *= 1 - rate
        for name, layer in self.layers.items():
            went = weights[name]
            if momentum:  # pseudo-targets go on by μ X (M − M_before)ᵀ
                went = went + momentum * (layer.mean - layer.before)
                layer.before.copy_(layer.mean)
            cases = self.see(layer, name, seen, rate, went)
            every, new = self.every[name], rate / self.correction
            few = cases is not None and cases[0].shape[1] <= layer.sums.shape[-1]
            if cases is None or not few or number < every or number % every == 0 or new > 0.5:
                layer.infer(self.correction)
            else:
                white = seen.drawn[name][0] if name in seen.drawn else layer.whitened(cases[0])
                layer.move(white, cases[1], new)
            if self.eager:
                layer.settle()
        self.commit()
        return rate

    def see(
        self, layer: Layer, name: str, seen: StepSums, rate: float, weights: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Take in what a step saw of a layer; gives inputs and targets where it saw cases."""
        step_size, columns = self.method.step_size, seen.columns.get(name)
        if columns is not None:
            inputs, *noise, last = columns
            if name != self.last:
                outputs = seen.drawn[name][1] if name in seen.drawn else inputs @ weights.mT
                outputs = outputs + noise[0] if noise else outputs
                last = layer.pseudo_targets(outputs, last, rate, self.correction, step_size)
            layer.see_cases(inputs, last, rate)
            return inputs, last
        if name == self.last:
            layer.see_targets(seen.grams[name], seen.cases[name], rate)
        else:
            layer.see_gradients(
                seen.grams[name], seen.cases[name], rate, self.correction, weights=weights, step_size=step_size
            )
        return None

    def settle(self, step: int) -> None:
        for layer in self.layers.values():
            layer.check(step)
            layer.settle()

    def combine(self, seen: StepSums, extra: list[Tensor], stop: bool) -> bool:
        """Sum over processes, in one message; one without rows takes part with zeros."""
        if self.processes.count == 1:
            return stop
        counts = [seen.cases.get(name, 0.0) for name in self.layers]
        cases = torch.tensor([*counts, float(stop)], dtype=torch.float64)
        for name, layer in self.layers.items():
            if name not in seen.grams:
                width = self.width(name)
                seen.grams[name] = layer.sums.new_zeros(len(layer.sums), width, width)
        cases = cases.to(seen.nll.device) if seen.nll.device.type != "mps" else cases.float().to("mps")
        self.processes.sum([*(seen.grams[name] for name in self.layers), cases, seen.nll, *extra])
        *counts, wish = cases.tolist()
        seen.cases = dict(zip(self.layers, counts, strict=True))
        return wish > 0

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"{name}:{key}": getattr(layer, key) for name, layer in self.layers.items() for key in KEPT}
        return tensors, {"remainder": self.remainder}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        conform(facts, LayerwiseFacts, "the facts of steps")
        layers = {name: tensor for name, tensor in tensors.items() if not name.startswith("points:")}
        check_forms(layers, forms_of(LayerwiseStepper.state(self)[0]), "the state of layers")
        for name, layer in self.layers.items():
            for key in KEPT:
                getattr(layer, key).copy_(tensors[f"{name}:{key}"])
        self.remainder = facts["remainder"]

    def jitters(self) -> dict[str, int]:
        """How often a factorisation needed a jitter, by block; a warning says so where any did."""
        totals = {name: int(layer.failures.sum()) for name, layer in self.layers.items()}
        counts = {name: count for name, count in totals.items() if count}
        if counts:
            listed = ", ".join(f"{name} {count} times" for name, count in counts.items())
            warn(
                f"factorisations needed a jitter on the diagonal: {listed}; raise hidden_floor or output_floor, "
                "take a larger batch_size, or use double precision"
            )
        return counts


class BALIStepper(LayerwiseStepper):
    """One network.

    Args:
        objective: with the posterior under training.
        training: settings of the run; its rates are those of points.
        plan: of the run.
        processes: who share it.
        seed: of the noise.
    """

    def __init__(
        self, objective: "BALIObjective", training: Training, plan: Plan, processes: Processes, seed: int
    ) -> None:
        topology, method = objective.topology, objective.draft.method
        layers = {block.name: objective.layer(block) for block in topology.blocks}
        super().__init__(layers, method, objective.last, plan, processes)
        self.objective, self.topology, self.seed = objective, topology, seed
        self.draft, self.device = objective.draft, TensorOptions.of(objective.draft.network).device
        self.eager = method.momentum > 0 or method.sampling != "weight"
        self.points = GradientStepper(objective, training, plan, processes, seed) if objective.beside() else None
        #: The blocks whose drawn weights need not be written out.
        self.dense = {
            block.name: block
            for block in topology.blocks
            if topology.plain(block)
            and isinstance(topology.cover.parts[block.name][0].product, Dense)
            and not self.eager
            and method.covariance == "mode"
        }
        #: The blocks whose outputs get the noise, instead of their weights.
        self.local = {
            block.name: block for block in topology.blocks if method.sampling == "local" and topology.plain(block)
        }

    def step(self, number: int, passes: Sequence[Batch | None], rows: int, stop: bool) -> StepRecord:
        single = len(passes) == self.processes.count == 1
        weights, units = self.weights(number, rows if single else None)
        seen = StepSums(torch.zeros((), dtype=self.dtype, device=self.device), {}, {})
        point_parameters = [] if self.points is None else self.points.parameters
        for parameter in point_parameters:
            parameter.grad = torch.zeros_like(parameter)
        for index, batch in enumerate(passes):
            if batch is not None:
                self.look(batch, weights, units, seen, number, index, single=single)
        slopes = [parameter.grad for parameter in point_parameters if parameter.grad is not None]
        for slope in slopes:
            slope.div_(-rows)  # from the sum of the log-likelihood to its negative mean
        stop = self.combine(seen, slopes, stop)
        rate = self.learn(number, seen, weights)
        norm = None
        if self.points is not None:
            norm = self.points.norm(number)
            self.points.descend(number)
        nll = seen.nll / rows
        return StepRecord(number, torch.stack([nll, nll, torch.zeros_like(nll)]), rows, rate, norm, stop)

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights."""
        return next(iter(self.layers.values())).mean.dtype

    @torch.no_grad()
    def weights(self, number: int, rows: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The weights of a step's forward pass by block: drawn, or the means where noise is elsewhere.

        Layers that meet few rows have units of noise instead, from which `FewCases` draws what they give.
        """
        means = {name: layer.mean for name, layer in self.layers.items()}
        if number == 0 or self.method.sampling == "deterministic":
            return means, {}
        stream = seeds.generator(self.seed, "noise", number, device=self.device)
        sizes = [mean.numel() for mean in means.values()]
        noise = torch.randn(sum(sizes), generator=stream, dtype=self.dtype, device=self.device).split(sizes)
        units = dict(zip(self.layers, noise, strict=True))
        few = {
            name: units[name].view_as(means[name])
            for name in self.dense
            if rows is not None and FEW * rows <= self.width(name)
        }
        drawn = {
            name: self.drawn(layer, units[name], stream)
            for name, layer in self.layers.items()
            if name not in few and name not in self.local
        }
        return means | drawn, few

    def drawn(self, layer: Layer, unit: Tensor, stream: torch.Generator) -> Tensor:
        """Weights [K, m, n] from a layer's posterior as it stands, by unit noise for them and more for Σ."""
        root = layer.output_root()
        if self.method.covariance == "sampled":
            assert self.method.effective_data is not None
            root = sampled_root(root, self.method.effective_data, stream)
        return layer.drawn(unit, root)

    def look(
        self,
        batch: Batch,
        weights: Mapping[str, Tensor],
        units: Mapping[str, Tensor],
        seen: StepSums,
        number: int,
        index: int,
        *,
        single: bool,
    ) -> None:
        """A forward and a backward pass over some rows, and the cases or sums of products they give.

        Args:
            batch: the rows.
            weights: of the pass, by block.
            units: of noise, of blocks whose weights are not written out.
            seen: what is added to.
            number: of the step.
            index: of the pass.
            single: whether it is the only pass of all processes, whose cases need not be summed.
        """
        network, rows = self.draft.network, rows_of(batch.inputs)
        tensors: dict[str, Tensor] = {name: network.get_parameter(name) for name in self.topology.points}
        for block in self.topology.blocks:
            tensors |= block.tensors(weights[block.name])
        stream = seeds.generator(self.seed, "noise", number, index, "rows", device=self.device)
        local = {block.weight: (self.layers[name], block.bias is not None) for name, block in self.local.items()}
        noise = LayerNoise(local, batch, stream, silent=number == 0) if local else None
        few = FewCases(
            {
                self.dense[name].weight: (
                    self.layers[name],
                    unit,
                    self.layers[name].output_root(),
                    self.dense[name].bias is not None,
                )
                for name, unit in units.items()
            }
        )
        record = self.topology.cover.record(inner=noise or (few if units else None))
        with (
            torch.enable_grad(),
            asking(
                network, record, self.topology.cover.parameters, tensors, detached=True, training=self.objective.modes
            ) as shell,
        ):
            likelihood = self.draft.likelihood
            total = likelihood.log_prob(call(shell, batch.inputs), batch.targets).sum()
            total.backward()
        with torch.no_grad():
            seen.nll -= total
            seen.drawn = {name: few.seen[self.dense[name].weight] for name in units}
            for block in self.topology.blocks:
                targets = likelihood.standardised(batch.targets) if block.name == self.last else None
                added = noise.added(block.weight) if noise is not None and block.name in self.local else None
                if targets is not None:
                    added = None  # true targets need no forward pass of their own layer
                asked = self.topology.cover.parts[block.name], record, rows, targets, added
                columns = cases(*asked, always=block.name in units) if single else None
                if columns is None:
                    seen.add(block.name, *gram(*asked))
                else:
                    seen.columns[block.name] = columns

    def width(self, name: str) -> int:
        noisy = name in self.local and name != self.last
        return super().width(name) + (self.layers[name].mean.shape[1] if noisy else 0)

    def commit(self) -> None:
        if self.last is not None:
            self.objective.put_noise(self.layers[self.last].output_root())

    def close_epoch(self, step: int, last: bool) -> None:
        choice = self.objective.choice
        due = choice is not None and choice.due(self.plan.progress(step), last)
        if choice is not None and due:
            best = choice.best(self.layers, self.correction)  # in all processes, whose layers stay alike
            self._take(self.processes.broadcast_json([best.effective_data, best.output_floor], self.device))
        for name, layer in self.layers.items():
            if due or (last and self.every[name] > 1):
                layer.infer(self.correction)
        super().close_epoch(step, last)

    def _take(self, settings: Sequence[float]) -> None:
        """Go on with chosen effective data and floor, and with the rows that chose them."""
        choice = self.objective.choice
        assert choice is not None
        data, floor = settings
        self.method = replace(self.method, effective_data=data, output_floor=floor)
        self.objective.take(self.method, self.layers)
        choice.source.release()
        choice.made = True

    def settle(self, step: int) -> None:
        super().settle(step)
        if step:  # before the first, network and likelihood are as they came
            self.objective.commit(self.layers)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().state()
        choice = self.objective.choice
        if choice is not None and choice.made:
            facts["chosen"] = [self.method.effective_data, self.method.output_floor]
        if self.points is not None:
            point_tensors, facts["points"] = self.points.state()
            tensors |= {f"points:{name}": tensor for name, tensor in point_tensors.items()}
        return tensors, facts

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        super().restore(tensors, facts)
        if "chosen" in facts:
            self._take(facts["chosen"])
        for block in self.topology.blocks:  # the checkpoint's means came back into the network
            self.layers[block.name].mean.copy_(block.matrix(self.draft.weights()))
        if self.points is not None:
            point_tensors = {name[7:]: tensor for name, tensor in tensors.items() if name.startswith("points:")}
            self.points.restore(point_tensors, facts["points"])
