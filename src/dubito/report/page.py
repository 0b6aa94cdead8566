"""The page of a comparison: one file that needs nothing else."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..compare.folder import Folder, MethodRow
from ..errors import StorageError
from ..registry import methods
from ..storage import write_text
from . import charts, colours, multiples, panels
from .charts import Item
from .summary import summary, verdict
from .terms import explained

#: Methods that are drawn at first; the others are a click away.
SHOWN = 8

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_page(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a comparison; returns its path.

    Args:
        folder: what `dubito compare` wrote.
        out: the page's file; None puts it into the folder.
    """
    comparison = Folder(folder)
    results, task = comparison.read("results"), comparison.read("task")
    if results is None or task is None:
        raise StorageError(f"{folder} must be a folder that `dubito compare` wrote, with results.json and task.json")
    rows = tuple(MethodRow.from_json(row) for row in results["rows"])
    stored = {row.method: comparison.result(row.method) for row in rows if row.failure is None}
    styles = colours.places([row.method for row in rows], methods())
    items = [
        Item(row.method, styles[row.method], row, result.evidence, results.get("intervals", {}).get(row.method, {}))
        for row in rows
        if (result := stored.get(row.method)) is not None
    ]
    path = folder / "report.html" if out is None else out
    write_text(path, page(results, task, rows, items, styles))
    return path


def page(
    results: dict[str, Any],
    task: dict[str, Any],
    rows: tuple[MethodRow, ...],
    items: list[Item],
    styles: dict[str, int],
) -> str:
    """The whole page as text."""
    name = escape(Path(results["data"]).name)
    timed = any(results["settings"][key] for key in ("budget", "budget_per_method"))
    body = f"""{verdict(results)}
{picker({item.name: item.place for item in items}, SHOWN)}
<main>
{summary(results, task, rows, styles)}
{panels.data_panel(task)}
{"".join(_sections(task, items, timed))}
{_settings(results, task, rows)}
</main>"""
    lead = _lead(task, rows)
    return document(f"{name}: methods compared by dubito", name, lead, body, set(styles.values()))


