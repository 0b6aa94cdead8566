"""`python -m papers.references.page` writes docs/references.md, docs/assets/references.html and docs/tabular.md.

All is made from stored results; what was not run is named with the command that runs it.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from dubito import methods
from dubito.compare.words import readable, size
from dubito.report import colours
from dubito.report.charts import figure, free_spot
from dubito.report.page import document, picker
from dubito.report.svg import Axis, Chart, span
from dubito.storage import write_text

from ..runner.store import Results
from . import calibration, gap_page, tabular_page
from .ranking import Board, Standing, boards, command, measured, missing, sentence

DOCS = Path(__file__).parents[2] / "docs"
PAGE, CHARTS, TABLES = DOCS / "references.md", DOCS / "assets" / "references.html", DOCS / "tabular.md"

TITLE = "How close to the true posterior?"
LEAD = """Methods are sold by accuracy; here they are ranked by how far they are from what they approximate: predictions
of long chains of Hamiltonian Monte Carlo for the same network, prior and rows."""
HEAD = f"""# {TITLE}

{LEAD} `python -m papers.references.page` writes this page from stored results, and the same with charts that answer a
pointer: [distance against bytes and CPU time](assets/references.html). How the methods do against other tools stands in
[tables against other tools](tabular.md).

"As the reference's posterior" is the reference's prior at temperature 1, without a search of the precision, a scale
or early stopping; "as shipped" are the library's defaults. Intervals are of 95 %, Student's t over runs, one pair of
methods at a time: the closest is the best of many, so that a narrow lead may be luck. A method *ties* where the
interval of the difference lies within a margin nobody would act on; *no difference shown* means that the interval
holds 0. CPU time is that of a run, on one thread. "By the means" compares means alone."""
NOTHING = "No table has results yet."
COSTS = {"nbytes": "bytes of the posterior", "seconds": "CPU seconds of a run"}


def page(made: Sequence[Board], results: Results | None = None) -> str:
    """The page for the site."""
    results = results or Results()
    calibrated, gaps = calibration.section(results), gap_page.section(results)
    parts = [HEAD, *map(section, made), *filter(None, (gaps, calibrated))]
    if not made:
        parts.append(NOTHING)
    tables = {"uci-gap": gaps, "sbc": calibrated}
    if absent := [*missing(made), *(name for name, told in tables.items() if not told)]:
        lines = "\n".join(map(command, absent))
        told = f"No results yet of {', '.join(absent)}. With the data in a folder of DUBITO_DATA:"
        parts.append(f"## Not run\n\n{told}\n\n```sh\n{lines}\npython -m papers.references.page\n```")
    return "\n\n".join(parts) + "\n"


def section(board: Board) -> str:
    """One source: a table in order, with a sentence for each method."""
    lines = [
        f"## {_title(board)}",
        "",
        f"{_over(board)} {'Lower' if board.source.lower_is_better else 'Higher'} is closer.",
        "",
        f"| | {board.source.metric.replace('_', ' ')} | minus the closest's | bytes | CPU-seconds | what follows |",
        "|---|---|---|---:|---:|---|",
    ]
    floor = [board.floor] if board.floor else []
    for standing in (*floor, *board.standings):
        row = standing.row
        cells = (
            f"{standing.method}, against itself" if standing in floor else standing.method,
            measured(standing.span, len(row.values)),
            "" if standing.gap is None else _gap(standing),
            "" if row.nbytes is None else size(row.nbytes),
            "" if row.seconds is None else readable(row.seconds, 3),
            "The floor." if standing in floor else sentence(standing, board),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _title(board: Board) -> str:
    return board.source.title[0].upper() + board.source.title[1:]


def _over(board: Board) -> str:
    over = f"means over {', '.join(board.data)}" if len(board.data) > 1 else board.data[0]
    told = f"Table `{board.source.table}`, {over}."
    return told + (f" Left out, for they lack a data set: {', '.join(board.incomplete)}." if board.incomplete else "")


def _gap(standing: Standing) -> str:
    assert standing.gap is not None
    if standing.gap.half is None:
        return f"{standing.gap.value:+.3g}"
    low, high = standing.gap.ends
    return f"{standing.gap.value:+.3g} ({low:+.3g} to {high:+.3g})"


# -- the page that answers a pointer ------------------------------------------------------------------------------


def charts(made: Sequence[Board]) -> str:
    """One file that needs nothing else, in the style of a comparison's report."""
    names = list(dict.fromkeys(standing.method for board in made for standing in board.standings))
    places = colours.places(names, methods())
    absent = "".join(f"<li><code>{escape(command(name))}</code></li>" for name in missing(made))
    not_run = f"<section><h2>Not run</h2><ul>{absent}</ul></section>" if absent else ""
    body = "".join(drawn(board, places) for board in made) or f"<section><p>{NOTHING}</p></section>"
    main = f"<main>\n{body}{not_run}\n</main>"
    body = f"{picker(places, len(places)) if names else ''}\n{main}"
    return document(TITLE, TITLE, f"{LEAD} Bars: 95 % intervals over runs.", body, set(places.values()))


