"""Tables as HTML, for notebooks: small, escaped, and in the notebook's own colours."""

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

#: Rows of a table that are shown; the others are counted.
MOST_ROWS = 30


def html(table: "Table", notes: Iterable[str] = (), *, markup: bool = False, rows: int | None = None) -> str:
    """A table as HTML.

    Args:
        table: its title, headings and cells, all of them words.
        notes: lines below it.
        markup: whether cells are rich's markup, of which bold is shown; else they are words as they stand.
        rows: in all, where the table holds the first of them.
    """
    from rich.text import Text

    def cell(text: str, side: str) -> str:
        read = Text.from_markup(text) if markup else Text(text)
        shown = f"<b>{escape(read.plain)}</b>" if read.spans else escape(read.plain)
        return f'<td style="text-align: {side}">{shown}</td>'

    sides = ["right" if column.justify == "right" else "left" for column in table.columns]
    heads = zip(table.columns, sides, strict=True)
    headings = "".join(f'<th style="text-align: {side}">{escape(str(column.header))}</th>' for column, side in heads)
    lines = list(zip(*(column.cells for column in table.columns), strict=True))
    body = "".join(
        f"<tr>{''.join(cell(str(text), side) for text, side in zip(line, sides, strict=True))}</tr>"
        for line in lines[:MOST_ROWS]
    )
    if (left := (rows or len(lines)) - len(lines[:MOST_ROWS])) > 0:
        notes = (f"… and {left:,} rows more", *notes)
    below = "".join(f"<div><small>{escape(note)}</small></div>" for note in notes)
    title = "" if table.title is None else f"<div><b>{escape(str(table.title))}</b></div>"
    return f"<div>{title}<table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table>{below}</div>"
