"""What a posterior holds, as data and as a table."""

from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

from .lazy import rich_console
from .notebook import html

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class SummaryRow:
    """One parameter of the network.

    Attributes:
        name: the user's own name.
        shape: of the parameter.
        holds: what the posterior keeps for it.
        num_parameters: the weights and what is kept beside them.
    """

    name: str
    shape: tuple[int, ...]
    holds: str
    num_parameters: int


@dataclass(frozen=True, repr=False)
class Summary:
    """All parameters of a posterior; a prompt, `print` and a notebook show its table.

    Attributes:
        method: the method's name.
        rows: one per parameter.
        num_parameters: of the whole posterior.
        nbytes: of the whole posterior.
        notes: lines below the table.
    """

    method: str
    rows: tuple[SummaryRow, ...]
    num_parameters: int
    nbytes: int
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        # Into a file of its own, and with names as they are: `[0]` or `:x:` in them is no markup.
        text = StringIO()
        console = rich_console()(file=text, width=110, color_system=None, markup=False, emoji=False)
        console.print(self._table(), *self.notes, sep="\n")
        return text.getvalue()

    def _repr_html_(self) -> str:
        return html(self._table(), self.notes)

    def _table(self) -> "Table":
        from rich.table import Table

        table = Table(title=f"{self.method}: {self.num_parameters:,} parameters, {self.nbytes:,} bytes")
        for name in ("parameter", "shape", "holds", "numbers"):
            table.add_column(name, justify="right" if name == "numbers" else "left", overflow="fold")
        for row in self.rows:
            table.add_row(row.name, "×".join(map(str, row.shape)) or "scalar", row.holds, f"{row.num_parameters:,}")
        return table
