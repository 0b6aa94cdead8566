"""Charts that show all methods together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from ..compare.folder import MethodRow
from ..compare.table import COLUMNS, cell
from ..compare.words import readable, size
from .svg import Axis, Chart, Values, span
from .terms import explained


@dataclass(frozen=True)
class Item:
    """A method on the page.

    Attributes:
        name: its name.
        place: the number of its style.
        row: its numbers.
        evidence: what is drawn of it.
        intervals: the ends of its metrics' 95 % intervals.
    """

    name: str
    place: int
    row: MethodRow
    evidence: dict[str, Any]
    intervals: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """A method's line."""

    item: Item
    xs: Values
    ys: Values


def figure(chart: str, caption: str, numbers: str = "", classes: str = "") -> str:
    """A chart with its caption, and its numbers for those who would rather read."""
    return f'<figure class="{classes}">{chart}<figcaption>{explained(caption)}</figcaption>{numbers}</figure>'


def lines(curves: Sequence[Line], x: Axis, y: Axis, caption: str, *, dots: bool = False, diagonal: bool = False) -> str:
    """A figure of one line per method, with a table of its numbers."""
    curves = [line for line in curves if any(value is not None for value in line.ys)]
    if not curves:
        return ""
    chart = Chart(x, y, label=f"{caption} {y.title} against {x.title}. {_ends(curves)}")
    if diagonal:
        chart.guide([x.low, x.high], [y.low, y.high])
    for line in reversed(curves):  # the best on top
        alone = sum(value is not None for value in line.ys) == 1  # one point makes no line
        chart.line(line.item.place, line.item.name, line.xs, line.ys, dots=dots or alone)
    return figure(chart.render(), caption, _numbers(curves, x, y))


def _ends(curves: Sequence[Line]) -> str:
    """What the lines come to, for those who do not see them."""
    told = []
    for line in curves:
        there = [value for value in line.ys if value is not None]
        told.append(f"{line.item.name} from {readable(there[0])} to {readable(there[-1])}")
    return "; ".join(told) + "."


def _numbers(curves: Sequence[Line], x: Axis, y: Axis) -> str:
    """A few numbers of each line as a table."""
    body = []
    for line in curves:
        pairs = [(a, b) for a, b in zip(line.xs, line.ys, strict=True) if a is not None and b is not None]
        some = [pairs[round(place * (len(pairs) - 1) / 5)] for place in range(6)] if len(pairs) > 6 else pairs
        cells = "".join(f"<td>{_cell(a, x)}: {_cell(b, y)}</td>" for a, b in some)
        body.append(f"<tr><th>{escape(line.item.name)}</th>{cells}</tr>")
    heading = f"{escape(x.title)}: {escape(y.title)}"
    return (
        f'<details class="numbers"><summary>Numbers</summary><div class="wide"><table><caption>{heading}</caption>'
        f"{''.join(body)}</table></div></details>"
    )


def _cell(value: float, axis: Axis) -> str:
    return f"{readable(100 * value)}%" if axis.percent else readable(value)


def reliability(items: Sequence[Item]) -> str:
    """Accuracy against confidence."""
    share = {"low": 0.0, "high": 1.0, "percent": True}
    curves = []
    for item in items:
        curve = item.evidence["reliability"]
        rows = sum(curve["count"])
        # Bins with next to no rows are noise.
        shown = [
            value if count >= max(3, 0.002 * rows) else None
            for value, count in zip(curve["accuracy"], curve["count"], strict=True)
        ]
        curves.append(Line(item, curve["confidence"], shown))
    caption = (
        "<b>Reliability.</b> Of the answers given with some confidence, how many are right? On the diagonal as many "
        "as the confidence says; below it fewer: overconfident."
    )
    x, y = Axis(title="confidence", **share), Axis(title="share of right answers", **share)  # pyright: ignore
    return lines(curves, x, y, caption, dots=True, diagonal=True)


def rejection(items: Sequence[Item], what: str, percent: bool) -> str:
    """What is gained when the most uncertain rows are left to someone else."""
    curves = [Line(item, item.evidence["rejection"]["rejected"], item.evidence["rejection"]["kept"]) for item in items]
    values = [value for line in curves for value in line.ys]
    low, high = span(values)
    y = Axis(title=f"{what}, rows kept", low=low, high=min(high, 1.002) if percent else high, percent=percent)
    x = Axis(
        title="share of rows left out, most uncertain first", low=0, high=0.95, percent=True, ticks=(0, 0.25, 0.5, 0.75)
    )
    good = "rise" if percent else "fall"
    caption = (
        f"<b>Selective prediction.</b> {escape(what[:1].upper() + what[1:])} when the most uncertain rows are left "
        f"out. Where uncertainty finds the errors, curves {good} quickly."
    )
    return lines(curves, x, y, caption)


