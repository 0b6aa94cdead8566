"""The one way in: data, network and likelihood checked and brought into one form before any work starts."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from . import networks, seeds
from .errors import DataError, DubitoError, NetworkError, ProcessError, require_count
from .fingerprints import first_difference, modules_of, weights_of
from .hints import Checked
from .inputs import SHARED, Batch, Inputs, RowNumbers, TensorOptions, checked_inputs, cut, named_tensors, rows_of, take
from .layers.shell import seeded
from .likelihoods import BuiltLikelihood, Likelihood, settings_of
from .likelihoods.moments import WeightedTargets
from .networks import copied, frozen_modes
from .processes import Processes, current
from .sources import (
    LoaderSource,
    Source,
    TensorSource,
    as_inputs_source,
    as_source,
    holds_rows,
    labelled_rows,
    reading,
    weighed,
)

#: Rows that are read at once for their targets, and seconds to wait for processes that read theirs.
TARGET_ROWS, PATIENCE = 1024, 600.0
#: Labels of the first rows that must repeat their inputs to be taken for those of a causal language model.
LEAST_COPIES = 4


@dataclass(frozen=True, kw_only=True)
class Run(Checked):
    """What surrounds a training run.

    Attributes:
        seed: of starts, data order and noise.
        progress: show a bar; None on terminals only.
        callbacks: those who watch the run.
        member: its number in an ensemble, for callbacks.
        checkpoint: a file to go on from.
        validation: rows that watch over training.
        processes: the processes that share the run; None asks `torchrun`.
        start: makes the networks that members of an ensemble start from; None resets the modules of one.
    """

    seed: int = 0
    progress: bool | None = None
    callbacks: tuple[Any, ...] = ()
    member: int | None = None
    checkpoint: str | os.PathLike[str] | None = None
    validation: Source | None = None
    processes: Processes | None = None
    start: Callable[..., nn.Module] | None = None


@dataclass(frozen=True, kw_only=True)
class Start:
    """What an objective is built from.

    Attributes:
        network: a copy of the user's network, in evaluation mode.
        likelihood: the built likelihood.
        num_data: the number of rows the posterior answers for, the sum of their weights.
        modes: modules by name that stay in evaluation mode while training.
        run: seed, progress, checkpoint and validation data.
    """

    network: nn.Module
    likelihood: BuiltLikelihood
    num_data: float
    modes: Mapping[str, bool] = field(default_factory=dict)
    run: Run = Run()

    @property
    def seed(self) -> int:
        """Of everything random."""
        return self.run.seed


@dataclass(frozen=True, kw_only=True)
class Prepared(Start):
    """A fit's ingredients, all checked.

    Attributes:
        source: the training rows.
        example: its first rows, targets in the likelihood's form.
    """

    source: Source
    example: Batch

    @property
    def rows(self) -> int:
        """The number of rows that are read, whatever they weigh."""
        return self.source.num_data or max(1, round(self.num_data / self.source.mean_weight))


def prepare_start(net: nn.Module, likelihood: Likelihood, num_data: int, seed: int) -> Start:
    """The start of a training loop of the user's own, whose data come later."""
    require_count(num_data=num_data)
    seeds.derived(seed)  # refuses what is no seed
    built = settings_of(likelihood).build(None)
    network = copied(net).eval()
    return Start(network=network, likelihood=built, num_data=num_data, modes=frozen_modes(net), run=Run(seed=seed))


def prepare(
    net: nn.Module,
    data: Any,
    likelihood: Likelihood,
    *,
    validation: Any = None,
    num_data: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: bool | None = None,
    callbacks: tuple[Any, ...] = (),
    start: Callable[..., nn.Module] | None = None,
) -> Prepared:
    """Check everything a fit is given and bring it into one form; the arguments are those of `fit`."""
    seeds.derived(seed)
    settings = settings_of(likelihood)
    network = copied(net).eval()
    watched = None if validation is None else as_source(validation, TensorOptions.of(network), "validation")
    told = {"progress": progress, "callbacks": callbacks}
    run = Run(seed=seed, checkpoint=checkpoint, validation=watched, start=start, **told)
    return _prepared(network, frozen_modes(net), data, settings, num_data, run)


