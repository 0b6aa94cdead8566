"""Numbers and dates as people write them: decimal commas, thousands apart, dates in many orders."""

import re
from collections.abc import Collection, Mapping
from datetime import datetime
from itertools import product
from typing import Any

from dubito.errors import DataError

#: A number with this decimal sign, and thousands apart by the other one, a space or an apostrophe.
_NUMBER = {
    sign: re.compile(
        rf"[-+]?(?:[1-9]\d{{0,2}}(?:[{other}\s'’]\d{{3}})+|\d+(?={sign})|\d+|(?={sign}\d))(?:{sign}\d*)?(?:[eE][-+]?\d+)?"
    )
    for sign, other in ((",", "."), (r"\.", ","))
}
NUMBERS = {",": _NUMBER[","], ".": _NUMBER[r"\."]}
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+")

_DAYS = (
    "%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%Y-%m", "%d.%m.%Y", "%d.%m.%y", "%m/%d/%Y", "%d/%m/%Y", "%m/%d/%y", "%d/%m/%y",
    "%m-%d-%Y", "%d-%m-%Y", "%d %b %Y", "%d %B %Y", "%d-%b-%Y", "%d-%b-%y", "%b %d, %Y", "%B %d, %Y", "%b %Y", "%B %Y",
)  # fmt: skip
_TIMES = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p")
_ISO = re.compile(r"\d{4}-\d\d(-\d\d([T ]\d\d:?\d\d.*)?)?")
#: Distinct words that are tried first, and the years that dates lie in.
TRIED, YEARS = 20, (1800, 2200)


def words_of(values: Any) -> Any:
    """What stands in a column, as words without spaces around them."""
    return values.dropna().astype(str).str.strip()


def _is_words(values: Any) -> bool:
    return values.dtype.kind not in "fiubcmM"


def decimal_of(table: Any, european: bool) -> str:
    """The decimal sign of a table's numbers: a comma where one can be nothing else, or where nothing says otherwise.

    Args:
        table: as read with points.
        european: whether the separator is what tables with decimal commas have.
    """
    unclear = False
    for name in table.columns:
        if not _is_words(table[name]):
            continue
        words = words_of(table[name]).unique()
        there = [word for word in words if "," in word and NUMBERS[","].fullmatch(word)]
        if 2 * len(there) < len([word for word in words if not word.isdecimal()]) or not there:
            continue
        if any(not _THOUSANDS.fullmatch(word) for word in there):
            return ","
        unclear = unclear or all("." not in word for word in words)
    return "," if unclear and european else "."


def typed(
    table: Any,
    where: str,
    forms: Mapping[str, str],
    decimal: str = ".",
    european: bool = False,
    used: Collection[str] | None = None,
) -> tuple[Any, list[str]]:
    """A frame whose words that are numbers or dates have become such; `attrs["forms"]` says how they were written.

    Args:
        table: a frame of words, numbers and dates.
        where: its name, for messages.
        forms: how columns were written in a table like it, for what can be read in two ways.
        decimal: the table's decimal sign.
        european: whether days come before months where nothing else tells.
        used: columns that matter, of which the others stay words; None for all.
    """
    names = [name for name in table.columns if _is_words(table[name]) and (used is None or name in used)]
    words = {name: words_of(table[name]) for name in names}
    decided: dict[str, str] = {}
    dates: dict[str, list[str]] = {}
    for name, column in words.items():
        distinct = column.unique()
        if form := number_form(distinct, forms.get(name, decimal)):
            decided[name] = form
            table[name] = _numbers(column, form).reindex(table.index)
        elif choices := date_forms(distinct):
            dates[name] = choices
    sure = {choices[0][:3] for choices in dates.values() if len(choices) == 1}
    told = []
    for name, choices in dates.items():
        alike = sure & {f"%d{choices[0][2]}", f"%m{choices[0][2]}"}  # other columns with the same sign between
        days_first = alike.pop().startswith("%d") if len(alike) == 1 else european
        usual = next((form for form in choices if form.startswith("%d") == days_first), choices[0])
        decided[name] = forms[name] if forms.get(name) in choices else usual
        if len(choices) > 1 and name not in forms:
            order = "day, month, year" if decided[name].startswith("%d") else "month, day, year"
            example = f"{name}: {words[name].iloc[0]} could be two dates and is read as {order}"
            told.append(f"{example}; 2020-12-31 is never unclear")
        table[name] = _dates(words[name], decided[name], where).reindex(table.index)
    table.attrs["forms"] = decided
    return table, told


