"""The posterior every method returns: a distribution over the network's own parameters."""

import copy
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

import torch
from torch import Tensor, nn

from .. import seeds, storage
from ..draws import Draws, FactorDraws, LinearisedDraws, WeightDraws, deviations, weight_stacks
from ..errors import ConfigError, NetworkError, require_count, require_positive
from ..evaluation import evaluate
from ..fitting import checked_pieces, checked_rows, read
from ..hints import checked
from ..inputs import Inputs, TensorOptions, call, checked_inputs, chunks, take
from ..layers import Survey, reasons, survey
from ..layers.sharded import is_sharded, whole_tensors
from ..layers.shell import seeder
from ..layers.shell import take as take_shell
from ..layers.tree import deep_copy
from ..lazy import open_all
from ..likelihoods import BuiltLikelihood
from ..networks import duplicate, extra_states, run, with_flags
from ..precision import Precision, passes_in
from ..prediction import ClassPrediction, Prediction, PredictionOptions, require_answers
from ..prediction.classes import targets_as_long
from ..sources import holds_rows, named_target
from ..summary import Summary, SummaryRow
from .fingerprint import fingerprint
from .stored import ShapeRule
from .tensors import NamedTensors, base_of, flagged, stored_tensors

if TYPE_CHECKING:
    from .sampled import SampledPosterior

#: Rows that go through the network at once: larger pieces are slower on CPUs and fill accelerators.
MAX_ROWS = 1024
#: Before the names of groups that hold what kept factors deviate from.
CENTRAL = "central_"

#: The generators of draws.
Streams: TypeAlias = Sequence[torch.Generator | None]
#: From the number of a draw and its generator to tensors by name; what does not vary may be left out.
Drawer: TypeAlias = Callable[[int, torch.Generator | None], Mapping[str, Tensor]]

#: Held while a posterior of an older file surveys its network.
_surveying = threading.Lock()


