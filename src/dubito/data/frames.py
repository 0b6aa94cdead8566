"""Files of tables as pandas frames, whose headings are words that differ and whose columns have their types."""

import csv
import gzip
import io
import re
import zipfile
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from dubito.errors import ConfigError, DataError, StorageError, require_extra

from .spelling import decimal_of, typed

#: Endings of tables; a file that is there and has another one, or none, is read by its content.
SUFFIXES = (".csv", ".tsv", ".txt", ".parquet", ".xlsx", ".npz")
#: What may stand between the cells of a line, in order of preference: commas stand in words and numbers too.
SEPARATORS = {"\t": "tabs", ";": "';'", "|": "'|'", ",": "commas"}
#: Lines that tell which of them it is.
LOOKED_AT = 100


def form_of(path: Path) -> Literal["npz", "parquet", "xlsx", "text"]:
    """What a file is: by its ending, else by its first bytes."""
    suffix = path.suffix.lower()
    if suffix in (".npz", ".parquet", ".xlsx"):
        return suffix[1:]  # pyright: ignore[reportReturnType]
    try:
        with path.open("rb") as file:
            first = file.read(4)
        if first == b"PAR1":
            return "parquet"
        if first == b"PK\3\4":
            with zipfile.ZipFile(path) as archive:
                return "xlsx" if "xl/workbook.xml" in archive.namelist() else "npz"
    except (OSError, zipfile.BadZipFile) as error:
        raise StorageError(f"{path} should be a table, reading it failed: {error}") from error
    if first == b"\xd0\xcf\x11\xe0":
        raise StorageError(f"{path} is a workbook in Excel's old form; save it as .xlsx or .csv")
    return "text"


def frame(path: Path, forms: Mapping[str, str] = MappingProxyType({}), used: Collection[str] | None = None) -> Any:
    """A table as a pandas frame with words for headings; its `attrs` hold "notes", "twice" and "forms".

    Args:
        path: a file of text, .parquet or .xlsx.
        forms: how columns of numbers and dates were written in a table like it, for what can be read in two ways.
        used: columns whose words may be numbers or dates; None for all.
    """
    table, facts = _read(path, forms)
    table, told = typed(table, str(path), forms, used=used, **facts.get("writing", {}))
    notes = ([f"read as {'; '.join(facts['read'])}"] if facts.get("read") else []) + facts.get("notes", [])
    table.attrs |= {"twice": facts["twice"], "notes": (*notes, *told)}
    return table


def written(path: Path) -> Any:
    """A table whose cells stand as in the file: of a text as words, else as values of their columns' types."""
    return _read(path, {}, written=True)[0]


def _read(path: Path, forms: Mapping[str, str], written: bool = False) -> tuple[Any, dict[str, Any]]:
    """A frame as pandas reads it, and how it was read."""
    pandas = require_extra("pandas", "tabular", f"reading {path}")
    try:
        form = form_of(path)
        if form == "parquet":
            options = {"dtype_backend": "numpy_nullable"} if written else {}  # whole numbers beside gaps stay whole
            table, facts = pandas.read_parquet(path, **options), {}
            headings = [str(name) for name in table.columns]
        elif form == "xlsx":
            table, headings, facts = _sheet(path)
            table = table.convert_dtypes() if written else table.infer_objects()
        else:
            table, headings, facts = _text(path, forms, written)
    except ImportError as error:
        needed = "openpyxl" if path.suffix.lower() == ".xlsx" else "pyarrow"
        raise ConfigError(
            f"reading {path} needs {needed}, which is not installed: pip install 'dubito[tabular]'"
        ) from error
    except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile) as error:  # of pandas, pyarrow, openpyxl
        told = _ragged(str(error)) or f"reading it failed: {' '.join(str(error).split())}"
        raise StorageError(f"{path} should be a table: {told}") from error
    twice = tuple(name for name, count in Counter(headings).items() if count > 1 and name)
    if twice and form == "parquet":
        raise DataError(f"{path} has several columns called {twice[0]!r}; rename all but one")
    # pandas calls a second "a" of a text "a.1"
    table.columns = [str(column) for column in table.columns]
    return table.reset_index(drop=True), {**facts, "twice": twice}


def _ragged(error: str) -> str:
    """What pandas says of a line with too many cells, with the remedy."""
    line = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", error)
    if line is None:
        return ""
    remedy = "put a cell that holds the separator in quotes, or correct the line"
    return f"line {line[2]} of its rows has {line[3]} cells where the header has {line[1]}; {remedy}"


def decoded(content: bytes) -> tuple[str, str]:
    """Text, and how it was encoded: by its mark, else UTF-8, else as Windows in the west writes it."""
    for mark, name in ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16")):
        if content.startswith(mark):
            return content.decode(name), "UTF-16" if name == "utf-16" else "UTF-8"
    sample = content[:4096]
    if b"\0" in sample:  # letters of UTF-16 have a zero on one side
        evens, odds = sample[::2].count(0), sample[1::2].count(0)
        if max(evens, odds) < 0.3 * len(sample) / 2 or min(evens, odds) > 0:
            raise ValueError("it holds bytes that are no text")
        return content.decode("utf-16-be" if evens else "utf-16-le"), "UTF-16"
    try:
        return content.decode("utf-8"), "UTF-8"
    except UnicodeDecodeError:
        pass
    try:
        return content.decode("cp1252"), "Windows-1252"
    except UnicodeDecodeError:
        return content.decode("latin-1"), "Latin-1"


