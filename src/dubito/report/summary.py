"""The top of the page: the verdict, the table of all methods, and what became of their training."""

import math
from collections.abc import Sequence
from html import escape
from itertools import starmap
from typing import Any

from ..compare.folder import MethodRow
from ..compare.table import SETS, best, caption, cell, columns, training_words
from ..compare.words import readable, size
from .terms import explained

#: Columns beside the metrics: heading, what it is, which way is better.
COSTS = (
    ("steps", "training steps, and whether training stopped early", ""),
    ("memory", "bytes of the stored posterior", "lower"),
    ("CPU time", "of a fit, with the MAP fit that it starts from", "lower"),
    ("predict", "CPU time of 1,000 predictions", "lower"),
)
#: How training ended, in words.
ENDED = {
    "limit": "made all its steps",
    "patience": "stopped early: validation loss no longer fell",
    "budget": "stopped by the budget",
    "": "nothing was trained",
}
FITS = ("method", "split", "steps", "training", "chosen on validation rows", "validation NLL", "CPU time")
PAIRED = "difference in NLL to {}, ± half its 95 % interval over the same rows"
FLATTERED = "Intervals are those of one pair of methods each; choosing the best of several flatters it a little."


def verdict(results: dict[str, Any]) -> str:
    """Which method to take, in a few sentences."""
    first, *others = map(escape, results["verdict"])
    told = f"<p><b>{explained(first)}</b></p><p>{explained(' '.join(others))}</p>"
    return f'<section id="verdict"><h2>Verdict</h2>{told}<p class="small">{FLATTERED}</p></section>'


def summary(results: dict[str, Any], task: dict[str, Any], rows: tuple[MethodRow, ...], styles: dict[str, int]) -> str:
    """The table of all methods, what its columns mean, and their training."""
    metrics = columns(rows)
    ways = {None: "", True: "lower", False: "higher"}
    heads = [(name, _unit(told, task), ways[lower]) for _, name, _, lower, told in metrics]
    if results["half_widths"]:
        place = 1 + next(number for number, column in enumerate(metrics) if column[0] == "nll")
        heads.insert(place, (f"NLL − {results['base']}", PAIRED.format(results["base"]), "lower"))
    heads += COSTS
    words = {name: told for name, told, _ in heads}
    heads = [("method", "", ""), *heads]
    head = "".join(f'<th scope="col"{_title(told, way)}>{escape(name)}</th>' for name, told, way in heads)
    body = "".join(_row(results, rows, row, _name(row, styles), [name for name, *_ in heads]) for row in rows)
    splits = len(results["settings"]["splits"])
    pooled = f" Numbers are means over {splits} splits; charts show the first of them." if splits > 1 else ""
    signs = f" {escape(caption(results))}." if caption(results) else ""
    words |= {name: SETS[name] for name in task.get("ood", {}) if name in SETS}
    told = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in words.items())
    return (
        '<section id="summary"><h2>Summary</h2><p class="scroll">The table goes on to the right: scroll it.</p>'
        f'<div class="wide" tabindex="0"><table class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
        f'<p class="small">Ranked by the NLL of the test rows; the best of each column is bold. '
        f"Small: {explained('95 % intervals')}.{signs}{pooled} "
        'A click on a heading sorts.</p><details class="words" open><summary>What the columns and sets are</summary>'
        f"<dl>{told}</dl></details>{_fits(rows, styles)}</section>"
    )


def _name(row: MethodRow, styles: dict[str, int]) -> str:
    return f'<th scope="row" class="m{styles[row.method]}"><i class="swatch"></i>{escape(row.method)}</th>'


def _title(told: str, way: str) -> str:
    return f' title="{escape(told)}{f"; {way} is better" if way else ""}"' if told else ""


def _unit(told: str, task: dict[str, Any]) -> str:
    return told.replace("the target's units", f"the units of {task['target']}")


