"""Rank-1's Figures 2 to 5 and its text on priors: where they stand, how many components, which likelihood, which law.

A run is not half of Table 2's, and is not stored: its path through training is what Figure 5 shows.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from dubito import Callback, Rank1, factors
from dubito.fitting import Start
from dubito.method import Method
from dubito.posterior import Posterior
from dubito.training import RunFacts

from ..cifar.cells import DIFFERS, METRICS, TABLE_2, Judged, experiment, lower, outcome_of, rehearsed
from ..cifar.fits import trained
from ..cifar.images import Pictures, Pixels, pictures
from ..cifar.scores import disagreement, log_probs, measured, mixed
from ..runner.experiment import Cell, Metric, Outcome, Table
from ..settings import explicit
from .table_2 import PAPER, SIGNS, SMALL, rank1

#: Rows of the product of batch size and components, which Figure 3 holds.
TILE = 512
#: Components of Figure 3; 16 of them see 32 images a step.
COMPONENTS = (1, 2, 8, 16)
#: Test images by which a run is watched, as in Figure 5; nothing is chosen by them.
WATCHED = 2_000


class Trail(Callback):
    """Accuracy, NLL and disagreement of components after every epoch   [rank-1, Figure 5].

    Args:
        pictures: with the images that are looked at.
        num_samples: draws.
        components: K.
    """

    def __init__(self, pictures: Pictures, num_samples: int, components: int) -> None:
        self.inputs, self.labels = (tensor[:WATCHED] for tensor in pictures.test)
        self.num_samples, self.components = num_samples, components
        self.draft: Posterior | None = None
        self.steps: dict[str, list[float]] = {"nll": [], "accuracy": [], "ece": [], "diversity": []}

    def watching(self, method: Method) -> Method:
        """The method, whose posterior under training is then known here."""

        def objective(start: Start) -> Any:
            made = method.objective(start)  # pyright: ignore[reportAttributeAccessIssue]
            self.draft = made.draft
            return made

        told = copy(method)
        object.__setattr__(told, "objective", objective)
        return told

    def on_epoch(self, run: RunFacts, record: Mapping[str, float]) -> None:
        """Judge the posterior as it is."""
        assert self.draft is not None
        draws = log_probs(self.draft, self.inputs, self.num_samples, 0).detach()
        values = measured(mixed(draws), self.labels)
        if self.components > 1:
            values["diversity"] = disagreement(draws, self.labels, self.components)
        for name, value in values.items():
            self.steps[name].append(value)


def run_cells(cells: Sequence[Cell], data: Sequence[Pixels], settings: Judged, steps: int | None) -> list[Outcome]:
    """One cell after the other."""
    return [run_cell(cell, pixels, settings, steps) for cell, pixels in zip(cells, data, strict=True)]


def run_cell(cell: Cell, pixels: Pixels, settings: Judged, steps: int | None) -> Outcome:
    """One run, watched after every epoch."""
    fit = settings.fit if steps is None else rehearsed(settings.fit)
    seen = pictures(pixels, fit.size)
    components = fit.method.components  # pyright: ignore[reportAttributeAccessIssue]
    samples = settings.num_samples if steps is None else max(steps, components)
    trail = Trail(seen, samples, components)
    watched = replace(fit, method=trail.watching(fit.method))
    posterior, seconds = trained(watched, seen, cell.seed, steps, stored=False, callbacks=[trail])
    cut = replace(settings, fit=fit, num_samples=samples)
    made = outcome_of(posterior, seconds, cut, seen, cell.seed)
    return replace(made, details={**made.details, "trail": trail.steps})


def short(judged: Judged) -> Judged:
    """Table 2's run on fewer images."""
    return replace(judged, fit=replace(judged.fit, num_images=20_000, epochs=6))


def varied(**changes: Any) -> Judged:
    """Rank-1 Normal with some settings changed."""
    method = rank1(**changes)
    return short(replace(SMALL["rank1-normal"], fit=replace(SMALL["rank1-normal"].fit, method=method)))


