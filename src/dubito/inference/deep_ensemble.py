"""Deep ensemble: networks trained apart from different starts [Lakshminarayanan et al. 2017]."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import jobs, seeds
from ..errors import ConfigError, DataError, require_count, require_positive
from ..fitting import Prepared, prepare
from ..hints import checked
from ..inputs import TensorOptions, weighted
from ..likelihoods import BuiltLikelihood, Gaussian, GaussianLikelihood, Likelihood, settings_of
from ..likelihoods.moments import per_output
from ..method import Method
from ..networks import copied, made, matched, renewed, require_alike, unshared
from ..posterior import (
    MAX_ROWS,
    Details,
    Drawer,
    MixturePosterior,
    Posterior,
    ShapeRule,
    Weighting,
    require_evidence,
    stored_tensors,
)
from ..prediction import PredictionOptions, RealPrediction
from ..training import AutoTraining, Processes, Run, RunFacts, Training, current, told
from ..training.beside import Join, train_many
from ..training.checkpoint import put
from ..training.members import joined_descent
from .map import MAP, PointPosterior


class DeepEnsemblePosterior(Posterior):
    """K sets of weights, each with its own batch norm statistics; the network holds the first."""

    details_type = Details

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.num_components = self.num_atoms = self.method.members

    def shapes(self) -> dict[str, ShapeRule]:
        return dict.fromkeys(("members", "statistics"), self.stacked_like_weights(self.num_components - 1))

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Member `index` mod K: its parameters and its buffers."""
        return stored_tensors(self.network) | dict(self.drawer()(index, generator))

    def drawer(self) -> Drawer:
        others = {**dict(self.group("members").items()), **dict(self.group("statistics").items())}

        def draw(index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
            member = index % self.num_components
            return {name: values[member - 1] for name, values in others.items()} if member else {}

        return draw

    def holds(self, name: str) -> str:
        return f"{self.num_components} members" if name in self.group("members") else "shared point"


@dataclass(frozen=True, kw_only=True)
class DeepEnsemble(Method):
    """Point estimates from different starts and orders of the data, averaged.

    Member 0 starts from the given weights, the others from those that `start` of `fit` makes, or, without it, from
    new ones by their modules' own rules. `from_networks` takes networks that are trained already.

    Args:
        members: how many networks.
        prior_std: standard deviation of a Normal prior around 0 on all weights; None is the flat prior.
        of: the method that is fitted from each start, as `Laplace(...)` or `SWAG()`: the posterior is the mixture of
            their posteriors. None keeps points.
        weights: of the members: "equal"; "evidence", by their marginal likelihoods, which Laplace has; or "stacking",
            those under which the validation rows of `fit` are likeliest.
    """

    members: int = 4
    prior_std: float | None = None
    of: Method | None = None
    weights: Weighting = "equal"

    posterior_type = DeepEnsemblePosterior

    def __post_init__(self) -> None:
        require_count(members=self.members)
        if self.prior_std is not None:
            require_positive(prior_std=self.prior_std)
        if isinstance(self.of, DeepEnsemble):
            raise ConfigError("of must be a method of one mode, got DeepEnsemble; raise members instead")
        if self.of is not None and self.prior_std is not None:
            raise ConfigError(f"prior_std is for points; give {type(self.of).__name__} its prior, in of=")
        if self.weights == "evidence":
            require_evidence((self.of or MAP()).posterior_type)

    def fit(
        self,
        net: nn.Module,
        data: Any,
        likelihood: Likelihood,
        *,
        training: Training | AutoTraining | Literal["auto"] | None = None,
        start: Callable[..., nn.Module] | None = None,
        **options: Any,
    ) -> Posterior:
        """As `Method.fit`, with one argument more.

        Args:
            net: where member 0 starts.
            data: as in `Method.fit`.
            likelihood: as in `Method.fit`.
            training: as in `Method.fit`.
            start: makes the network that another member starts from, with parameters and buffers like `net`'s; it is
                called with the member's number, or without arguments if it takes none, under a seed of the member's.
            options: the other arguments of `Method.fit`.
        """
        if start is not None and (isinstance(start, nn.Module) or not callable(start)):
            raise ConfigError(f"start must be a function that returns a network, got {type(start).__name__}")
        return self._fit(net, data, likelihood, training, {**options, "start": start})

    @classmethod
    @checked
    def from_networks(
        cls, networks: Sequence[nn.Module], likelihood: Likelihood, *, data: Any = None
    ) -> "DeepEnsemblePosterior":
        """The ensemble of networks that are trained already; they are copied.

        Args:
            networks: of one architecture.
            likelihood: what judges their outputs: `Gaussian(std=...)` where their noise is known.
            data: rows by whose residuals the noise of `Gaussian()` is set, member by member; best rows that were not
                trained on.
        """
        members = [copied(net).eval() for net in networks]
        if not members:
            raise ConfigError("networks must hold at least one network, got none")
        first = members[0]
        for number, member in enumerate(members):
            require_alike(first, member, f"networks[{number}]")
            matched(member, first)
        moving = {
            name
            for member in members
            for (name, tensor), start in zip(member.named_parameters(), first.parameters(), strict=True)
            if tensor.requires_grad or not torch.equal(tensor, start)
        }
        noise = _noise(members, settings_of(likelihood), data)
        method = cls(members=len(members))
        trainable = moving or set(stored_tensors(first))
        for member in members:
            unshared(member, trainable)
        return method._joined(
            [PointPosterior(member, noise, method=method, trainable=trainable) for member in members], []
        )

    def fit_prepared(self, prepared: Prepared, training: Training | None) -> Posterior:
        training = training or Training()
        if self.of is not None or self.weights != "equal":
            return self._mixture(prepared, training)
        device = TensorOptions.of(prepared.network).device
        # Members are whole runs: who has one less waits for the others longer than any step takes.
        processes = (prepared.run.processes or current(training.timeout, device)).patient()
        starts = [
            replace(
                prepared,
                network=self._start(prepared, member),
                likelihood=copy.deepcopy(prepared.likelihood),
                run=self._run(prepared.run, member, shown=processes.first),
            )
            for member in range(self.members)
        ]
        trained = [start for member, start in enumerate(starts) if member % processes.count == processes.rank]
        fitted = iter(self._trained(trained, training))
        points: list[Posterior] = []
        for member, start in enumerate(starts):
            owner = member % processes.count
            local = owner == processes.rank
            point = next(fitted) if local else PointPosterior(start.network, start.likelihood, method=self)
            processes.broadcast(list(point.stored().values()), owner)
            point.history = processes.broadcast_json(point.history, device, owner)
            if processes.first and not local:
                self._tell(prepared.run, member, point)
            points.append(point)
        history = [{**entry, "member": m} for m, point in enumerate(points) for entry in point.history]
        return self._joined(points, history)

    def _mixture(self, prepared: Prepared, training: Training) -> Posterior:
        """The mixture of posteriors around the members' modes, fitted one after the other."""
        validation = prepared.run.validation
        if self.weights == "stacking" and validation is None:
            raise ConfigError('weights="stacking" needs rows that are not trained on: fit(..., validation=rows)')
        method, parts = self.of or MAP(prior_std=self.prior_std), []
        for member in range(self.members):
            run = replace(self._run(prepared.run, member, shown=True), processes=prepared.run.processes)
            likelihood, network = copy.deepcopy(prepared.likelihood), self._start(prepared, member)
            start = replace(prepared, network=network, likelihood=likelihood, run=run)
            parts.append(method.fit_prepared(start, training))
        history = [{**entry, "member": m} for m, part in enumerate(parts) for entry in part.history]
        settings = replace(self, of=None if self.of is None else parts[0].method)
        mixture = MixturePosterior(parts, method=settings, history=history)
        return mixture.weighted(self.weights, validation, seed=prepared.seed)

    def _trained(self, starts: list[Prepared], training: Training) -> list[Posterior]:
        """The members of this process: side by side where one pass can serve them, and as jobs where asked."""
        workers = jobs.workers()
        if workers is None:
            return fit_members(self, starts, training)
        points = [MAP(prior_std=self.prior_std).objective(start).draft for start in starts]
        alone = [replace(start, run=replace(start.run, callbacks=())) for start in starts]
        shares = [(self, share, [alone[n] for n in share], training) for share in workers.shares(len(starts))]
        for share, members in workers.each(fit_share, shares):
            for number, (tensors, history) in zip(share, members, strict=True):
                put(points[number].stored(), tensors)
                points[number].history = history
                self._tell(starts[number].run, starts[number].run.member, points[number])
        return [point.finished() for point in points]

    def _tell(self, run: Run, member: int | None, point: Posterior) -> None:
        """Callbacks hear of a member that was trained in another process: of its epochs alone."""
        facts = RunFacts(title="MAP", member=member, validates=run.validation is not None)
        with told(facts, False, run.callbacks) as watching:
            for record in point.history:
                watching.epoch(record)

    def _start(self, prepared: Prepared, member: int) -> nn.Module:
        if member == 0:
            return prepared.network
        with seeds.forked(prepared.seed, "start", member, device=TensorOptions.of(prepared.network).device):
            if prepared.run.start is None:
                return renewed(prepared.network)
            return made(prepared.run.start, prepared.network, member)

    def _run(self, run: Run, member: int, *, shown: bool) -> Run:
        """A run of its own, in this process alone, with its own order of the data and its own checkpoint."""
        path = run.checkpoint
        if path is not None:
            path = Path(path).with_name(f"{Path(path).name}.member-{member}")
        seed = seeds.derived(run.seed, "member", member)
        watching = {"progress": run.progress if shown else False, "callbacks": run.callbacks if shown else ()}
        run = replace(run, seed=seed, checkpoint=path, processes=Processes(), start=None)
        return replace(run, member=member, **watching)

    def _joined(self, points: list[Posterior], history: list[dict[str, float]]) -> DeepEnsemblePosterior:
        first, *others = points
        members = [stored_tensors(point.network) for point in others]
        parameters = first.weights()
        names = [name for name in parameters if name in first.trainable]
        buffers = [name for name in stored_tensors(first.network) if name not in parameters]
        posterior = DeepEnsemblePosterior(
            first.network,
            joined_noise([point.likelihood for point in points]),
            method=self,
            tensors={"members": stacked(names, members), "statistics": stacked(buffers, members)},
            history=history,
            trainable=first.trainable,
        )
        return posterior.finished()


def _noise(members: Sequence[nn.Module], settings: Likelihood, data: Any) -> BuiltLikelihood:
    """The likelihood of networks that are trained; noise that nobody gives is that of each member's residuals."""
    first = members[0]
    gaussian = isinstance(settings, Gaussian)
    learned = gaussian and settings.std is None and settings.covariance is None
    if data is None:
        if gaussian and (learned or settings.standardise):
            raise ConfigError(
                f"the noise and units of {settings!r} are read off rows: pass data=, or Gaussian(std=...)"
            )
        like = TensorOptions.of(first)
        return settings.build(None).to(like.device, like.dtype)
    built = prepare(first, data, settings).likelihood
    if not (learned and isinstance(built, GaussianLikelihood)):
        return built
    stds = []
    for member in members:
        point = PointPosterior(member, built, method=MAP(), trainable=())
        prediction, targets, weights = point.predicted(
            data, PredictionOptions(num_samples=1, seed=0, max_rows=MAX_ROWS)
        )
        assert isinstance(prediction, RealPrediction)
        squares = weighted((targets - prediction.mean).square(), None if weights is None else weights / weights.mean())
        stds.append(per_output(squares).mean(1).sqrt().reshape(built.std().shape))
    if not all((std > 0).all() for std in stds):
        raise DataError("the networks answer these rows without any error; give other rows, or Gaussian(std=...)")
    return built.with_noise(std=torch.stack(stds) if len(stds) > 1 else stds[0])


def fit_members(method: DeepEnsemble, starts: list[Prepared], training: Training) -> list[Posterior]:
    """Members from their starts, side by side where one pass can serve them."""
    objectives = [MAP(prior_std=method.prior_std).objective(start) for start in starts]
    sources, runs = [start.source for start in starts], [start.run for start in starts]

    def join(rows: int) -> Join | None:
        return joined_descent(objectives, training, starts[0].example, rows)

    histories = train_many(objectives, sources, training, runs, join)
    for objective, history in zip(objectives, histories, strict=True):
        objective.draft.history = history
    return [objective.draft.finished() for objective in objectives]


def fit_share(method: DeepEnsemble, share: range, starts: list[Prepared], training: Training) -> Any:
    """A job: some members, as their numbers, tensors and histories."""
    with jobs.alone():
        points = fit_members(method, starts, training)
    return share, [(point.stored(), point.history) for point in points]


def stacked(names: list[str], members: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The named tensors of all members, along a new first axis."""
    return {name: torch.stack([tensors[name].detach() for tensors in members]) for name in names} if members else {}


def joined_noise(likelihoods: list[BuiltLikelihood]) -> BuiltLikelihood:
    """One likelihood in which draw s has the noise that member s mod K learned."""
    return likelihoods[0].joined(likelihoods)
