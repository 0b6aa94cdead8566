"""k-tied Normal, Figures 5, 9, 11, 12 and Tables 3, 5: a ResNet by Flipout, cut down after training, two priors."""

from ..runner.experiment import Metric, Published, Scale, Table, Variant
from . import figure_3, table_2, trainings
from .regimes import PAPER, RESNET_HE, SHORT, with_he
from .tasks import RESNET_DATA
from .trainings import Regime

Variants = dict[tuple[str, str], Variant]

SMALL = SHORT[RESNET_DATA]
#: CPU-seconds of 700 epochs at the paper's size, from a measured step of a quarter of the width.
DAYS = 4e6


def cuts(regime: Regime, training: float, testing: float) -> Variants:
    """Truncations under both priors."""
    return {
        **table_2.variants(RESNET_DATA, regime, training, testing),
        **table_2.variants(RESNET_HE, with_he(regime), training, testing),
    }


def looks(regime: Regime) -> Variants:
    """Spectra under both priors."""
    return {**figure_3.variants(RESNET_DATA, regime), **figure_3.variants(RESNET_HE, with_he(regime))}


def scales(small: Variants, paper: Variants) -> dict[str, Scale]:
    """Three runs in CPU-minutes, one at the paper's size."""
    return {"small": Scale(variants=small, seeds=3, smaller=SMALL.smaller), "paper": Scale(variants=paper)}


TRUNCATION = table_2.experiment(
    "ktied-truncation-resnet",
    scales(cuts(SMALL.regime, SMALL.training, SMALL.testing), cuts(PAPER[RESNET_DATA], DAYS, 2000.0)),
)
SPECTRUM = figure_3.experiment("ktied-spectrum-resnet", scales(looks(SMALL.regime), looks(PAPER[RESNET_DATA])))

#: Figures 5 and 9 as printed: −ELBO, NLL, accuracy.
PRINTED = """
cifar10-resnet     mean-field  122.61±0.012  0.495±0.0080  83.5±0.37
cifar10-resnet     1-tied      122.57±0.012  0.658±0.0069  81.7±0.39
cifar10-resnet     2-tied      122.77±0.012  0.503±0.0080  83.2±0.37
cifar10-resnet     3-tied      122.67±0.012  0.501±0.0079  83.2±0.37
cifar10-resnet-he  mean-field  1.379±0.0096  0.6384±0.0096  79.0±0.41
cifar10-resnet-he  1-tied      5.428±0.018   1.485±0.0056   57.0±0.50
cifar10-resnet-he  2-tied      1.448±0.0097  0.648±0.0079   78.8±0.41
cifar10-resnet-he  3-tied      1.411±0.0097  0.646±0.0079   78.9±0.41
"""
#: Table 3 as printed: Brier score, NLL, ECE; the He prior has none of its own but the NLL.
QUALITY = """
cifar10-resnet     mean-field  -0.761±0.0039  0.495±0.0080  0.0477
cifar10-resnet     1-tied      -0.695±0.0034  0.658±0.0069  0.1642
cifar10-resnet     2-tied      -0.758±0.0038  0.503±0.0080  0.0540
cifar10-resnet     3-tied      -0.758±0.0038  0.501±0.0079  0.0541
"""


def printed(rows: str, names: tuple[str, ...]) -> dict[tuple[str, str, str], Published]:
    """The paper's numbers under both priors."""
    return trainings.published(rows, names, RESNET_DATA) | trainings.published(rows, names, RESNET_HE)


DIFFERS = (
    "Adam's rate falls by half a cosine from 0.001 (standard deviations: 0.02, so that they arrive from softplus(−9) "
    "in 10 epochs) to 0 for a constant 0.0001; annealing over the paper's share of the epochs; Flipout, σ at most 0.2, "
    "kernels from N(0, 0.1²), biases and batch norm points as in the paper; under N(0, 1) nearly all σ of the last "
    "stages end at that bound, a matrix of rank 1 by itself (so, by its −ELBO, do the paper's: 122.6 are about 1.25 "
    f"nats a weight, and σ of 0.2 around 0 makes 1.13), which the He prior does not ask for; {table_2.FLOOR}"
)
BOTH = (RESNET_DATA, RESNET_HE)
TABLES = (
    Table(
        name="ktied-figure-5",
        title="a trained ResNet with its standard deviations cut down to a rank, under N(0, 1) and under the He prior",
        paper="k-tied Normal, Figure 5, Table 5 and, for the He prior, Figure 9",
        plus_minus=trainings.PLUS_MINUS,
        differs=DIFFERS,
        experiment=TRUNCATION,
        metrics=(*trainings.METRICS, Metric(name="parameters", title="parameters", lower_is_better=True)),
        published=printed(PRINTED, table_2.COLUMNS),
        claims=tuple(
            claim
            for data in BOTH
            for claim in trainings.better_than_rank_one(
                data, table_2.CLAIM, trainings.published(PRINTED, table_2.COLUMNS, data)
            )
        ),
    ),
    Table(
        name="ktied-table-3",
        title="quality of a ResNet's probabilities with its standard deviations cut down to a rank",
        paper="k-tied Normal, Table 3; its Brier score is smaller by 1 than the sum of squares",
        plus_minus=trainings.PLUS_MINUS,
        differs=f"{DIFFERS}; the paper has these under N(0, 1) alone",
        experiment=TRUNCATION,
        metrics=(
            Metric(name="brier", title="Brier score", lower_is_better=True),
            Metric(name="nll", title="NLL", lower_is_better=True),
            Metric(name="ece", title="ECE", lower_is_better=True),
        ),
        published=printed(QUALITY, ("brier", "nll", "ece"))
        | {key: value for key, value in printed(PRINTED, table_2.COLUMNS).items() if key[2] == "nll"},
    ),
    Table(
        name="ktied-figure-12",
        title="variance explained by the first singular values of a ResNet's means and standard deviations, two priors",
        paper="k-tied Normal, Figures 5 and 9, above, 11 and 12 (pictures, without numbers)",
        plus_minus="none",
        differs=f"{DIFFERS}; {figure_3.CENTRED}",
        experiment=SPECTRUM,
        metrics=figure_3.METRICS,
        published={},
        claims=figure_3.claims(list(dict.fromkeys(data for data, _ in SPECTRUM.scales["paper"].variants))),
    ),
)