def _small(ends: Sequence[float] | None, form: str) -> str:
    """An interval below its number; none where it has no width, as of a constant."""
    if ends is None or ends[0] == ends[1]:
        return ""
    form = form.replace(".4f", ".3f").replace(".2%", ".1%")
    first, last = (cell(value, form) if form else readable(value, 3) for value in ends)
    return f"<small>{first.removesuffix('%')}–{last}</small>"


def _row(results: dict[str, Any], rows: tuple[MethodRow, ...], row: MethodRow, name: str, heads: Sequence[str]) -> str:
    """One method's line of the table."""
    if row.failure is not None:
        return f'<tr class="failed">{name}<td colspan="{len(heads) - 1}">failed: {escape(row.failure)}</td></tr>'
    cells, level = [], results["indistinguishable"]
    base = next((other for other in rows if other.method == results["base"] and other.failure is None), None)
    ends = results.get("intervals", {}).get(row.method, {})
    for metric, _, form, lower, _ in columns(rows):
        value = row.metrics.get(metric, math.nan)
        mark = " class=best" if value == best(rows, metric, lower) else ""
        text = cell(value, form) if metric in row.metrics else "–"
        if metric == "nll" and sum(level.values()) > 1:
            # those without take the same room, so that digits stand under digits
            text += "&nbsp;≈" if level.get(row.method) else '&nbsp;<i class="gap">≈</i>'
        cells.append((mark, value, text + _small(ends.get(metric), form)))
        if metric == "nll" and results["half_widths"]:
            lead = value - base.metrics["nll"] if base else 0.0
            half = results["half_widths"].get(row.method)
            told = "–" if half is None else f"{lead:+.3f} ± {readable(half, 2)}".replace("-", "−")
            cells.append(("", lead, told))
    costs = (max((fit.steps for fit in row.fits), default=0), row.nbytes, row.seconds, row.predict_seconds)
    predict = f"{1000 * row.predict_seconds:.0f} ms" if row.predict_seconds < 0.9995 else f"{row.predict_seconds:.1f} s"
    shown = (size(row.nbytes), f"{row.seconds:.1f} s", predict)
    pairs = zip(costs, (escape(training_words(row)), *shown), strict=True)
    cells += [("", cost, text) for cost, text in pairs]
    body = "".join(
        f'<td{mark} data-label="{escape(head)}" data-value="{value:.9g}">{text}</td>'
        for head, (mark, value, text) in zip(heads[1:], cells, strict=True)
    )
    return f"<tr>{name}{body}</tr>"


def _fits(rows: Sequence[MethodRow], styles: dict[str, int]) -> str:
    """Steps, convergence and chosen settings of every fit."""
    lines = []
    for row in rows:
        for fit in row.fits if row.failure is None else ():
            shared = f" + {fit.shared_seconds:.1f} s shared" if fit.shared_seconds else ""
            texts = (
                f"{fit.split}",
                f"{fit.steps:,}{_kept(fit.best_step)}",
                ENDED[fit.ended],
                ", ".join(starmap(_chosen, fit.chosen.items())),
                "" if fit.validation_nll is None else f"{fit.validation_nll:.4f}",
                f"{fit.seconds:.1f} s{shared}",
            )
            cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
            lines.append(f"<tr>{_name(row, styles)}{cells}</tr>")
    head = "".join(f'<th scope="col">{name}</th>' for name in FITS)
    return (
        '<details><summary>Steps, convergence and chosen settings</summary><div class="wide"><table class="left">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></details>"
    )


def _kept(best_step: int | None) -> str:
    """Which step's state a fit kept."""
    if best_step is None:
        return ""
    return f", best at {best_step:,.0f}" if best_step else "; none better than the start, which was kept"


def _chosen(name: str, value: Any) -> str:
    if name == "warm":
        return f"start from {'the MAP fit' if value else 'scratch'}"
    return f"{name.replace('_', ' ')} {_plain(value)}"


def _plain(value: Any) -> str:
    return readable(value, 3) if isinstance(value, float) else str(value)
