"""Panels beside the charts: what the data are, and which classes are confused."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ..compare.words import listed, readable
from .charts import Item, figure
from .svg import Axis, Chart

#: Classes that are shown one by one, and pairs of confused ones where there are more.
MOST_CLASSES, MOST_PAIRS = 20, 15
#: What a column becomes, in words.
KINDS = {"number": "of numbers", "category": "of categories", "date": "of dates", "ignored": "left out"}


def data_panel(task: Mapping[str, Any]) -> str:
    """Rows, columns, gaps, balance of classes or spread of the target, and what was done to a table."""
    figures = [_facts(task)]
    if spread := task.get("spread"):
        figures.append(
            _balance(task["class_names"], spread) if task["class_names"] else _histogram(task["target"], spread)
        )
    notes = "".join(f"<li>{escape(note)}</li>" for note in task["notes"])
    if notes:
        figures.append(f"<figure><figcaption><b>How the table was read</b></figcaption><ul>{notes}</ul></figure>")
    return f'<section id="data"><h2>Data</h2><div class="figures">{"".join(figures)}</div></section>'


def _facts(task: Mapping[str, Any]) -> str:
    columns, shape = task["reader"]["columns"], task["reader"]["shape"]
    counts = {kind: sum(column["kind"] == kind for column in columns) for kind in KINDS}
    kinds = [f"{count} {KINDS[kind]}" for kind, count in counts.items() if count]
    facts = {"rows": listed([f"{count:,} {name}" for name, count in task["rows"].items()])}
    if outside := task.get("ood"):
        facts["out-of-distribution rows"] = listed([f"{count:,} {name}" for name, count in outside.items()])
    if len(shape) > 1:
        facts["each input"] = " × ".join(map(str, shape))
    elif columns:
        facts["columns"] = f"{listed(kinds)}; {shape[0]:,} inputs of the network"
        gaps = [f"{name} {share:.1%}" for name, share in _gaps(task).items()]
        facts["missing in training"] = ", ".join(gaps) or "nothing"
    facts |= {"target": task["target"]}
    lines = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>' for name, text in facts.items()
    )
    return f'<figure><div class="wide"><table class="left">{lines}</table></div></figure>'


def _gaps(task: Mapping[str, Any]) -> dict[str, float]:
    """The share of training rows that lack a value, by column: the mean of the input that flags it."""
    reader, place, gaps = task["reader"], 0, {}
    for column in reader["columns"]:
        place += column["features"]
        if column["flagged"] and reader["scaling"] is not None:
            gaps[column["name"]] = reader["scaling"]["shift"][place - 1]
    return gaps


def _balance(names: Sequence[str], spread: Mapping[str, Sequence[int]]) -> str:
    """How many rows each class has."""
    total, most = (max(1, function(spread["training"])) for function in (sum, max))
    order = sorted(range(len(names)), key=lambda place: -spread["training"][place])
    places = sorted(order[:MOST_CLASSES])
    lines = "".join(
        f'<tr><th scope="row">{escape(names[place])}</th><td>{spread["training"][place]:,}</td>'
        f"<td>{spread['training'][place] / total:.1%}</td><td>{spread['test'][place]:,}</td>"
        f'<td class="bar"><i style="width:{100 * spread["training"][place] / most:.0f}%"></i></td></tr>'
        for place in places
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("class", "training", "share", "test", ""))
    more = f" The {len(places)} most frequent of {len(names)}." if len(names) > len(places) else ""
    table = f'<table class="balance"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
    return figure(f'<div class="wide">{table}</div>', f"<b>Balance of classes.</b>{more}")


def _histogram(target: str, spread: Mapping[str, Any]) -> str:
    """Where the real targets lie."""
    if not spread["high"] > spread["low"]:
        return ""
    shares = {name: [count / max(1, sum(spread[name])) for count in spread[name]] for name in ("training", "test")}
    y = Axis(title="share of rows", low=0, high=1.05 * max(max(heights) for heights in shares.values()), percent=True)
    x = Axis(title=target, low=spread["low"], high=spread["high"])
    ends = f"{readable(spread['low'], 3)} to {readable(spread['high'], 3)}"
    chart = Chart(x, y, f"Histogram of {target} in training and test rows, from {ends}.", height=240)
    chart.bars(-1, "training rows", shares["training"], "inside")
    chart.bars(-1, "test rows", shares["test"], "outside")
    key = '<span class="key"><i class="inside"></i>training rows <i class="outside"></i>test rows</span>'
    return figure(chart.render(), f"<b>{escape(target)}</b>, from its 0.5 to its 99.5 % quantile. {key}")


def confusions(items: Sequence[Item], names: Sequence[str]) -> str:
    """Which classes each method takes for which, on test rows, and how well it does in each."""
    having = [item for item in items if "confusion" in item.evidence]
    if not having:
        return ""
    blocks = []
    for number, item in enumerate(having):
        matrix = item.evidence["confusion"]
        drawn = _matrix(matrix, names) if len(names) <= MOST_CLASSES else _pairs(matrix, names)
        blocks.append(
            f'<details class="rows m{item.place}"{"" if number else " open"}><summary><i class="swatch"></i>'
            f'{escape(item.name)}</summary><div class="wide" tabindex="0">{drawn}</div></details>'
        )
    told = "Test rows by true class (rows) and predicted class (columns). "
    told += (
        "Recall: the share of a class that was predicted as it; precision: the share of its predictions that is right."
    )
    hint = '<p class="scroll narrow">Wider tables scroll to the right.</p>'
    return f'<div class="uncertain"><p><b>Confusion matrix.</b> {told}</p>{hint}{"".join(blocks)}</div>'


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _matrix(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    sums = [sum(column) for column in zip(*matrix, strict=True)]
    heads = (*names, "rows", "recall", "precision")
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    lines = []
    for place, (name, row) in enumerate(zip(names, matrix, strict=True)):
        total = sum(row)
        shares = [100 * count / max(1, total) for count in row]
        cells = "".join(
            f'<td style="--share:{share:.0f}"{" class=right" * (other == place)}>{count or ""}</td>'
            for other, (count, share) in enumerate(zip(row, shares, strict=True))
        )
        ends = (f"{total:,}", _share(row[place], total), _share(row[place], sums[place]))
        cells += "".join(f'<td class="sum">{text}</td>' for text in ends)
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    return f'<table class="confusion"><thead><tr><td></td>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _pairs(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """The most frequent confusions, where there are too many classes for a matrix."""
    wrong = [(count, a, b) for a, row in enumerate(matrix) for b, count in enumerate(row) if a != b and count]
    lines = "".join(
        f'<tr><th scope="row">{escape(names[a])}</th><td>{escape(names[b])}</td>'
        f"<td>{count} of {sum(matrix[a])}</td></tr>"
        for count, a, b in sorted(wrong, reverse=True)[:MOST_PAIRS]
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("true class", "taken for", "rows"))
    return f'<table class="left"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