def roc(items: Sequence[Item], other: str) -> str:
    """How well uncertainty detects out-of-distribution rows."""
    share = {"low": 0.0, "high": 1.0, "percent": True}
    curves = [
        Line(item, item.evidence["roc"][other]["fpr"], item.evidence["roc"][other]["tpr"])
        for item in items
        if other in item.evidence.get("roc", {})
    ]
    caption = (
        f"<b>Out-of-distribution rows: {escape(other)}.</b> ROC curve of their detection by uncertainty alone; the "
        "upper left corner is perfect, the diagonal is guessing."
    )
    x = Axis(title="false positive rate: test rows", **share)  # pyright: ignore
    y = Axis(title="true positive rate: rows detected", **share)  # pyright: ignore
    return lines(curves, x, y, caption, diagonal=True)


SHIFTED = {
    "accuracy": ("accuracy", True),
    "nll": ("NLL", False),
    "ece": ("calibration error (ECE)", False),
    "rmse": ("RMSE", False),
    "coverage": ("coverage of 95 % intervals", True),
}


def shift(items: Sequence[Item], metric: str) -> str:
    """A metric from no shift to the strongest, averaged over all kinds of shift."""
    title, percent = SHIFTED[metric]
    curves = []
    for item in items:
        kinds = [curve[metric] for curve in item.evidence.get("shifts", {}).values() if metric in curve]
        if kinds:
            means = [_mean(values) for values in zip(*kinds, strict=True)]
            curves.append(Line(item, list(range(len(means))), means))
    values = [value for line in curves for value in line.ys]
    if not values:
        return ""
    there = [value for value in values if value is not None]
    low, high = span(there, zero=not percent and min(there) < 0.4 * max(there))
    y = Axis(title=title, low=low, high=min(high, 1.0) if percent else high, percent=percent)
    steps = len(curves[0].xs) - 1
    x = Axis(title="severity of the shift", low=0, high=steps, ticks=tuple(range(steps + 1)))
    return lines(curves, x, y, f"<b>{title[0].upper() + title[1:]} under shift.</b>", dots=True)


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if len(there) == len(values) else None


def coverage(items: Sequence[Item]) -> str:
    """Whether intervals hold what they promise."""
    share = {"low": 0.0, "high": 1.0, "percent": True}
    curves = [
        Line(item, item.evidence["coverage"]["levels"], item.evidence["coverage"]["observed"])
        for item in items
        if "coverage" in item.evidence
    ]
    caption = (
        "<b>Interval coverage.</b> How many true values lie in the intervals of each level? Below the diagonal "
        "too few: overconfident."
    )
    x, y = Axis(title="level of the interval", **share), Axis(title="observed coverage", **share)  # pyright: ignore
    return lines(curves, x, y, caption, dots=True, diagonal=True)


def training(items: Sequence[Item], metric: str) -> str:
    """Loss against passes over the data."""
    curves = [
        Line(item, item.evidence["training"]["epoch"], item.evidence["training"][metric])
        for item in items
        if item.evidence.get("training", {}).get(metric)
    ]
    values = sorted(value for line in curves for value in line.ys if value is not None)
    if not values:
        return ""
    # The first steps of some methods are far off; the chart shows where curves settle.
    low, high = span([values[0], values[min(len(values) - 1, int(0.97 * len(values)))]])
    last = max(value for line in curves for value in line.xs if value is not None)
    first = min(value for line in curves for value in line.xs if value is not None)
    what = "validation rows" if metric == "validation_nll" else "training rows, with the method's noise"
    caption = f"<b>Training.</b> NLL of {what}, epoch by epoch."
    if last == first:
        first, last = first - 1, first + 1
    ticks = tuple(range(round(first), round(last) + 1)) if last - first <= 10 else None  # epochs are whole
    x = Axis(title="epoch", low=first, high=last, ticks=ticks)
    return lines(curves, x, Axis(title="NLL", low=low, high=high), caption)


#: What quality may cost: heading, axis, and where it stands in a row.
COSTS = {
    "memory": "memory of the posterior, bytes",
    "time": "training, CPU seconds",
    "predictions": "1000 predictions, CPU seconds",
}


def _price(item: Item, what: str) -> float:
    row = item.row
    amount = {"memory": row.nbytes, "time": row.seconds, "predictions": row.predict_seconds}[what]
    return max(float(amount), 1e-3)