def document(title: str, heading: str, lead: str, body: str, places: set[int]) -> str:
    """A file that needs nothing else, with the style and the script of reports.

    Args:
        title: of the window.
        heading: above all.
        lead: below it.
        body: HTML, like the other texts.
        places: the styles of methods that it uses.
    """
    style, script = (
        files("dubito.report").joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "script.js")
    )
    style = style.replace("/*light hues*/", colours.variables(colours.LIGHT))
    style = style.replace("/*dark hues*/", colours.variables(colours.DARK))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}
{colours.rules(places)}
</style>
</head>
<body>
<header>
<button id="theme" type="button" hidden>Dark or light</button>
<h1>{heading}</h1>
<p class="lead">{lead}</p>
</header>
{body}
<div id="tip" role="status" aria-live="polite" hidden></div>
<script>
{script}
</script>
</body>
</html>
"""


def _lead(task: dict[str, Any], rows: Sequence[MethodRow]) -> str:
    kind = {"binary": "two classes", "classification": f"{len(task['class_names'])} classes"}.get(
        task["task"], "regression"
    )
    counts = task["rows"]
    parts = [
        f"{len(rows)} methods",
        f"{kind} ({escape(task['reason'])})" if task["reason"] != "the data set's own" else kind,
        f"{counts['training']:,} training, {counts['validation']:,} validation and {counts['test']:,} test rows",
        f"<code>{escape(task['network_title'])}</code>",
    ]
    text = " · ".join(parts)
    if likelihood := task.get("likelihood"):
        text += f"<br>Likelihood: {escape(likelihood)}."
    if outside := task.get("ood"):
        others = ", ".join(f"{escape(name)} ({count:,} rows)" for name, count in outside.items())
        text += f"<br>Out-of-distribution rows: {explained(others)}."
    return text


def picker(places: Mapping[str, int], shown: int) -> str:
    """Boxes that show and hide methods.

    Args:
        places: the style of each method, by name.
        shown: so many are ticked at first, and a few more where that is all.
    """
    boxes = []
    for number, (name, place) in enumerate(places.items()):
        checked = " checked" if number < shown or len(places) <= shown + 2 else ""
        boxes.append(
            f'<label class="m{place}"><input type="checkbox" id="on{place}" autocomplete="off"{checked}>'
            f'<i class="swatch"></i>{escape(name)}</label>'
        )
    buttons = "".join(f'<button type="button" data-show="{which}">{which}</button>' for which in ("all", "none"))
    buttons = f'<span class="all" hidden>{buttons}</span>'
    return f'<nav class="pick" aria-label="Methods that the charts show">{"".join(boxes)}{buttons}</nav>'


def _sections(task: dict[str, Any], items: Sequence[Item], timed: bool) -> list[str]:
    """The charts, as far as there is something to show."""
    if not items:
        return []
    real = task["task"] == "regression"
    rejected = charts.rejection(items, f"RMSE of {task['target']}" if real else "accuracy", percent=not real)
    forest = [charts.intervals(items, metric) for metric in ("nll", "rmse", "accuracy", "ood_auroc")]
    quality = [charts.cost(items, what) for what in charts.COSTS if not (timed and what == "time")]
    shifts = [
        charts.shift(items, metric) for metric in (("rmse", "nll", "coverage") if real else ("accuracy", "nll", "ece"))
    ]
    keys = dict.fromkeys(key for item in items for key in item.evidence.get("histograms", {}))
    drawn = [multiples.histograms(items, key) for key in keys]
    learned = [charts.training(items, metric) for metric in ("validation_nll", "nll")]
    parts = [multiples.decomposition(items, target) for target in multiples.targets(items)]
    if real:
        trust = [multiples.fans(items, task["target"]), charts.coverage(items), rejected]
    else:
        trust = [charts.reliability(items), rejected]
    told = dict.fromkeys(name for item in items for name in item.evidence.get("roc", {}))
    trust += [*(charts.roc(items, name) for name in told), panels.confusions(items, task["class_names"])]
    title = "In and out of distribution" if task.get("ood") else "How sure it is"
    return [
        _section("intervals", "How sure the ranking is", forest),
        _section("quality", "Cost against quality", quality),
        _section("trust", "Can it be trusted?", trust),
        _section("distribution", title, drawn),
        _section("shift", "Under shift", shifts),
        _section("uncertainty", "Where uncertainty comes from", [*parts, multiples.least_certain(items)]),
        _section("training", "Training", learned),
    ]


def _section(key: str, title: str, figures: Sequence[str]) -> str:
    body = "".join(figures)
    return f'<section id="{key}"><h2>{title}</h2><div class="figures">{body}</div></section>' if body else ""


def _settings(results: dict[str, Any], task: dict[str, Any], rows: Sequence[MethodRow]) -> str:
    settings = {key: value for key, value in results["settings"].items() if key not in ("versions", "type")}
    versions = ", ".join(f"{name} {version}" for name, version in results["settings"]["versions"].items())
    lines = "".join(
        f"<tr><th scope=row>{escape(row.method)}</th><td><code>{escape(row.settings)}</code>"
        f"{''.join(f'<br>{escape(note)}' for note in row.notes)}</td></tr>"
        for row in rows
    )
    return (
        '<section id="settings"><h2>Settings and versions</h2>'
        f"<p>{escape(versions)}. Data: {escape(task['source'])}; licence: {escape(task['licence'])}.</p>"
        f'<details><summary>Methods</summary><div class="wide"><table class="left">{lines}</table></div></details>'
        "<details><summary>Everything else</summary>"
        f"<pre>{escape(json.dumps(settings, indent=1))}</pre></details></section>"
    )