class Posterior(nn.Module, ABC):
    """A distribution over the network's parameters; subclasses implement `draw`, the rest is written once.

    Attributes:
        network: a copy of the user's network, in evaluation mode, that holds the centre of the distribution.
        likelihood: the built likelihood, with its learned noise.
        method: the settings that made this posterior.
        tensors: what the method keeps beside the weights, as groups of tensors by parameter name; the group
            "statistics" holds what is not a parameter.
        details: the plain facts the method needs to read its tensors; under "points" why parameters that could have
            a distribution have none, by name.
        history: what training recorded, one dict per epoch.
        trainable: the parameters that required gradients in the user's network, as they do again after `fold`;
            None reads them off `network`, which a posterior at rest no longer tells.
        num_components: K; draw s belongs to component s mod K.
        num_atoms: the number of distinct draws where it is finite, else None.
        scalable: whether `scaled` has standard deviations to multiply, and everything drawn heeds `scale`.
    """

    num_components: int = 1
    num_atoms: int | None = None
    scalable: bool = False
    #: The types of what `details` may hold, by which files are checked; None takes whatever there is.
    details_type: ClassVar[type | None] = None
    #: Groups of `shapes` that a posterior need not have.
    optional_groups: ClassVar[Collection[str]] = ()
    #: The classes of posteriors by the names of the methods that make them; `Method` enters each.
    makers: ClassVar[dict[str, type["Posterior"]]] = {}

    def __init__(
        self,
        network: nn.Module,
        likelihood: BuiltLikelihood,
        *,
        method: Any,
        tensors: Mapping[str, Mapping[str, Tensor]] | None = None,
        details: Mapping[str, Any] | None = None,
        history: list[dict[str, float]] | None = None,
        trainable: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.likelihood = likelihood
        self.method = method
        groups = (tensors or {}).items()
        named = {key: NamedTensors(group, buffers=key == "statistics") for key, group in groups}
        self.tensors = nn.ModuleDict(named)
        self.details = dict(details or {})
        self.history = list(history or [])
        self._survey: Survey | None = None
        #: Which passes answer for several draws at once, as draws found out.
        self._ways: dict[str, int] = {}
        self.trainable = flagged(network) if trainable is None else set(trainable)
        if trainable is None and not self.trainable:
            raise NetworkError(
                "no parameter of this network requires gradients, so it does not tell which did in the user's: pass "
                "trainable=, such as that of the posterior whose network it is"
            )
        self.eval()

    @abstractmethod
    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Draw number `index`: every parameter by the user's name, and buffers where draws differ in them.

        Tensors that do not vary are the posterior's own, not copies.
        """

    def holds(self, name: str) -> str:
        """What the posterior keeps for the parameter `name`, in a few words for `summary`."""
        reason = self.details.get("points", {}).get(name)
        subset = getattr(self.method, "subset", None)
        if reason is None and name not in self.trainable:
            reason = reasons.FROZEN
        elif reason is None and subset is not None and name not in subset:
            reason = reasons.SUBSET
        return "point" if reason is None else f"point ({reason})"

    def weights(self) -> dict[str, Tensor]:
        """The network's own parameters: the centre of the distribution."""
        weights: dict[str, Tensor] = dict(self.network.named_parameters())
        return weights | whole_tensors(self.network) if any(map(is_sharded, weights.values())) else weights

    def group(self, key: str) -> NamedTensors:
        """One group of the tensors."""
        return self.tensors[key]  # pyright: ignore[reportReturnType]

    def shapes(self) -> Mapping[str, ShapeRule] | None:
        """How tensors are shaped, by group; what does not fit is refused when a file is read. None: as they come."""
        return None

    def stacked_like_weights(self, *leading: int) -> ShapeRule:
        """The rule of tensors under the names of parameters and buffers, with axes before the shapes of these."""
        shapes = {name: tensor.shape for name, tensor in stored_tensors(self.network).items()}
        return lambda name, tensor: (*leading, *shapes[name])

    def survey(self, inputs: Inputs) -> Survey:
        """What the fit learned about the network; posteriors of older files learn it from these rows.

        Args:
            inputs: checked rows that the network reads.
        """
        if self._survey is None:
            with _surveying:
                if self._survey is None:
                    stored = self.details.get("survey")
                    self._survey = Survey.from_json(stored) if stored else survey(self.network, take(inputs, slice(8)))
        return self._survey

    def standard_deviations(self) -> Sequence[Tensor]:
        """Those that are learned, tensor by tensor, where they are kept as such."""
        return ()

    @property
    def scale(self) -> float:
        """The factor by which `scaled` multiplied all standard deviations."""
        return self.details.get("scale", 1.0)

    def scaled(self, scale: float) -> Self:
        """A posterior whose standard deviations are `scale` times as large, around the same centre, in every draw.

        Draw s of a seed moves along a line: w − centre becomes `scale` times what it was. Where noise lies on nodes,
        factors move around the means of their components, which stay, before they are bounded, and positive ones by
        their logarithms; masks and Bernoulli factors z become 1 + scale (z − 1). Scales of scales multiply.

        Args:
            scale: 0 leaves the centre alone.
        """
        return duplicate(self._view(scale)).finished()

    def _view(self, scale: float) -> Self:
        """What `scaled` copies: it shares tensors and caches with this posterior."""
        require_positive(zero=True, scale=scale)  # or 0
        if not self.scalable:
            fixed = "" if self.num_atoms is None else f" ({self.num_atoms} fixed draws)"
            raise ConfigError(
                f"scaled multiplies standard deviations, and this posterior of {type(self.method).__name__}{fixed} has "
                "none; scale before refreshed(...), or fit a method whose posterior is scalable, such as Laplace"
            )
        view, product = copy.copy(self), float(self.scale * scale)
        others = {key: value for key, value in self.details.items() if key != "scale"}
        view.details = others if product == 1 else {**others, "scale": product}
        return view

    def train(self, mode: bool = True) -> Self:
        """A posterior predicts: it stays in evaluation mode whatever is asked."""
        return super().train(False)

    # -- samples and predictions ---------------------------------------------------------------------------

    @checked
    def sample_outputs(
        self,
        inputs: Inputs,
        num_samples: int,
        *,
        seed: int = 0,
        max_rows: int = MAX_ROWS,
        keep_graph: bool = False,
        linearised: bool | None = None,
    ) -> Tensor:
        """Outputs of `num_samples` draws, each one function over all rows, [S, B, ...]; see `likelihood.restored`.

        Args:
            inputs: what the network reads.
            num_samples: S in all; draw s belongs to component s mod K.
            seed: the same seed, dtype and device give the same draws.
            max_rows: rows that go through the network at once.
            keep_graph: keep the autograd graph, for gradients with respect to the inputs.
            linearised: draws of the network as linear in its weights; None does as `predict` does.
        """
        require_count(num_samples=num_samples, max_rows=max_rows)
        atoms = min(num_samples, self.num_atoms or num_samples)  # repeated atoms are computed once
        if self._linearises(linearised):
            inputs = checked_inputs(inputs, TensorOptions.of(self.network))
            draws = (self._made(range(index, index + 1), seed, True) for index in range(atoms))
            outputs = [next(iter(draw.outputs(inputs, max_rows, keep_graph=keep_graph))) for draw in draws]
        else:
            outputs = list(self._outputs(inputs, atoms, seed, max_rows, keep_graph))
        if atoms < num_samples:
            outputs = [outputs[index % atoms] for index in range(num_samples)]
        stacked = torch.stack(outputs)
        require_answers(stacked, 1)
        return stacked

    def predict(
        self,
        inputs: Inputs,
        num_samples: int = 32,
        *,
        seed: int = 0,
        max_rows: int = MAX_ROWS,
        linearised: bool | None = None,
        marginal: bool = False,
        per_example: bool = False,
        precision: Precision = "full",
    ) -> Prediction:
        """The prediction for some rows: averaged over draws, each one function for all rows, or in another form.

        A form that this posterior does not have is refused by an error that names the methods whose posteriors do.

        Args:
            inputs: what the network reads, or a `Dataset` or `DataLoader` of it, with or without targets, in the order
                of the data set.
            num_samples: draws in all, rounded up to a multiple of the components; a posterior with finitely
                many atoms uses each once instead, and a linearised prediction takes none.
            seed: the same seed, dtype and device give the same draws.
            max_rows: rows that go through the network at once.
            linearised: take the network as linear in its weights around their mean, so that its outputs are
                Normal: reals stay Normal, classes come from the probit approximation. None does as the method says.
            marginal: draw the outputs of layers anew for each row (as `LocalReparameterised` does in training)
                instead of one function for all rows: cheaper for networks of few layers, right for each row by
                itself where layers are dense, and an approximation for convolutions.
            per_example: draw factors anew for each row, as in training, instead of one function for all rows.
            precision: of passes through the network: "full", or autocast with "bf16" or "fp16". Draws and what comes
                after the network stay in full precision.
        """
        options = PredictionOptions(num_samples, seed, max_rows, linearised, marginal, per_example, precision)
        if not holds_rows(inputs):
            return self.predictor(options)(inputs)
        predictions = list(self._predictions(inputs, options))
        return type(predictions[0]).cat(predictions)

    def predict_batches(
        self,
        data: Any,
        num_samples: int = 32,
        *,
        seed: int = 0,
        max_rows: int = MAX_ROWS,
        linearised: bool | None = None,
        marginal: bool = False,
        per_example: bool = False,
        precision: Precision = "full",
    ) -> Iterator[Prediction]:
        """Predictions of the rows of data in their order, some rows at a time, so that data may exceed the memory.

        Options are checked before the first row is read. Arrays are cut before they are looked at: those of
        `numpy.memmap` are not read whole.

        Args:
            data: what `predict` takes.
            num_samples: as in `predict`.
            seed: as in `predict`; all rows see the same draws.
            max_rows: rows of a prediction, which go through the network at once; a loader with an order of its own
                gives its own batches.
            linearised: as in `predict`.
            marginal: as in `predict`.
            per_example: as in `predict`.
            precision: as in `predict`.
        """
        options = PredictionOptions(num_samples, seed, max_rows, linearised, marginal, per_example, precision)
        return self._predictions(data, options)

    def _predictions(self, data: Any, options: PredictionOptions) -> Iterator[Prediction]:
        pieces = checked_pieces(self.network, data, seed=options.seed, max_rows=options.max_rows)
        return map(self.predictor(options), pieces)

    def evaluate(
        self,
        data: Any,
        *,
        num_samples: int = 32,
        seed: int = 0,
        max_rows: int = MAX_ROWS,
        linearised: bool | None = None,
        marginal: bool = False,
        per_example: bool = False,
        precision: Precision = "full",
        target: str | None = None,
    ) -> dict[str, float]:
        """Metrics on data with known targets, by name; where rows have weights, weighted means.

        Args:
            data: a pair, a triple with weights of rows, a mapping, a `Dataset` or a `DataLoader`, as in `Method.fit`.
            num_samples: as in `predict`.
            seed: as in `predict`.
            max_rows: as in `predict`; datasets are read in batches of this size.
            linearised: as in `predict`.
            marginal: as in `predict`.
            per_example: as in `predict`.
            precision: as in `predict`.
            target: as in `Method.fit`.
        """
        options = PredictionOptions(num_samples, seed, max_rows, linearised, marginal, per_example, precision)
        (data,) = named_target(target, data)
        return evaluate(*self.predicted(data, options))

    def predicted(
        self, data: Any, options: PredictionOptions, name: str = "data"
    ) -> tuple[Prediction, Tensor, Tensor | None]:
        """The prediction of all rows of data, their targets in the likelihood's form, and their weights.

        Args:
            data: a pair, a `Dataset` or a `DataLoader`.
            options: of the prediction.
            name: of the data, for messages.
        """
        predict, predictions, targets, weights = self.predictor(options), [], [], []
        judged = self.network, self.likelihood, data
        for batch in checked_rows(*judged, seed=options.seed, max_rows=options.max_rows, name=name):
            predictions.append(predict(batch.inputs))
            targets.append(batch.targets)
            weights += [] if batch.weights is None else [batch.weights]
        whole = type(predictions[0]).cat(predictions)
        labels = targets_as_long(targets, getattr(whole, "ignore_index", None))
        return whole, labels, torch.cat(weights) if weights else None

    def predictor(self, options: PredictionOptions) -> Callable[[Inputs], Prediction]:
        """From inputs to predictions with these options; a form that the posterior lacks is refused here."""
        self.check_form(options, self.method)
        default = "sampled" if options.linearised is False else self.default_form
        predict = partial(getattr(self, f"{options.form or default}_prediction"), options=options)

        rows = 0

        def predicted(inputs: Inputs) -> Prediction:
            nonlocal rows
            with passes_in(options.precision, *TensorOptions.of(self.network)):
                prediction = predict(inputs).finite(rows)
            rows += len(prediction)
            if isinstance(prediction, ClassPrediction) and not options.moments:
                prediction = replace(prediction, function_mean=None)
            return prediction

        return predicted

    @classmethod
    def check_form(cls, options: PredictionOptions, method: object) -> None:
        """Refuse a form that the posteriors of a method lack, naming the methods whose posteriors have it."""
        form = options.form
        if form is not None and not cls.has_form(form):
            open_all("dubito")  # every method enters its posteriors
            makers = sorted(name for name, kind in Posterior.makers.items() if kind.has_form(form))
            raise ConfigError(
                f"{form}=True is for posteriors of {', '.join(makers)}, got one of {type(method).__name__}; "
                "leave it out, or fit one of those"
            )

    @classmethod
    def has_form(cls, form: str) -> bool:
        """Whether such posteriors have a form of prediction: a method `<form>_prediction(inputs, options)`."""
        return hasattr(cls, f"{form}_prediction")

    @property
    def default_form(self) -> str:
        """The form of predictions that are asked for without one: by draws, or "linearised"."""
        return "sampled"

    def sampled_prediction(self, inputs: Inputs, options: PredictionOptions) -> Prediction:
        """The mean over draws, each one function for all rows."""
        samples = self.num_atoms or -(-options.num_samples // self.num_components) * self.num_components
        return self.likelihood.predictive(self._outputs(inputs, samples, options.seed, options.max_rows))

    def closed_form(self, inputs: Inputs, num_samples: int, seed: int) -> nn.Module | None:
        """The module of predictions that need no draws of weights, where this posterior has one for such inputs.

        Args:
            inputs: checked rows.
            num_samples: draws of the outputs, where the likelihood needs some.
            seed: of these.
        """
        return None

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        num_samples: int = 32,
        seed: int = 0,
        sampling: Literal["fixed", "fresh"] = "fixed",
        linearised: bool | None = None,
        example: Inputs = None,
        max_bytes: int = 1 << 29,
    ) -> None:
        """Write predictions to one file that runs without dubito: a graph for ONNX, or a program of `torch.export`.

        It takes any number of rows and answers with `probs`, `total`, `aleatoric`, `epistemic` and
        `function_variance`; for reals with `mean`, `std`, `aleatoric_std`, `epistemic_std`, `lower` and `upper`.

        Args:
            path: ends in .onnx (the extra `onnx`) or .pt2.
            num_samples: as in `predict`; a closed form takes none.
            seed: as in `predict`.
            sampling: "fixed" writes draws into the file, those of `predict`; "fresh" has the graph draw at every call.
            linearised: as in `predict`. Where a Laplace posterior has more than the last layer, linearised draws stand
                for the closed form.
            example: some rows; None takes rows of noise like those of the fit.
            max_bytes: the largest file; draws that would take more are refused before they are made.
        """
        options = {"num_samples": num_samples, "seed": seed, "sampling": sampling, "linearised": linearised}
        import_module("dubito.export").export(self, path, **options, example=example, max_bytes=max_bytes)

    # -- draws made once -----------------------------------------------------------------------------------

    @checked
    def sampled(self, num_samples: int, *, seed: int = 0, linearised: bool | None = None) -> "SampledPosterior":
        """The posterior cut down to some draws, made once: each later prediction runs these and draws nothing.

        It predicts what `predict(x, num_samples, seed=seed)` does by draws. Draws are kept as factors where the
        posterior's noise lives on nodes, and else as weights, num_samples times what differs between draws.

        Args:
            num_samples: draws in all, rounded up to a multiple of the components; a posterior with finitely many atoms
                keeps each once instead.
            seed: of the draws.
            linearised: draws of the network as linear in its weights, f(x; w*) + J(x) (w − w*); None does as `predict`
                does.
        """
        from .sampled import SampledPosterior

        require_count(num_samples=num_samples)
        count = self.num_atoms or -(-num_samples // self.num_components) * self.num_components
        draws = self._made(range(count), seed, self._linearises(linearised))
        known = {key: self.details[key] for key in ("survey", "points", "inputs") if key in self.details}
        posterior = SampledPosterior(
            duplicate(self.network),
            duplicate(self.likelihood),
            method=self.method,
            tensors={**draws.tensors, **self._centres(draws)},
            details={**known, "sampled": draws.facts, "scalable": self.scalable},
            history=self.history,
            trainable=self.trainable,
        )
        return posterior.finished()

    def _centres(self, draws: Draws) -> Mapping[str, Mapping[str, Tensor]]:
        """What kept factors deviate from, by component; weights deviate from the network's."""
        if not self.scalable or draws.kind != FactorDraws.kind:
            return {}
        means = self._view(0).draws(range(self.num_components), 0).tensors
        return {CENTRAL + key: group for key, group in means.items() if key != "draws"}

    @checked
    def function(self, index: int = 0, seed: int = 0, *, linearised: bool | None = None) -> Callable[[Inputs], Tensor]:
        """One drawn function, from inputs to outputs, differentiable in its inputs: `sample_outputs(...)[index]`.

        Args:
            index: of the draw.
            seed: of the draws.
            linearised: as in `sampled`.
        """
        require_count(0, index=index)
        draws = self._made(range(index, index + 1), seed, self._linearises(linearised))
        return lambda inputs: draws.function(0)(checked_inputs(inputs, draws.like))

    @torch.no_grad()
    def _made(self, indices: range, seed: int, linearised: bool) -> Draws:
        if not linearised:
            return self.draws(indices, seed)
        draws = Posterior._drawn(self, indices, self._streams(indices, seed), seed)
        facts = self._facts(indices, seed)
        return LinearisedDraws(self.network, deviations(self.network, draws.tensors), **facts)

    def draws(self, indices: range, seed: int) -> Draws:
        """Draws made now, by their numbers."""
        return self._drawn(indices, self._streams(indices, seed), seed)

    def _drawn(self, indices: range, streams: Streams, seed: int) -> Draws:
        """Draws from their streams: as sets of weights, unless a posterior keeps them in fewer numbers."""
        draw = self.drawer()
        drawn = (draw(index, stream) for index, stream in zip(indices, streams, strict=True))
        tensors = weight_stacks(self.network, drawn, len(indices))
        return WeightDraws(self.network, tensors, **self._facts(indices, seed))

    def _facts(self, indices: range, seed: int, **others: Any) -> dict[str, Any]:
        """What draws are told beside their tensors."""
        facts = {"count": len(indices), "seed": seed, "first": indices.start, **others}
        return {"facts": facts, "survey": self.survey, "ways": self._ways}

    def _linearises(self, linearised: bool | None) -> bool:
        """Whether draws are linearised; refused where this posterior's cannot be."""
        if linearised is None:
            return self.default_form == "linearised"
        self.check_form(PredictionOptions(num_samples=1, seed=0, max_rows=1, linearised=linearised), self.method)
        return linearised

    def drawer(self) -> Drawer:
        """`draw` for several draws in a row: what all of them need is computed once."""
        return self.draw

    @checked
    def fold(self, index: int = 0, *, seed: int = 0) -> nn.Module:
        """A plain network like the user's with draw number `index` of `seed` in it, in evaluation mode."""
        require_count(0, index=index)
        with torch.no_grad():
            return with_flags(self.draws(range(index, index + 1), seed).plain(0), self.trainable)

    def finished(self) -> Self:
        """The posterior at rest: nothing requires a gradient, so that draws keep no graph."""
        return self.requires_grad_(False).eval()

    def generator(self, seed: int, index: int, device: torch.device | None = None) -> torch.Generator:
        """The generator of draw number `index`: a stream of its own, so chunking changes nothing.

        Args:
            seed: of all draws.
            index: of the draw.
            device: the network's, where it is known.
        """
        device = device or TensorOptions.of(self.network).device
        return seeds.generator(seed, "draw", index, device=device)

    def _streams(self, indices: range, seed: int) -> list[torch.Generator]:
        device = TensorOptions.of(self.network).device
        return [self.generator(seed, index, device) for index in indices]

    def _outputs(
        self, inputs: Inputs, num_samples: int, seed: int, max_rows: int, keep_graph: bool = False
    ) -> Iterable[Tensor]:
        """Outputs [B, ...] of one draw after the other, or those of all draws, [S, B, ...]."""
        options = TensorOptions.of(self.network)
        pieces = list(chunks(checked_inputs(inputs, options), max_rows))
        around = seeder(self.network)  # noise of the network's own
        with torch.set_grad_enabled(keep_graph):
            draw = self.drawer()
        # A graph keeps the tensors of its draw, and a shell of its own; else one shell serves all draws.
        lease = None if keep_graph else take_shell(self.network)
        for index in range(num_samples):
            with torch.set_grad_enabled(keep_graph), around(seed, "network", index):
                tensors = draw(index, self.generator(seed, index, options.device))
                function = partial(run, self.network, tensors)
                if lease is not None:
                    lease.fill(tensors)
                    function = partial(call, lease.module)
                outputs = [read(function, piece) for piece in pieces]
            yield outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    # -- size and storage ----------------------------------------------------------------------------------

    @property
    def num_parameters(self) -> int:
        """Numbers that define the distribution: weights, the tensors beside them, learned noise; tied ones once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, buffers such as batch norm's statistics included."""
        return sum(tensor.nbytes for tensor in (*self.parameters(), *self.buffers()))

    def summary(self) -> Summary:
        """Which layer holds what: one row per parameter."""
        rows = []
        for name, parameter in self.network.named_parameters():
            groups = (self.group(key) for key in self.tensors if key != "statistics")
            beside = sum(group[name].numel() for group in groups if name in group)
            rows.append(SummaryRow(name, tuple(parameter.shape), self.holds(name), parameter.numel() + beside))
        return Summary(type(self.method).__name__, tuple(rows), self.num_parameters, self.nbytes)

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    @checked
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior to a safetensors file; `dubito.load(path, net)` reads it.

        What was frozen in the user's network is not written: the file names it by checksums, and `net` brings it.
        """
        content = self.content()
        if self.details.get("inputs") is not None and (answered := fingerprint(self.network, self.details["inputs"])):
            content["fingerprint"] = answered[0]
        if base := base_of(self.network):
            content["base"] = list(base.values())
        storage.write(path, "posterior", self.stored(), content)

    def content(self) -> dict[str, Any]:
        """What a file holds beside tensors."""
        settings = {"method": self.method, "likelihood": self.likelihood.settings}
        return {
            **{key: storage.encode(value) for key, value in settings.items()},
            "num_noise_components": getattr(self.likelihood, "num_components", 1),
            "structure": {key: list(self.group(key).names) for key in self.tensors},
            "details": self.details,
            "history": self.history,
            "extra": storage.plain(extra_states(self.network)),
        }

    def stored(self) -> dict[str, Tensor]:
        """Every tensor but those of a shared base under the name it has in a file: tied ones once."""
        return {
            **{f"network.{name}": t for name, t in stored_tensors(self.network, shared=False).items()},
            **{f"{key}.{name}": t for key in self.tensors for name, t in self.group(key).items()},
            **{f"likelihood.{name}": tensor for name, tensor in self.likelihood.state_dict().items()},
        }


def detached(posterior: Posterior) -> Posterior:
    """A copy of a posterior under training that later steps no longer change; a spread network becomes whole."""
    network: nn.Module = posterior.network
    whole: Any = {}
    if any(map(is_sharded, network.parameters())):
        lease, table = take_shell(network, detached=True), {}
        copied = deep_copy(lease.module)
        lease.release()
        for held in (part._parameters for part in copied.modules()):
            for key, tensor in held.items():
                if tensor is not None:
                    held[key] = table.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=False))
        whole = {id(network): copied}
    copy_of: Any = deep_copy(posterior, whole)
    return copy_of.finished()
