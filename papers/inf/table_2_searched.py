"""INF, Table 2, Figures 6 and 7, and the last column of Table 3 as ratios, from `searched.py`.

The diagonal keeps 1 number a weight; rank 100 is a larger part of small layers than of the paper's (1.02 to 1.06).
"""

from ..runner.experiment import Claim, Metric, Published, Table
from . import searched, table_2

_PROTOCOL = (
    "pairs of prior precision and data scale, judged by the likelihood of draws on validation images, in place of the "
    "best of 300; SWA and SWAG beside, not in the paper's table: 20 snapshots in the second half of a run like the "
    "network's own, under Adam at a constant rate; starts by He; Fisher matrix by one draw of the labels; draws of a "
    "prediction not given in the paper"
)
_LAPLACE = tuple(table_2.STRUCTURES)
_METRICS = (
    Metric(name="accuracy", title="accuracy", lower_is_better=False),
    Metric(name="ece", title="ECE", lower_is_better=True),
    Metric(name="entropy", title="entropy, out of distribution", lower_is_better=False),
    Metric(name="auroc", title="AUROC", lower_is_better=False),
    Metric(name="nll", title="NLL", lower_is_better=True),
    Metric(name="entropy_inside", title="entropy, in distribution", lower_is_better=True),
    Metric(name="numbers", title="numbers beside the weights, a weight", lower_is_better=True),
)


def beats(
    metric: str, title: str, better: tuple[str, ...], than: tuple[str, ...], data: tuple[str, ...]
) -> tuple[Claim, ...]:
    """One claim for each pair of methods."""
    return tuple(
        Claim(text=f"{method} has {title} than {other}", metric=metric, better=method, than=other, data=data)
        for method in better
        for other in than
        if method != other
    )


TABLES = (
    Table(
        name="inf-table-2-search",
        title="LeNet on MNIST, prior and data scale searched: accuracy and ECE, normalised entropy of notMNIST",
        paper="INF, Table 2, MNIST against notMNIST; Figures 6 and 7 on a smaller network",
        plus_minus="the standard deviation of the entropy over images, which is no standard error",
        differs=f"{_PROTOCOL}; the sizes of LeNet's layers are not given: 6 and 16 maps, 5 × 5 kernels, 84 units",
        experiment=searched.DIGITS,
        metrics=_METRICS,
        published={
            (searched.MNIST, method, metric): Published(value)
            for method, values in table_2.PUBLISHED.items()
            for metric, value in zip(("accuracy", "ece", "entropy"), values, strict=True)
        },
        claims=(
            *beats("entropy", "more entropy on notMNIST", ("laplace-inf",), table_2.METHODS, (searched.MNIST,)),
            *beats("ece", "a lower ECE", _LAPLACE, searched.AVERAGED, (searched.MNIST,)),
            *beats("auroc", "a higher AUROC", _LAPLACE, searched.AVERAGED, (searched.MNIST,)),
        ),
    ),
    Table(
        name="inf-table-2-cifar",
        title="VGG and ResNet-18 of base width 16 with batch norm on CIFAR-10; CIFAR-100 in place of SVHN",
        paper="INF, Table 2, CIFAR-10 against SVHN; Figures 6 and 7, ImageNet against art images",
        plus_minus="the standard deviation of the entropy over images, which is no standard error",
        differs="CIFAR-100's test images in place of SVHN and art images, CIFAR-10 in place of ImageNet, and small "
        f"networks, so that there are no numbers to compare; {_PROTOCOL}; six convolutions and "
        "three dense layers in place of two and three; the ResNet-18 is that of Figure 6, narrower, and not "
        "in the paper's table",
        experiment=searched.OBJECTS,
        metrics=_METRICS,
        published={},
        claims=(
            *beats(
                "ece", "a lower ECE", ("laplace-inf",), ("laplace-diag", "laplace-kfac", "laplace-efb"), searched.CIFAR
            ),
            *beats("ece", "a lower ECE", _LAPLACE, searched.AVERAGED, searched.CIFAR),
            *beats("auroc", "a higher AUROC", _LAPLACE, searched.AVERAGED, searched.CIFAR),
        ),
    ),
)