def drawn(board: Board, places: dict[str, int]) -> str:
    """Charts, a table that can be sorted, and the sentences of one source."""
    figures = "".join([forest(board, places), *(scatter(board, places, name) for name in COSTS)])
    heads = ("method", board.source.metric.replace("_", " "), "bytes", "CPU-seconds", "what to take away")
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    lines = []
    for standing in board.standings:
        numbers = (standing.span.value, standing.row.nbytes, standing.row.seconds)
        texts = (
            readable(standing.span.value, 3)
            + ("" if standing.span.half is None else f" ± {readable(standing.span.half, 2)}"),
            "" if standing.row.nbytes is None else size(standing.row.nbytes),
            "" if standing.row.seconds is None else readable(standing.row.seconds, 3),
        )
        cells = "".join(
            f'<td data-value="{math_value(number)}">{escape(text)}</td>'
            for number, text in zip(numbers, texts, strict=True)
        )
        place, title = places[standing.method], escape(standing.method)
        name = f'<th scope="row" class="m{place}"><i class="swatch"></i>{title}</th>'
        told = f'<td style="text-align:left;white-space:normal">{escape(sentence(standing, board))}</td>'
        lines.append(f"<tr>{name}{cells}{told}</tr>")
    table = f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    return (
        f'<section><h2>{escape(_title(board))}</h2><p class="small">{escape(_over(board).replace("`", ""))}</p>'
        f'<div class="figures">{figures}</div><div class="wide">{table}</div></section>'
    )


def math_value(number: float | None) -> str:
    """A number to sort by; what is not there comes last."""
    return "1e99" if number is None else f"{number:.8g}"


def _quality(board: Board) -> Axis:
    ends = [end for standing in board.standings for end in standing.span.ends]
    ends += [board.floor.span.value] if board.floor else []
    title = board.source.metric.replace("_", " ")
    if min(ends) > 0 and max(ends) > 4 * min(ends):
        return Axis(title=title, low=min(ends) / 1.2, high=max(ends) * 1.2, log=True)
    low, high = span(ends, pad=0.1)
    return Axis(title=title, low=low, high=high)


def scatter(board: Board, places: dict[str, int], cost: str) -> str:
    """Distance against what a method costs."""
    prices = {standing.method: getattr(standing.row, cost) for standing in board.standings}
    having = [standing for standing in board.standings if prices[standing.method]]
    if len(having) < 2:
        return ""
    values = [prices[standing.method] for standing in having]
    x = Axis(title=COSTS[cost], low=min(values) / 1.4, high=max(values) * 2.2, log=True)
    told = "; ".join(f"{standing.method} {measured(standing.span, len(standing.row.values))}" for standing in having)
    chart = Chart(x, _quality(board), label=f"{board.source.title} against {COSTS[cost]}: {told}.")
    if board.floor is not None:
        chart.guide([x.low, x.high], [board.floor.span.value] * 2)
    spots = {standing.method: chart.at(prices[standing.method], standing.span.value) for standing in having}
    taken = [(left - 6, up - 6, left + 6, up + 6) for left, up in spots.values()]
    for standing in having:  # the nearest choose first where their names stand
        name, place, price = standing.method, places[standing.method], prices[standing.method]
        if standing.span.half is not None:
            chart.whisker(place, name, price, standing.span.ends)
        shown = size(price) if cost == "nbytes" else f"{readable(price, 3)} s"
        chart.dot(
            place, name, price, standing.span.value, f"{measured(standing.span, len(standing.row.values))}, {shown}"
        )
        if (spot := free_spot(*spots[name], 6.1 * len(name), taken, chart)) is not None:
            text = f'<text class="name" x="{spot[0]:.1f}" y="{spot[1]:.1f}">{escape(name)}</text>'
            chart.group(place, name, text)
    down = "Down" if board.source.lower_is_better else "Up"
    floor = " Dashed: the reference against itself." if board.floor else ""
    return figure(
        chart.render(), f"<b>Against {COSTS[cost]}.</b> {down} and to the left is better.{floor}", "", "together"
    )


def forest(board: Board, places: dict[str, int]) -> str:
    """Every method with its interval, the closest on top."""
    count, x = len(board.standings), _quality(board)
    width = 12 + 6.4 * max(len(standing.method) for standing in board.standings)
    y = Axis(title="", low=0.4, high=count + 0.6, ticks=())
    told = "; ".join(
        f"{standing.method} {measured(standing.span, len(standing.row.values))}" for standing in board.standings
    )
    chart = Chart(x, y, f"{board.source.title}: {told}.", height=64 + 19 * count, margin=round(width))
    if board.floor is not None:
        chart.guide([board.floor.span.value] * 2, [y.low, y.high])
    for number, standing in enumerate(board.standings):
        place, height = places[standing.method], count - number
        if standing.span.half is not None:
            chart.whisker(place, standing.method, standing.span.ends, height)
        chart.dot(
            place, standing.method, standing.span.value, height, measured(standing.span, len(standing.row.values))
        )
        left, up = chart.at(x.low, height)
        spot = f'text-anchor="end" x="{left - 8:.1f}" y="{up + 4:.1f}"'
        chart.group(place, standing.method, f'<text class="name" {spot}>{escape(standing.method)}</text>')
    return figure(chart.render(), f"<b>{escape(_title(board))}</b>, the closest on top.", "", "together")


def write(results: Results | None = None) -> None:
    """Write all three files."""
    made = boards(results)
    CHARTS.parent.mkdir(exist_ok=True)
    for path, text in ((PAGE, page(made, results)), (CHARTS, charts(made)), (TABLES, tabular_page.page(results))):
        write_text(path, text)


if __name__ == "__main__":
    write()
    print(f"wrote {PAGE}, {CHARTS} and {TABLES}")