def cost(items: Sequence[Item], what: str) -> str:
    """Quality against one of `COSTS`."""
    items = [item for item in items if math.isfinite(item.row.metrics["nll"])]
    values = {item.name: _price(item, what) for item in items}
    if len(values) < 2:
        return ""
    low, high = min(values.values()), max(values.values())
    x = Axis(title=COSTS[what], low=low / 1.4, high=high * 2.2, log=True)
    ends = [value for item in items for value in (item.row.metrics["nll"], *item.intervals.get("nll", ()))]
    y = _quality(ends)
    told = "; ".join(
        f"{item.name} {readable(item.row.metrics['nll'])} at {readable(values[item.name])}" for item in items
    )
    chart = Chart(x, y, label=f"NLL against {x.title}: {told}.")
    spots = {item.name: chart.at(values[item.name], item.row.metrics["nll"]) for item in items}
    taken = [(px - 6, py - 6, px + 6, py + 6) for px, py in spots.values()]
    # The best choose first where their names stand.
    names = {item.name: free_spot(*spots[item.name], 6.1 * len(item.name), taken, chart) for item in items}
    for item in reversed(items):
        value = values[item.name]
        shown = size(value) if what == "memory" else f"{value:.3g} s"
        told = f"NLL {readable(item.row.metrics['nll'])}"
        if interval := item.intervals.get("nll"):
            chart.whisker(item.place, item.name, value, (interval[0], interval[1]))
            told += f" (95 %: {readable(interval[0], 3)} to {readable(interval[1], 3)})"
        chart.dot(item.place, item.name, value, item.row.metrics["nll"], f"{told}, {shown}")
        if (spot := names[item.name]) is not None:
            text = f'<text class="name" x="{spot[0]:.1f}" y="{spot[1]:.1f}">{escape(item.name)}</text>'
            chart.group(item.place, item.name, text)
    name = {"memory": "memory", "time": "training time", "predictions": "prediction time"}[what]
    caption = f"<b>Quality against {name}.</b> Down and to the left is better. Bars: 95 % intervals."
    return figure(chart.render(), caption, classes="together")


def intervals(items: Sequence[Item], metric: str) -> str:
    """A metric of every method with its 95 % interval, the best NLL on top."""
    having = [item for item in items if metric in item.intervals]
    if len(having) < 2:
        return ""
    _, title, form, lower, _ = next(column for column in COLUMNS if column[0] == metric)
    percent, count = form.endswith("%}"), len(having)
    low, high = span([value for item in having for value in item.intervals[metric]])
    width = 12 + 6.4 * max(len(item.name) for item in having)
    x = Axis(title=title, low=low, high=min(high, 1.005) if percent else high, percent=percent)
    y = Axis(title="", low=0.4, high=count + 0.6, ticks=())
    chart = Chart(x, y, "", height=64 + 19 * count, margin=round(width))
    told = []
    for number, item in enumerate(having):
        value, (first, last) = item.row.metrics[metric], item.intervals[metric]
        told.append(f"{item.name} {cell(value, form)} ({cell(first, form)} to {cell(last, form)})")
        chart.whisker(item.place, item.name, (first, last), count - number)
        chart.dot(item.place, item.name, value, count - number, told[-1].removeprefix(f"{item.name} "))
        left, up = chart.at(low, count - number)
        spot = f'text-anchor="end" x="{left - 8:.1f}" y="{up + 4:.1f}"'
        chart.group(item.place, item.name, f'<text class="name" {spot}>{escape(item.name)}</text>')
    chart.label = f"{title} with 95 % intervals: {'; '.join(told)}."
    way = {True: "Left is better.", False: "Right is better.", None: ""}[lower]
    return figure(chart.render(), f"<b>{title}</b> with its 95 % intervals. {way}", classes="together")


def _quality(values: Sequence[float]) -> Axis:
    """The axis of NLL: equal ratios take equal room where it is positive and some methods are far from the rest."""
    if min(values) > 0 and max(values) > 4 * min(values):
        return Axis(title="NLL", low=min(values) / 1.2, high=max(values) * 1.2, log=True)
    low, high = span(values, pad=0.1)
    return Axis(title="NLL", low=low, high=high)


def free_spot(
    x: float, y: float, width: float, taken: list[tuple[float, float, float, float]], chart: Chart
) -> tuple[float, float] | None:
    """Where a name fits beside its mark without covering another; None where nowhere."""
    left, right, top, bottom = chart.box
    for dx, dy in ((9, 4), (-9 - width, 4), (-width / 2, -10), (-width / 2, 18), (9, -7), (9, 15)):
        box = (x + dx, y + dy - 9, x + dx + width, y + dy + 2)
        inside = box[0] >= left - 4 and box[2] <= right + 10 and box[1] >= top - 4 and box[3] <= bottom
        if inside and not any(_overlap(box, other) for other in taken):
            taken.append(box)
            return box[0], y + dy
    return None


def _overlap(first: tuple[float, float, float, float], second: tuple[float, float, float, float]) -> bool:
    return first[0] < second[2] and second[0] < first[2] and first[1] < second[3] and second[1] < first[3]