def _records(lines: list[str], separator: str) -> list[list[str]]:
    """The first lines as cells, lines of nothing left out; one that quotes leave open is not yet known."""
    records = [record for record in csv.reader(lines, delimiter=separator) if any(record)]
    return records[:-1] if len(lines) >= LOOKED_AT and len(records) > 2 else records


def separator_of(lines: list[str]) -> str:
    """What stands between cells: what gives most lines as many cells as the first, then what gives most cells."""
    scores = {}
    for separator in SEPARATORS:
        records = _records(lines, separator)
        width = len(records[0]) if records else 0
        if width > 1:  # rows may have one cell more than the header: names of rows, or a separator at their ends
            alike = [len(record) - width in (0, 1) for record in records]
            scores[separator] = (round(sum(alike) / len(alike), 1), width)
    if scores:
        return max(scores, key=lambda separator: scores[separator])
    widths = {len(line.split()) for line in lines if line.strip()}
    return r"\s+" if len(widths) == 1 and max(widths) > 1 else ","


def _text(path: Path, forms: Mapping[str, str], written: bool) -> tuple[Any, list[str], dict[str, Any]]:
    """A text as a frame, the headings as they stand there, where two may be the same, and how it was read."""
    import pandas

    content = path.read_bytes()
    text, encoding = decoded(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    stream = io.StringIO(text, newline="")
    start, given = 0, ""
    for line in stream:
        excel = re.fullmatch(r'"?sep=(.)"?\s*', line)  # Excel's own first line
        given = excel[1] if excel else given
        if line.strip() and not excel and not (line.startswith("#") and not set(line) & set(SEPARATORS)):
            break
        start += len(line)
    stream.seek(start)
    lines = [line for _, line in zip(range(LOOKED_AT), stream, strict=False)]
    separator = given or separator_of(lines)
    spaces = separator == r"\s+"
    records = [line.split() for line in lines if line.strip()] if spaces else _records(lines, separator)
    headings = [heading.strip() for heading in records[0]] if records else []
    options: dict[str, Any] = {"sep": separator, "low_memory": False, "skipinitialspace": True}
    if int(pandas.__version__.split(".")[0]) < 3:  # the default since; before, the last digit may be wrong
        options["float_precision"] = "round_trip"
    rows, notes = records[1:], []
    longer = bool(rows) and all(len(row) == len(headings) + 1 for row in rows)
    if longer and not any(row[-1] for row in rows):  # a separator at the end of each row
        options |= {"index_col": False, "usecols": range(len(headings))}
    if written:
        options |= {"dtype": str, "keep_default_na": False, "na_values": [""]}

    def read(**more: Any) -> Any:
        return pandas.read_csv(io.StringIO(text[start:], newline=""), **options, **more)

    table = read() if written else read(dtype={name: str for name, form in forms.items() if form == ","})
    decimal = decimal_of(table, separator == ";")
    if decimal == "," and (fractions := {name: str for name in table if table[name].dtype.kind == "f"}):
        table = read(dtype=fractions)  # 1.234 may be a thousand there
    table = table.rename(columns=str.strip)
    if longer and "usecols" not in options:
        table.insert(0, "row name", table.index)
        headings = ["row name", *headings]
    if len(table) and not spaces and table.iloc[:, -1].isna().any():
        notes += _short(text[start:], separator, len(headings))
    name = "spaces" if spaces else SEPARATORS.get(separator, repr(separator))
    read_as = [encoding] * (encoding != "UTF-8") + [f"separated by {name}"] * (name != "commas")
    read_as += ["decimal commas"] * (decimal == ",")
    return (
        table,
        headings,
        {
            "read": read_as,
            "notes": notes,
            "writing": {"decimal": decimal, "european": decimal == "," or separator == ";"},
        },
    )


def _short(text: str, separator: str, width: int) -> list[str]:
    """Rows that end before the last column, in words."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    lines = [reader.line_num for record in reader if record and len(record) < width]
    told = f"{len(lines)} rows have fewer cells than the header, the first in line"
    return [f"{told} {lines[0]} from it on; what lacks counts as missing"] if lines else []


def _sheet(path: Path) -> tuple[Any, list[str], dict[str, Any]]:
    """The first sheet of a workbook, from its first row that is not empty."""
    import pandas

    with pandas.ExcelFile(path, engine="openpyxl") as book:
        names, cells = book.sheet_names, pandas.read_excel(book, header=None)
    cells = cells.dropna(how="all").dropna(how="all", axis=1)
    if not len(cells):
        raise ValueError("its first sheet is empty")
    headings = ["" if pandas.isna(heading) else str(heading).strip() for heading in cells.iloc[0]]
    seen: Counter[str] = Counter()
    columns = []
    for place, heading in enumerate(headings):
        heading = heading or f"Unnamed: {place}"
        columns.append(f"{heading}.{seen[heading]}" if seen[heading] else heading)
        seen[heading] += 1
    table = cells.iloc[1:]
    table.columns = columns
    several = [f"the first of {len(names)} sheets, {names[0]!r}"] if len(names) > 1 else []
    return table, headings, {"read": several}