def number_form(words: Any, decimal: str) -> str:
    """How most words are written as numbers: "," or "." with thousands apart; "" where plainly, or not at all."""
    import pandas

    plain: Any = pandas.to_numeric(pandas.Series(words), errors="coerce")
    counts = {sign: sum(pattern.fullmatch(word) is not None for word in words) for sign, pattern in NUMBERS.items()}
    counts[""] = int(plain.notna().sum())
    order = (",", "", ".") if decimal == "," else ("", ".", ",")
    best = max(order, key=lambda form: counts[form])
    return best if len(words) and 2 * counts[best] >= len(words) else ""


def _numbers(words: Any, form: str) -> Any:
    """Numbers behind words of a form; what is none stays a word, to be named later."""
    import pandas

    def spelled(word: str) -> str:
        if not NUMBERS[form].fullmatch(word):
            return word
        return re.sub(rf"[\s'’{'.' if form == ',' else ','}]", "", word).replace(",", ".")

    plain = words.map(spelled)
    try:
        return pandas.to_numeric(plain)
    except ValueError:
        return plain


def date_forms(words: Any) -> list[str]:
    """The forms in which at least half of the words are dates, and as many as in any; two where days may be months."""
    sample = [word for word in words[:TRIED] if 6 <= len(word) <= 35 and sum(map(str.isdigit, word)) >= 3]
    if 2 * len(sample) < len(words[:TRIED]) or not sample:
        return []
    forms = ["iso"] if any(_ISO.fullmatch(word) for word in sample) else []
    forms += [form for form in map("".join, product(_DAYS, _TIMES)) if any(_one_date(word, form) for word in sample)]
    counts = {form: int(parsed_dates(words, form).notna().sum()) for form in forms}
    most = max(counts.values(), default=0)
    best = [form for form in forms if counts[form] == most]
    if 2 * most < len(words) or not best:
        return []
    return best[:1] if best[0] == "iso" else best


def _one_date(word: str, form: str) -> bool:
    if form.startswith("%d.%m.%y") and re.match(r"\d\d\.\d\d\.\d\d\b", word) is None:
        return False  # versions such as 1.2.13
    try:
        return YEARS[0] <= datetime.strptime(word, form).year <= YEARS[1]
    except ValueError:
        return False


def parsed_dates(words: Any, form: str) -> Any:
    """Words as dates, without a zone; NaT where one is none."""
    import pandas

    series = pandas.Series(words)
    if form == "iso":
        series = series.where(series.map(lambda word: _ISO.fullmatch(word) is not None))
    parsed: Any = pandas.to_datetime(series, format="ISO8601" if form == "iso" else form, errors="coerce", utc=True)
    parsed = parsed.dt.tz_localize(None)
    return parsed.where(parsed.dt.year.between(*YEARS))


def _dates(words: Any, form: str, where: str) -> Any:
    """Dates of a form, or of ISO; a word that is none is named and refused."""
    dates = parsed_dates(words, form)
    if form != "iso" and dates.isna().any():
        dates = dates.fillna(parsed_dates(words, "iso"))
    wrong = dates[dates.isna()]
    if len(wrong):
        example = words[dates.notna()].iloc[0] if dates.notna().any() else "2020-12-31"
        raise DataError(
            f"column {words.name!r} of {where} must hold dates such as {example}, got {words[wrong.index[0]]!r} in row "
            f"{wrong.index[0] + 1} (the header not counted); correct it, or leave it empty where the date is missing"
        )
    return dates
