"""Charts of which every method has its own small one."""

from collections.abc import Sequence
from html import escape
from typing import Any

from ..compare.words import readable
from .charts import Item, figure
from .svg import Axis, Chart, span
from .terms import explained

WIDTH, HEIGHT = 210, 128
#: The parts of a class prediction's entropy, and of a real one's standard deviation.
PARTS, STD_PARTS = ("aleatoric", "epistemic"), ("aleatoric_std", "epistemic_std")


def grid(title: str, figures: Sequence[str], legend: str = "") -> str:
    """Small figures side by side."""
    if not figures:
        return ""
    return f'<div class="multiples"><p>{explained(title)}</p>{legend}<div>{"".join(figures)}</div></div>'


def _small(item: Item, chart: Chart, told: str = "") -> str:
    name = f'<i class="swatch"></i>{escape(item.name)}'
    return figure(chart.render(), f"{name} <span>{told}</span>", classes=f"m{item.place}")


def histograms(items: Sequence[Item], key: str) -> str:
    """Confidence, entropy or standard deviation of test rows and of out-of-distribution ones."""
    having = [item for item in items if key in item.evidence.get("histograms", {})]
    if not having:
        return ""
    shares = [
        share for item in having for heights in item.evidence["histograms"][key]["shares"].values() for share in heights
    ]
    high = max(shares) * 1.05
    others = list(
        dict.fromkeys(name for item in having for name in list(item.evidence["histograms"][key]["shares"])[1:])
    )
    figures = []
    for item in having:
        bars = item.evidence["histograms"][key]
        x = Axis(title=key, low=bars["low"], high=bars["high"], percent=key == "confidence")
        (_, inside), *outside = bars["shares"].items()
        told = "; ".join(
            f"{name}: {readable(_centre(heights, bars))} on average" for name, heights in bars["shares"].items()
        )
        y = Axis(title="share of rows", low=0, high=high, percent=True)
        chart = Chart(x, y, f"Histogram of {key}, {item.name}. {told}.", WIDTH, HEIGHT, small=True)
        chart.bars(item.place, f"{item.name}, test rows", inside, "inside")
        for name, heights in outside:
            chart.bars(item.place, f"{item.name}, {name}", heights, f"outside set{others.index(name) % 3}")
        figures.append(_small(item, chart))
    keys = (f' <i class="outside set{number % 3}"></i>{escape(name)}' for number, name in enumerate(others))
    legend = f'<p class="key"><i class="inside"></i>test rows{"".join(keys)}</p>'
    good = {"confidence": "to the left", "entropy": "to the right", "standard deviation": "to the right"}[key]
    text = f"<b>{key.capitalize()}.</b>"
    if len(targets(items)) > 1:
        text += " The geometric mean over the targets."
    if others:
        text += f" Out-of-distribution rows should lie {good}, apart from the test rows."
    return grid(text, figures, legend)


def _centre(shares: Sequence[float], bars: dict[str, Any]) -> float:
    width = (bars["high"] - bars["low"]) / len(shares)
    return sum(share * (bars["low"] + (place + 0.5) * width) for place, share in enumerate(shares)) / max(
        sum(shares), 1e-9
    )


def decomposition(items: Sequence[Item], target: str | None) -> str:
    """Aleatoric against epistemic uncertainty, row by row.

    Args:
        items: methods.
        target: of reals, whose standard deviations are drawn in its units; None for classes, in nats.
    """
    aleatoric, epistemic = PARTS if target is None else STD_PARTS
    sets = {item.name: rows for item in items if (rows := _sets(item, target)) is not None}
    # Rows far outside training may be a hundred times as uncertain as others, which must not become one dot.
    tests = [{"test": rows["test"]} for rows in sets.values()]
    high = 1.05 * min(_most(list(sets.values())), 4 * _most(tests)) or 1.0
    unit = "nats" if target is None else f"the units of {target}"
    axes = [Axis(title=f"{name}, {unit}", low=0, high=high) for name in (aleatoric, epistemic)]
    figures = [_scatter(item, sets[item.name], aleatoric, epistemic, axes) for item in items if item.name in sets]
    of = "" if target is None else f" of {escape(target)}"
    text = (
        f"<b>Aleatoric against epistemic{of}.</b> Horizontal: what more data would not remove; vertical: what they "
        f"would. In {escape(unit)}; points beyond the axes are drawn at the edge."
    )
    legend = '<p class="key"><i class="dot"></i>test rows'
    others = any(len(rows) > 1 for rows in sets.values())
    legend += ' <i class="ring"></i>out-of-distribution rows</p>' if others else "</p>"
    return grid(text, figures, legend)