def prepare_more(
    network: nn.Module,
    data: Any,
    likelihood: BuiltLikelihood,
    *,
    num_data: int | None = None,
    validation: Any = None,
    seed: int = 0,
) -> Prepared:
    """The same for more data of a network that is fitted already, judged by its own likelihood.

    Args:
        network: a posterior's, in evaluation mode; it is not copied.
        data: as in `Method.fit`.
        likelihood: the posterior's.
        num_data: as in `Method.fit`.
        validation: as in `Method.fit`.
        seed: of everything random.
    """
    seeds.derived(seed)
    watched = None if validation is None else as_source(validation, TensorOptions.of(network), "validation")
    return _prepared(network, {}, data, likelihood, num_data, Run(seed=seed, validation=watched))


def _prepared(
    network: nn.Module,
    modes: Mapping[str, bool],
    data: Any,
    likelihood: Likelihood | BuiltLikelihood,
    num_data: int | None,
    run: Run,
) -> Prepared:
    if num_data is not None:
        require_count(num_data=num_data)
    source = as_source(data, TensorOptions.of(network))
    with reading(source, run.seed, "example"):
        example = source.example()
    watched = None
    if run.validation is not None:
        with reading(run.validation, run.seed, "example"):
            watched = run.validation.example(1)
    outputs = _first_outputs(network, example, source)
    _check_dependence(network, take(example.inputs, slice(1)), outputs)
    if watched is not None:
        probe(network, watched.inputs)
    raw = source.batch.targets if isinstance(source, TensorSource) else example.targets
    fitted = isinstance(likelihood, BuiltLikelihood)
    plain = likelihood if fitted else likelihood.build(outputs)
    plain.check_outputs(outputs)
    for rows in (source, run.validation):
        if rows is not None:
            rows.check_targets(lambda _, targets, numbers: plain.check_targets(outputs, targets, numbers))
    checked = example._replace(targets=plain.check_targets(outputs, example.targets))
    if plain.ignores:
        plain.log_prob(outputs, checked.targets)  # lengths are compared where both are known
        _require_shift(example, plain)
        source, run = _labelled(source, run, plain, counts_all=num_data is None)
        with reading(source, run.seed, "example"):
            checked = source.example()
    like, given = TensorOptions.of(network), source
    with reading(source, run.seed, "weights"):
        source = weighed(source, checked, like, plain.row_weights)
        if source is not given:
            checked = source.example()
            raw = source.batch.targets if isinstance(source, TensorSource) else checked.targets
    if run.validation is not None and watched is not None:
        with reading(run.validation, run.seed, "weights"):
            run = replace(run, validation=weighed(run.validation, watched, like))
    known = num_data or _whole(source.total_weight) or source.num_data
    if known is None:
        raise DataError("the number of rows must be known, but these data do not tell it; pass num_data=")
    return Prepared(
        network=network,
        modes=modes,
        source=source,
        example=checked,
        likelihood=plain if fitted else _built(likelihood, source, outputs, raw, run.seed),
        num_data=known,
        run=run,
    )


def _whole(total: float | None) -> float | None:
    """A sum of weights, as a whole number where it is one."""
    return total if total is None or total % 1 else int(total)


def _labelled(source: Source, run: Run, likelihood: BuiltLikelihood, *, counts_all: bool) -> tuple[Source, Run]:
    """Sources without rows whose labels are all ignored: they are no observations, and counted nowhere."""
    watched = run.validation
    with reading(source, run.seed, "labels"):
        source = source.with_labels(likelihood.observed)
    if isinstance(source, LoaderSource):
        source.counts_all = counts_all and source.num_data is not None
    if watched is not None:
        with reading(watched, run.seed, "labels"):
            run = replace(run, validation=watched.with_labels(likelihood.observed))
    return source, run