def mixture(components: int, judged: Judged) -> Judged:
    """Another number of components, with as many images fewer in a step.

    The rate of weights is in proportion to the images of a step, as the authors' is: at one rate a single component
    would make a quarter of the steps, each as long. That of factors is not, since their gradient from the mean over
    components falls with K, while their steps grow in number.
    """
    fit = judged.fit
    assert isinstance(fit.method, Rank1)
    batch = TILE // components
    variational_lr = fit.lr if fit.variational_lr is None else fit.variational_lr
    fit = replace(fit, batch_size=batch, lr=fit.lr * batch / fit.batch_size, variational_lr=variational_lr)
    fit = replace(fit, method=replace(fit.method, components=components))
    return replace(judged, fit=fit, num_samples=max(judged.num_samples, components))


BOTH = varied()
SETTINGS: Mapping[str, Judged] = {
    "both": BOTH,
    "on-s": varied(on="input"),
    "on-r": varied(on="output"),
    "log-mixture": varied(log_mixture=True),
    "batch-ensemble": short(SMALL["batch-ensemble"]),
    **{f"k-{count}": mixture(count, BOTH) for count in COMPONENTS},
    "signs": varied(initial=SIGNS),
    "positive": varied(family=explicit(factors.LogNormal)),
    "half-cauchy": varied(family=explicit(factors.HalfCauchy)),
    "inverse-gamma": varied(family=explicit(factors.InverseGamma)),
    "additive": varied(additive=True, family=explicit(factors.Normal, prior_mean=0.0), arrangement="auto"),
}
FULL: Mapping[str, Judged] = {
    "both": PAPER["rank1-normal"],
    "batch-ensemble": PAPER["batch-ensemble"],
    **{f"k-{count}": mixture(count, PAPER["rank1-normal"]) for count in COMPONENTS},
    **{
        name: replace(PAPER["rank1-normal"], fit=replace(PAPER["rank1-normal"].fit, method=method))
        for name, method in {
            "on-s": explicit(Rank1, initial=SIGNS, kl="sum", on="input"),
            "on-r": explicit(Rank1, initial=SIGNS, kl="sum", on="output"),
            "log-mixture": explicit(Rank1, initial=SIGNS, kl="sum", log_mixture=True),
        }.items()
    },
}

TABLES = (
    Table(
        name="rank1-ablations",
        title="CIFAR-10, rank-1 Normal: priors on s, r or both, components, likelihood, start and laws",
        paper="rank-1 BNN, Figures 2 to 5, Appendix C.2",
        plus_minus="pictures, without numbers",
        experiment=experiment(
            "rank1",
            "rank1-ablations",
            SETTINGS,
            FULL,
            "20,000 images of 16×16 (pooled from 32×32) for 50,000 of 32×32, Wide ResNet-10-1 for 28-10, 6 epochs for "
            "200 to 250, 3 seeds for 3 to 5",
            run=run_cells,
        ),
        metrics=(
            *METRICS[:6],
            Metric(name="nll_alone", title="NLL of one component", lower_is_better=True),
            Metric(name="train_nll", title="training NLL", lower_is_better=True),
            Metric(name="diversity", title="disagreement over error", lower_is_better=False),
        ),
        published={},
        claims=(
            lower("priors on both vectors generalise better to corruptions than on s", "both", "on-s", "c_nll"),
            lower("and than on r", "both", "on-r", "c_nll"),
            lower("4 components have a lower NLL than 1", "both", "k-1"),
            lower("8 components have a lower NLL than 4", "k-8", "both"),
            lower("16 components have a higher NLL than 8", "k-8", "k-16"),
            lower("the average of log-likelihoods generalises better than the log-mixture", "both", "log-mixture"),
            lower("and so does a component alone", "both", "log-mixture", "nll_alone"),
            lower("rank-1 is more diverse than BatchEnsemble", "both", "batch-ensemble", "diversity"),
            lower("with a lower NLL", "both", "batch-ensemble"),
            lower("real scale priors do better than positive ones", "both", "positive"),
        ),
        differs="additive is W + r sᵀ with priors around 0, whose draws all images of a step share, one pass for each "
        "component; images per step times components is 512 throughout, with the weights' rate in proportion to the "
        "images per step and one rate of factors; epochs are 6 for every number of components, where the paper tunes "
        f"them; {TABLE_2}; {DIFFERS}",
    ),
)