def _scatter(item: Item, sets: dict[str, dict[str, Any]], aleatoric: str, epistemic: str, axes: Sequence[Axis]) -> str:
    """One method's rows: the first set as dots, out-of-distribution ones as rings."""
    means = {name: [_mean(parts[part]) for part in (aleatoric, epistemic)] for name, parts in sets.items()}
    told = "; ".join(
        f"{name}: {aleatoric} {readable(across)}, {epistemic} {readable(up)} on average"
        for name, (across, up) in means.items()
    )
    label = f"Uncertainty of {item.name} by its source. {told}."
    chart = Chart(*axes, label=label, width=WIDTH, height=150, small=True)
    high = axes[0].high
    chart.guide([0, high], [0, high])
    (_, inside), *outside = sets.items()
    for name, parts in outside:
        for kind in ("ring", "hole"):
            chart.cloud(item.place, f"{item.name}, {name} rows", parts[aleatoric], parts[epistemic], kind)
    chart.cloud(item.place, f"{item.name}, test rows", inside[aleatoric], inside[epistemic])
    return _small(item, chart, f"{epistemic} {readable(means['test'][1])} on average over test rows")


def targets(items: Sequence[Item]) -> list[str | None]:
    """The real targets of which there is something to draw; of classes a single None."""
    return list(dict.fromkeys(name for item in items for name in item.evidence.get("decomposition_std", [None])))


def _sets(item: Item, target: str | None) -> dict[str, dict[str, Any]] | None:
    """Both parts of uncertainty of each set of rows; of reals those of one target, if the method has them."""
    if target is None:
        return item.evidence["decomposition"]
    return item.evidence["decomposition_std"].get(target)


def _most(sets: Sequence[dict[str, dict[str, Any]]]) -> float:
    """The most uncertainty of either kind, but for a few outliers."""
    spots = [
        value
        for rows in sets
        for parts in rows.values()
        for values in parts.values()
        for value in values
        if value is not None
    ]
    return sorted(spots)[int(0.995 * (len(spots) - 1))] if spots else 0.0


def _mean(values: Sequence[float | None]) -> float:
    there = [value for value in values if value is not None]
    return sum(there) / max(len(there), 1)


def fans(items: Sequence[Item], target: str) -> str:
    """Bands of predictions with the truth."""
    having = [item for item in items if "fan" in item.evidence]
    if not having:
        return ""
    ends = [
        value
        for item in having
        for key in ("low50", "high50", "dots")
        for value in item.evidence["fan"][key]
        if value is not None
    ]
    low, high = min(ends), max(ends)
    room = 0.25 * (high - low) or 1.0
    figures = []
    for item in having:
        fan = item.evidence["fan"]
        xs = fan["x"]
        ends = (min(xs), max(xs)) if min(xs) < max(xs) else span(xs)
        x = Axis(title=fan["name"], low=ends[0], high=ends[1])
        y = Axis(title=target, low=low - room, high=high + room)
        chart = Chart(x, y, _fan_label(item.name, target, fan), 300, 200, small=True)
        chart.band(item.place, item.name, xs, fan["low95"], fan["high95"], "band95")
        chart.band(item.place, item.name, xs, fan["low50"], fan["high50"], "band50")
        chart.line(item.place, item.name, xs, fan["mean"])
        chart.marks.append(f'<path class="truth" d="{_spots(chart, fan)}"/>')
        figures.append(_small(item, chart))
    name = having[0].evidence["fan"]["name"]
    text = (
        f"<b>Predictions and their intervals.</b> {escape(target)} over {escape(name)}: mean, 50 % and 95 % bands; "
        "dots are true values."
    )
    return grid(text, figures).replace("multiples", "multiples larger", 1)


def _fan_label(name: str, target: str, fan: dict[str, Any]) -> str:
    widths = [high - low for low, high in zip(fan["low95"], fan["high95"], strict=True) if None not in (low, high)]
    told = f"; its 95 % band is {readable(min(widths))} to {readable(max(widths))} wide" if widths else ""
    return f"Fan chart of {name}: {target} over {fan['name']}{told}."


def _spots(chart: Chart, fan: dict[str, Any]) -> str:
    return "".join(f"M{spot.replace(',', ' ')}h0" for spot in chart.path(fan["dots_x"], fan["dots"]).split())


def least_certain(items: Sequence[Item]) -> str:
    """The rows of which each method is least certain."""
    blocks = []
    for number, item in enumerate(items):
        rows = item.evidence.get("least_certain") or []
        if not rows:
            continue
        cards = "".join(_card(row) for row in rows)
        opened = " open" if number == 0 else ""
        blocks.append(
            f'<details class="rows m{item.place}"{opened}><summary><i class="swatch"></i>{escape(item.name)}</summary>'
            f'<div class="cards">{cards}</div></details>'
        )
    if not blocks:
        return ""
    title = "The test rows of which each method is least certain."
    return f'<div class="uncertain"><p><b>{title}</b></p>{"".join(blocks)}</div>'


def _card(row: dict[str, Any]) -> str:
    wrong = "" if row.get("right", True) else " class=wrong"
    if "image" in row:
        seen = f'<img src="{row["image"]}" alt="test row {row["row"]}: {escape(row["true"])}" loading="lazy">'
    else:
        pairs = row.get("values", {}).items()
        seen = "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs) + "</dl>"
    parts = "<br>".join(f"{name} {readable(row[name], 3)}" for name in (*PARTS, *STD_PARTS) if name in row)
    return (
        f"<div{wrong}>{seen}<p><b>{escape(row['said'])}</b><br>true: {escape(row['true'])}<br>"
        f"<small>{parts}</small></p></div>"
    )