def _require_shift(example: Batch, likelihood: BuiltLikelihood) -> None:
    """Refuse labels that repeat the inputs position by position, which a causal language model would learn to copy."""
    named = example.inputs if isinstance(example.inputs, Mapping) else {}
    tokens, targets = named.get("input_ids"), example.targets
    if tokens is None or "decoder_input_ids" in named or tokens.shape != targets.shape:
        return
    seen = likelihood.observed(targets)
    repeated = seen is not None and int(seen.sum()) >= LEAST_COPIES and bool((tokens == targets)[seen].all())
    if repeated and not getattr(likelihood.settings, "shift", True):
        raise DataError(
            "the labels repeat input_ids position by position, as causal language models of Transformers take them, "
            "which shift them inside of their loss: use Categorical(ignore_index=-100, shift=True), or shift them"
        )


def _check_dependence(network: nn.Module, row: Inputs, outputs: Tensor) -> None:
    """Refuse a network whose outputs do not depend on what is to be fitted, or whose width depends on the rows."""
    with torch.enable_grad(), seeded(network, 0, "probe"):
        alone = read(partial(networks.run, network, {}), row)
    if alone.shape[1:] != outputs.shape[1:]:
        raise NetworkError(
            f"the network must answer a row alike alone and among others, got outputs of shape {tuple(alone.shape)} "
            f"for one row and {tuple(outputs.shape)} for {len(outputs)}"
        )
    if networks.trainable(network) and not alone.requires_grad:
        raise NetworkError(
            "the network's outputs must depend on its trainable parameters, but nothing leads back to them; take away "
            "the detach(), no_grad() or rounding that cuts the graph"
        )


def _first_outputs(network: nn.Module, example: Batch, source: Source) -> Tensor:
    """Outputs for the first rows; a network that reads all rows together alone is told so."""
    try:
        return probe(network, example.inputs)
    except DataError as error:
        if not isinstance(source, TensorSource) or rows_of(example.inputs) == rows_of(source.batch.inputs):
            raise
        try:
            answered(network, source.batch.inputs)
        except DubitoError:
            raise error from None
        raise DataError(
            f"the network reads all {rows_of(source.batch.inputs)} rows together, and not the first "
            f"{rows_of(example.inputs)} alone; {SHARED}"
        ) from error


def _built(settings: Likelihood, source: Source, outputs: Tensor, targets: Tensor, seed: int) -> BuiltLikelihood:
    """The likelihood from a few outputs and the targets at hand, or from all of them where it asks for all."""
    whole = isinstance(source, TensorSource)
    if whole or not getattr(settings, "standardise", False):
        weights = source.raw_weights if isinstance(source, TensorSource) else None
        built = settings.build(outputs, targets if weights is None else WeightedTargets(targets, weights))
        built.warn(outputs, targets)
        return built
    with reading(source, seed, "targets"):
        batches = source.batches(TARGET_ROWS)
        built = settings.build(
            outputs,
            (
                batch.targets
                if batch.weights is None
                else WeightedTargets(batch.targets, batch.weights * source.mean_weight)
                for batch in batches
            ),
        )
    # Loaders of several processes may have orders of their own, and so sums with other last digits.
    current(PATIENCE, outputs.device).broadcast(list(built.state_dict().values()))
    return built


def require_agreement(prepared: Prepared, timeout: float) -> None:
    """Refuse processes of one run that were given different data, networks or seeds; all of them learn of it.

    Args:
        prepared: what this process was given.
        timeout: seconds to wait for the others.
    """
    device = TensorOptions.of(prepared.network).device
    processes = prepared.run.processes or current(timeout, device)
    if processes.count == 1:
        return
    validation = prepared.run.validation
    facts = {
        "seed": int(prepared.seed),
        "num_data": int(prepared.num_data),
        "data": prepared.source.digest(),
        "validation": validation and validation.digest(),
        "network": modules_of(prepared.network, prepared.modes),
        "first weights": weights_of(prepared.network),
    }
    first = processes.broadcast_json(facts, device)
    differences = processes.gathered_json(first_difference(first, facts), device)
    for rank, difference in enumerate(differences):
        if difference is not None:
            name, there, here = difference
            raise ProcessError(
                f"processes of one run must make the same call, but {name} is {there!r} in process 0 and {here!r} in "
                f"process {rank}; give all of them the same data, seed and network, built with the same weights "
                "(torch.manual_seed before it): each takes its share of the rows by itself"
            )


