"""What the implicit paper's experiments on Fashion-MNIST share: images, LeNets, their training and two scales.

One training per seed and settings serves all figures: it is kept outside the results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dubito import Categorical, DeepEnsemble, Implicit, metrics, seeds
from dubito.data import Part, load
from dubito.method import Method
from dubito.models import lenet
from dubito.posterior import Posterior
from dubito.prediction import CategoricalPrediction
from dubito.training import KL, Training

from ..runner import provenance
from ..runner.experiment import Cell, Experiment, Outcome, Scale, Variant
from ..runner.trained import checkpoint as trained_at
from ..settings import explicit

DATA = "fashion-mnist"
#: To be raised when a change of the code changes what training gives; networks are then trained anew.
REVISION = 1
#: Training images, of which the small scale takes the first.
IMAGES = 50_000
#: CPU-seconds of an epoch of the plain network on all images, by width.
EPOCH_SECONDS = {1: 4.8, 2: 8.0, 4: 19.0, 8: 58.0}
#: The prior and start of the VGG-16 in Table 2, which has none for the LeNet.
IMPLICIT = explicit(Implicit, components=8, noise_samples=2, prior_std=0.3, mean_std=0.75)
DIFFERS = "the LeNet's optimiser and settings are not stated: Adam, with the prior and the start of Table 2's VGG-16"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One trained LeNet.

    Args:
        method: with its settings.
        width: factor on the layers' widths.
        epochs: passes over the images.
        num_images: the first so many.
        lr: learning rate of Adam.
        variational_lr: of factors and standard deviations.
        kl_warmup: epochs over which the divergence's weight rises to 1.
    """

    method: Method
    width: int = 1
    epochs: int = 300
    num_images: int = IMAGES
    lr: float = 1e-3
    variational_lr: float = 1e-2
    kl_warmup: float = 200.0

    def training(self, steps: int | None) -> Training:
        """The run, ended after `steps` where given."""
        return explicit(
            Training,
            epochs=self.epochs if steps is None else None,
            iterations=steps,
            batch_size=128,
            lr=self.lr,
            variational_lr=self.variational_lr,
            kl=explicit(KL, warmup=self.kl_warmup),
        )


class Images(Protocol):
    """What is learned from and judged on."""

    @property
    def train(self) -> Part: ...

    @property
    def test(self) -> Part: ...


class Elsewhere(Protocol):
    """A training of another set of images, such as that of `papers.cifar`."""

    def posterior(self, images: Any, seed: int, steps: int | None) -> Posterior: ...


Trained = Fit | Elsewhere


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A trained LeNet and what it is judged by.

    Args:
        fit: the training.
        num_samples: draws at test time, five of each component.
        num_test: test images, the first so many.
    """

    fit: Trained
    num_samples: int = 40
    num_test: int = 10_000


@dataclass(frozen=True, kw_only=True)
class Clothes:
    """Images with values from 0 to 1."""

    train: Part
    test: Part


def load_cell(cell: Cell) -> Clothes:
    """Fashion-MNIST without its validation images."""
    data = load(DATA, standardise=False)
    return Clothes(train=data.train, test=data.test)


def generate_cell(cell: Cell) -> Clothes:
    """Made-up images."""
    stream = seeds.generator(cell.seed, "made-up clothes")
    parts = [Part(torch.rand(40, 1, 28, 28, generator=stream), torch.arange(40) % 10) for _ in range(2)]
    return Clothes(train=parts[0], test=parts[1])


def trained(fit: Trained, clothes: Images, seed: int, steps: int | None) -> Posterior:
    """A trained posterior; a whole run is kept in the user's cache, where other figures find it again."""
    if not isinstance(fit, Fit):
        return fit.posterior(clothes, seed, steps)
    checkpoint = trained_at(DATA, REVISION, fit, seed) if steps is None else None
    chosen = slice(fit.num_images)
    return provenance.fit(
        fit.method,
        lenet(channels=(6, 16), dense=(120, 64), same_padding=False, width=fit.width, seed=seed),
        (clothes.train.inputs[chosen], clothes.train.targets[chosen]),
        explicit(Categorical),
        training=fit.training(steps),
        checkpoint=checkpoint,
        seed=seed,
        progress=False,
    )


def predicted(posterior: Posterior, inputs: Tensor, num_samples: int, seed: int) -> CategoricalPrediction:
    """The prediction for some images."""
    prediction = posterior.predict(inputs, num_samples, seed=seed)
    assert isinstance(prediction, CategoricalPrediction)
    return prediction


def tested(prediction: CategoricalPrediction, labels: Tensor) -> dict[str, float]:
    """Error in percent and NLL."""
    return {
        "error": 100 * (1 - metrics.accuracy(prediction.probs.double(), labels)),
        "nll": -float(prediction.log_prob(labels).double().mean()),
    }


def small(settings: Judged) -> Judged:
    """What two CPU cores do."""
    fit = settings.fit
    assert isinstance(fit, Fit)
    method = replace(fit.method, noise_samples=1) if isinstance(fit.method, Implicit) else fit.method
    fit = replace(fit, method=method, epochs=10, num_images=10_000, lr=3e-3, kl_warmup=7.0)
    return replace(settings, fit=fit, num_test=2_000)


SMALLER = "10,000 images for 50,000, 10 epochs for 300, 1 noise sample for 2, 2,000 test images for 10,000"


def passes(method: Method) -> int:
    """How often an epoch sends its images through a network."""
    if isinstance(method, DeepEnsemble):
        return method.members
    return method.noise_samples if isinstance(method, Implicit) else 1


def variants(settings: Mapping[tuple[str, str], Judged], beside: float) -> dict[tuple[str, str], Variant]:
    """Settings with their estimated costs; `beside` are the CPU-seconds of all but the training."""
    found = {}
    for key, each in settings.items():
        fit = each.fit
        assert isinstance(fit, Fit)
        epoch = EPOCH_SECONDS[fit.width] * fit.num_images / IMAGES
        cost = 1.3 * passes(fit.method) * fit.epochs * epoch
        found[key] = Variant(settings=each, cpu_seconds=beside + cost)
    return found


#: What a figure does with one cell.
Run = Callable[[Cell, Clothes, Any, int | None], Outcome]


def experiment(
    name: str,
    settings: Mapping[tuple[str, str], Judged],
    run: Run,
    *,
    beside: float = 20.0,
    shared: bool = True,
    smaller: Callable[[Judged], Judged] = small,
    words: str = SMALLER,
) -> Experiment:
    """An experiment at both scales.

    Args:
        name: of its results.
        settings: those of the paper's scale by data and method.
        run: from a cell, its images and settings to its outcome.
        beside: CPU-seconds of all but the training.
        shared: whether cells of a seed have trainings in common.
        smaller: from the paper's settings to those of the small scale.
        words: what is smaller in them.
    """
    fewer = {key: smaller(each) for key, each in settings.items()}
    return Experiment(
        paper="implicit",
        name=name,
        scales={
            "small": Scale(variants=variants(fewer, beside), seeds=3, smaller=words),
            "paper": Scale(variants=variants(settings, beside), seeds=5),
        },
        load=load_cell,
        generate=generate_cell,
        run=partial(each_cell, run),
        shares=shared_work if shared else None,
    )


def shared_work(cell: Cell) -> tuple:
    """Trainings that several figures look at."""
    return (cell.seed,)


def each_cell(
    run: Run, cells: Sequence[Cell], data: Sequence[Clothes], settings: Any, steps: int | None
) -> list[Outcome]:
    """One cell after the other."""
    return [run(cell, clothes, settings, steps) for cell, clothes in zip(cells, data, strict=True)]
