"""BALI's Tables 1 and 7 as printed."""

from collections.abc import Iterable

from dubito.metrics import Over

from ...runner.experiment import Claim, Published

#: Tables 1 and 7 as printed: mean ± standard error over 20 splits; noisy-kfac is NNG-MVG there, mean-field BBB.
COLUMNS = ("bali", "noisy-kfac", "vadam", "mean-field", "pbp", "mc-dropout")
RMSE = """
yacht     0.642±0.042  0.979±0.077  1.32±0.10  1.174±0.086  1.015±0.054  0.666±0.049
concrete  4.425±0.153  5.019±0.127  6.85±0.09  5.678±0.087  5.667±0.093  4.826±0.161
energy    0.451±0.016  0.485±0.023  1.55±0.08  0.565±0.018  1.804±0.048  0.539±0.014
wine-red  0.676±0.016  0.637±0.011  0.66±0.01  0.643±0.012  0.635±0.008  0.622±0.008
kin8nm    0.075±0.001  0.076±0.001  0.10±0.00  0.080±0.001  0.098±0.001  0.079±0.001
power     3.882±0.026  3.886±0.041  4.28±0.03  4.023±0.036  4.124±0.035  4.014±0.037
protein   4.129±0.016  4.097±0.009  -          4.321±0.017  4.732±0.013  4.274±0.021
"""
LOG_LIKELIHOOD = """
yacht     -0.745±0.033  -2.316±0.006  -1.70±0.03  -2.408±0.007  -1.634±0.016  -1.250±0.015
concrete  -2.976±0.079  -3.039±0.025  -3.39±0.02  -3.149±0.018  -3.161±0.019  -2.937±0.025
energy    -0.610±0.035  -1.421±0.005  -2.15±0.07  -1.500±0.006  -2.042±0.019  -1.212±0.005
wine-red  -1.078±0.033  -0.969±0.014  -1.01±0.01  -0.977±0.017  -0.968±0.014  -0.928±0.013
kin8nm     1.175±0.008   1.148±0.007   0.76±0.00   1.111±0.007   0.896±0.006   1.136±0.007
power     -2.769±0.007  -2.776±0.011  -2.88±0.01  -2.807±0.010  -2.837±0.009  -2.808±0.009
protein   -2.836±0.004  -2.836±0.002  -           -2.882±0.004  -2.896±0.004  -2.871±0.001
"""


def published(metric: str, printed: str) -> dict[tuple[str, str, str], Published]:
    """The paper's numbers by data, method and metric."""
    numbers = {}
    for data, *entries in map(str.split, printed.strip().splitlines()):
        for method, entry in zip(COLUMNS, entries, strict=True):
            if entry != "-":
                value, error = map(float, entry.split("±"))
                numbers[data, method, metric] = Published(value, error, Over.RUNS)
        # The same methods, set by themselves, by a rule or by a search.
        for name in ("bali-chosen", "bali-ruled", "bali-long"):
            numbers[data, name, metric] = numbers[data, "bali", metric]
        for name in ("noisy-kfac", "vadam", "mean-field"):
            if (data, name, metric) in numbers:
                numbers[data, f"{name}-tuned", metric] = numbers[data, name, metric]
    return numbers


def compared(
    metric: str,
    printed: str,
    others: Iterable[str],
    text: str,
    *,
    lower: bool,
    form: str = "bali",
    called: str = "BALI",
) -> tuple[Claim, ...]:
    """BALI against each of the others, on the tables where the paper's numbers are 2 standard errors apart.

    Args:
        metric: by which.
        printed: the paper's table of it.
        others: what BALI is compared with.
        text: how it is better.
        lower: whether lower is better.
        form: the method that is BALI.
        called: in the claim.
    """
    numbers = published(metric, printed)

    def apart(data: str, other: str) -> bool:
        pair = [numbers.get((data, method, metric)) for method in ("bali", other)]
        if None in pair:
            return False
        first, second = (each.estimate for each in pair if each is not None)
        assert first is not None and second is not None
        difference = first - second if lower else second - first
        return difference.value < -2 * difference.standard_error

    return tuple(
        Claim(
            text=f"{called} has a {text} than {other}",
            metric=metric,
            better=form,
            than=other,
            data=tuple(data for data in dict.fromkeys(data for data, _, _ in numbers) if apart(data, other)),
        )
        for other in others
    )