def checked_rows(
    network: nn.Module,
    likelihood: BuiltLikelihood,
    data: Any,
    *,
    seed: int,
    max_rows: int,
    whole: bool = True,
    name: str = "data",
) -> Iterator[Batch]:
    """Rows to judge a fitted network by, targets in the likelihood's form.

    Args:
        network: in evaluation mode.
        likelihood: that judges it.
        data: a pair, a `Dataset` or a `DataLoader`.
        seed: of what loaders draw.
        max_rows: the size of batches that are read.
        whole: rows in memory come as one batch all the same.
        name: of the data, for messages.
    """
    source = as_source(data, TensorOptions.of(network), name)

    def check(inputs: Inputs, targets: Tensor, rows: RowNumbers) -> Tensor:
        return likelihood.check_targets(answered(network, take(inputs, slice(1))), targets, rows)

    source.check_targets(check)
    some = False
    for batch in read_batches(source, seed, max_rows, whole, name):
        batch = labelled_rows(batch, likelihood.observed) if likelihood.ignores else batch
        if len(batch.targets):
            some = True
            yield batch
    if not some:
        raise DataError(f"{name} must hold at least one row with a label, got none")


def checked_pieces(network: nn.Module, data: Any, *, seed: int, max_rows: int) -> Iterator[Inputs]:
    """Rows to predict, some at a time.

    Args:
        network: that is to read them.
        data: inputs, cut before they are looked at, so that an array on a disk is not read whole; or a `Dataset` or
            a `DataLoader`, with or without targets.
        seed: of what loaders draw.
        max_rows: the size of pieces; a loader with an order of its own gives its own batches.
    """
    options = TensorOptions.of(network)
    if holds_rows(data):
        batches = read_batches(as_inputs_source(data, options), seed, max_rows, False, "data")
        return (batch.inputs for batch in batches)
    return (checked_inputs(piece, options) for piece in cut(data, max_rows))


def read_batches(source: Source, seed: int, max_rows: int, whole: bool, name: str) -> Iterator[Batch]:
    """The batches of a source whose targets were checked, each read under a derived state of the generators."""
    held = isinstance(source, TensorSource)
    batches = iter([source.batch] if whole and held else source.batches(max_rows))
    for number in count():
        # Loaders draw from the global state; a lone reading must not leave it changed between batches.
        with reading(source, seed, name, number):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


@contextmanager
def undisturbed(prepared: Prepared, *path: str) -> Iterator[None]:
    """While open, sources and networks in evaluation mode that draw from the global state find a derived one.

    Training passes see to theirs step by step.
    """
    seed, network = prepared.seed, prepared.network
    with reading(prepared.source, seed, *path, device=TensorOptions.of(network).device), seeded(network, seed, *path):
        yield


def probe(network: nn.Module, inputs: Inputs) -> Tensor:
    """The network's outputs for a few rows, which must be finite."""
    outputs = answered(network, inputs)
    if not outputs.isfinite().all():
        raise NetworkError("the network's outputs on the first rows hold NaN or infinity; check its weights")
    return outputs


def answered(network: nn.Module, inputs: Inputs) -> Tensor:
    """The network's outputs, of which nothing is asked but that there are as many rows."""
    with torch.no_grad(), seeded(network, 0, "probe"):
        return read(partial(networks.run, network, {}), inputs)


def read(function: Callable[[Inputs], Tensor], inputs: Inputs) -> Tensor:
    """What a network answers, or an error that says what it could not read or answered wrongly.

    Args:
        function: from inputs to outputs.
        inputs: some rows.
    """
    try:
        outputs = function(inputs)
    except (DubitoError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(inputs)}
        raise DataError(f"the network cannot read inputs of shape {shapes}: {error}") from error
    rows = rows_of(inputs)
    if outputs.ndim == 0 or len(outputs) != rows:
        alone = (
            "; a single row needs an axis of rows, x[None]" if isinstance(inputs, Tensor) and inputs.ndim < 2 else ""
        )
        raise NetworkError(
            f"the network must answer {rows} rows with {rows} rows of outputs on the first axis, "
            f"got shape {tuple(outputs.shape)}{alone}"
        )
    return outputs
