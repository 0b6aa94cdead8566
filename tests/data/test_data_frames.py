"""Tables as people save them: separators, decimals, encodings, line ends, quotes, headers; all read to equal frames."""

import csv
import gzip
import io
import itertools
import json

import numpy as np
import openpyxl
import pandas
import pytest
import torch

from dubito.compare.new_rows import RowReader
from dubito.data import load
from dubito.data.columns import date_of, described
from dubito.data.frames import decoded, frame, separator_of
from dubito.data.spelling import date_forms, number_form, typed
from dubito.errors import ConfigError, DataError, StorageError

ROWS = 40
STREAM = np.random.default_rng(3)
#: What every file below holds: numbers, thousands, words with signs in them, gaps, dates.
WHOLE = pandas.DataFrame(
    {
        "größe": np.round(STREAM.normal(170, 10, ROWS), 2),
        "umsatz": np.round(STREAM.uniform(1, 9e6, ROWS), 2),
        "ort": STREAM.choice(["Köln", "Łódź; alt", "São Paulo, SP", 'der "Ring"', "a|b\tc"], ROWS),
        "seit": pandas.to_datetime("2019-01-28") + pandas.to_timedelta(STREAM.integers(0, 900, ROWS), "D"),
        "zahl": STREAM.integers(0, 5, ROWS),
        "y": np.round(STREAM.normal(0, 1, ROWS), 3),
    }
)
WHOLE.loc[[3, 8], "größe"] = np.nan
WHOLE.loc[5, "ort"] = None
DATES = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d %b %Y", "%Y-%m-%dT%H:%M:%S")


def spelled(value, decimal, thousands, dates):
    """One cell as a country writes it."""
    if value is None or value is pandas.NaT or (isinstance(value, float) and np.isnan(value)):
        return ""
    if isinstance(value, float):
        signs = {",": thousands, ".": decimal}
        text = f"{value:,.3f}" if thousands else f"{value:.3f}"
        return "".join(signs.get(letter, letter) for letter in text)
    return value.strftime(dates) if hasattr(value, "strftime") else str(value)


def text_of(table, separator, decimal=".", end="\n", quoting=csv.QUOTE_MINIMAL, thousands="", dates="%Y-%m-%d"):
    """A table as text."""
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=separator, lineterminator=end, quoting=quoting)
    writer.writerow(table.columns)
    for row in table.itertuples(index=False):
        writer.writerow([spelled(value, decimal, thousands, dates) for value in row])
    return file.getvalue()


def same(found, expected):
    """Whether two frames hold the same columns, numbers, words and dates."""
    assert list(found.columns) == list(expected.columns)
    for name in expected.columns:
        if expected[name].dtype.kind in "fi":
            values = pandas.to_numeric(found[name]).to_numpy(float)
            np.testing.assert_allclose(values, expected[name].to_numpy(float), rtol=1e-12)
        elif expected[name].dtype.kind == "M":
            assert found[name].dtype.kind == "M", found[name]
            assert (found[name] == expected[name]).all()
        else:
            assert found[name].fillna("").tolist() == expected[name].fillna("").tolist()


CASES = list(
    itertools.product(
        (",", ";", "\t", "|"),
        (".", ","),
        ("utf-8", "utf-8-sig", "utf-16", "utf-16-be", "cp1252"),
        ("\n", "\r\n"),
        (csv.QUOTE_MINIMAL, csv.QUOTE_ALL),
    )
)


@pytest.mark.parametrize(("separator", "decimal", "encoding", "end", "quoting"), CASES)
def test_every_way_to_save_a_table_reads_the_same(tmp_path, separator, decimal, encoding, end, quoting):
    number = CASES.index((separator, decimal, encoding, end, quoting))
    table = WHOLE.replace({"Łódź; alt": "Lodz; alt"}) if encoding == "cp1252" else WHOLE
    thousands = ("", " ", {",": ".", ".": ","}[decimal])[number % 3]
    dates = DATES[number % len(DATES)]
    path = tmp_path / ("own.csv", "own.txt", "own", "own.tsv")[number % 4]
    path.write_bytes(text_of(table, separator, decimal, end, quoting, thousands, dates).encode(encoding))
    found = frame(path)
    same(found, table)
    told = " ".join(found.attrs["notes"])
    assert ("decimal commas" in told) == (decimal == ",")
    assert ("separated by" in told) == (separator != ",")
    assert ("UTF-16" in told, "Windows-1252" in told) == (encoding.startswith("utf-16"), encoding == "cp1252")


def test_more_than_a_hundred_files_are_read():
    assert len(CASES) >= 100


PLAIN = text_of(WHOLE, ";")


@pytest.mark.parametrize(
    "text",
    [
        "sep=;\r\n" + PLAIN,
        "\n\n" + PLAIN,
        "# exported today\n" + PLAIN,
        PLAIN.replace("größe;umsatz", " größe ; umsatz"),
        PLAIN + "\n\n",
        PLAIN.rstrip("\n"),
        PLAIN.replace("\n", ";\n").replace(";\n", "\n", 1),  # a separator at the end of each row
        PLAIN.replace("\n", "\r"),
    ],
)
def test_oddities_around_the_header_are_overlooked(tmp_path, text):
    path = tmp_path / "own.csv"
    path.write_text(text, newline="")
    same(frame(path), WHOLE)


def test_a_packed_text_and_a_workbook_read_the_same(tmp_path):
    path = tmp_path / "own.csv.gz"
    path.write_bytes(gzip.compress(PLAIN.encode()))
    same(frame(path), WHOLE)
    with pandas.ExcelWriter(tmp_path / "own.xlsx") as book:
        WHOLE.to_excel(book, sheet_name="Daten", index=False, startrow=2)
        WHOLE.to_excel(book, sheet_name="more", index=False)
    found = frame(tmp_path / "own.xlsx")
    same(found, WHOLE)
    assert found.attrs["notes"] == ("read as the first of 2 sheets, 'Daten'",)
    (tmp_path / "own.xlsx").rename(tmp_path / "own.csv")  # by its content
    same(frame(tmp_path / "own.csv"), WHOLE)


def test_workbooks_with_several_headings_of_one_name(tmp_path):
    book = openpyxl.Workbook()
    for row in (("a", "a", None), (1, 2, 3), (4, 5, 6)):
        book.active.append(row)
    book.save(tmp_path / "own.xlsx")
    found = frame(tmp_path / "own.xlsx")
    assert list(found.columns) == ["a", "a.1", "Unnamed: 2"] and found.attrs["twice"] == ("a",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,y\n1,2,3\n1,2,3,4\n", "line 3 of its rows has 4 cells where the header has 3; put a cell"),
        ("", "should be a table"),
        ("when,y\n2020-01-01,1\n2020-01-02,2\nsoon,3\n", "'when' .* dates such as 2020-01-01, got 'soon' in row 3"),
        ("a,y\n1e300,1\n2,2\n3,3\n4,4\n", r"'a' .* from -1e\+30 to 1e\+30, got 1e\+300 in row 1"),
        ("a,y\n1,1e29\n2,2.5e29\n3,3e29\n", r"'y' of .* within ±1e\+18 .* up to 3e\+29 .* choose other units"),
        ("a,y\n1,1e-30\n2,2.5e-30\n3,3e-30\n", r"spread by at least 1e-18, got .* 8.5e-31"),
        ("a,y\n1,\n2,\n3,\n", "target 'y' is missing in 3 of the 3 rows .* fill it, or choose another"),
        ("a,y\n1,2020-01-01\n2,2020-01-02\n3,2020-01-05\n", "'y' of .* holds dates; predict a number"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(tmp_path, text, message):
    path = tmp_path / "own.csv"
    path.write_text(text)
    with pytest.raises((DataError, StorageError), match=message) as caught:
        load(path, target="y")
    assert "\n" not in str(caught.value)


def test_rows_are_counted_as_in_the_file_where_targets_are_missing(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("a,y\n1,\n2,1\n3,2\nx,3\n5,4\n")
    with pytest.raises(DataError, match="got 'x' in row 4"):
        load(path, target="y")


def test_rows_that_end_early_and_names_of_rows_are_told(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("a,b,y\n1,2,3\n4,5\n6\n7,8,9\n")
    found = frame(path)
    assert found["y"].isna().tolist() == [False, True, True, False]
    assert found.attrs["notes"] == (
        "2 rows have fewer cells than the header, the first in line 3 from it on; what lacks counts as missing",
    )
    path.write_text("a b y\nr1 1 2 3\nr2 4 5 6\n".replace(" ", "\t"))  # as R writes
    found = frame(path)
    assert list(found.columns) == ["row name", "a", "b", "y"] and found["row name"].tolist() == ["r1", "r2"]


def test_spaces_separate_where_nothing_else_does(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("a  b  y\n1.5   2 3\n 4 5   6\n")
    assert frame(path).to_numpy().tolist() == [[1.5, 2, 3], [4, 5, 6]]


def test_old_workbooks_and_bytes_are_refused_with_the_remedy(tmp_path):
    (tmp_path / "own.xls").write_bytes(b"\xd0\xcf\x11\xe0 and more")
    with pytest.raises(StorageError, match=r"save it as .xlsx or .csv"):
        frame(tmp_path / "own.xls")
    (tmp_path / "own").write_bytes(b"PK\3\4 and no archive")
    with pytest.raises(StorageError, match="should be a table"):
        frame(tmp_path / "own")
    (tmp_path / "own").write_bytes(bytes(range(256)) * 8)
    with pytest.raises(StorageError, match="bytes that are no text"):
        frame(tmp_path / "own")


def test_columns_that_count_rows_are_left_out(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("ID,a,y\n" + "".join(f"{row + 7},{row % 3},{row / 7}\n" for row in range(9)))
    data = load(path, target="y")
    assert data.feature_names == ("a",) and "ID: counts the rows, left out" in data.notes[0]
    path.write_text("time,a,y\n" + "".join(f"{row + 7},{row % 3},{row / 7}\n" for row in range(9)))
    assert load(path, target="y").feature_names == ("time", "a")


@pytest.mark.parametrize(
    ("words", "decimal", "form"),
    [
        (["1,5", "2"], ".", ","),
        (["1.234,5", "7"], ".", ","),
        (["1,234", "5,678"], ".", "."),
        (["1,234", "5,678"], ",", ","),
        (["1.234", "5.678"], ",", ","),
        (["1.234", "5.67"], ",", ""),
        (["1,234.5", "7"], ".", "."),
        (["1 234", "5 678 901"], ".", "."),
        (["1'234.5"], ".", "."),
        (["a", "b"], ",", ""),
        (["01.02.2020"], ",", ""),
        (["-3,5e-7", "+,5"], ".", ","),
    ],
)
def test_how_numbers_are_written(words, decimal, form):
    assert number_form(words, decimal) == form


@pytest.mark.parametrize(
    ("words", "forms"),
    [
        (["2020-01-31", "2020-02-01 10:00", "2020-02-01T10:00:00Z"], ["iso"]),
        (["31.12.2020", "01.02.2020"], ["%d.%m.%Y"]),
        (["01/02/2020", "03/04/2020"], ["%m/%d/%Y", "%d/%m/%Y"]),
        (["01/02/2020", "13/04/2020"], ["%d/%m/%Y"]),
        (["1/2/20 5:06 PM", "1/13/20 5:07 PM"], ["%m/%d/%y %I:%M %p"]),
        (["12 Jan 2020", "3 May 2021"], ["%d %b %Y"]),
        (["January 5, 2020"], ["%B %d, %Y"]),
        (["1.2.13", "1.10.2"], []),
        (["10.0.0.1", "10.0.0.2"], []),
        (["0123-45", "9999-12"], []),
        (["soon", "2020-01-31", "later"], []),
        (["A-2020-01-31"], []),
        (["12:30", "13:45"], []),
    ],
)
def test_how_dates_are_written(words, forms):
    found = date_forms(np.array(words, dtype=object))
    assert found[: len(forms)] == forms and (len(found) == len(forms) or "%b" in forms[0])


def test_dates_that_could_be_two_follow_the_table_and_are_told(tmp_path):
    unclear, clear = ["01/02/2020", "03/04/2020"], ["13/02/2020", "03/04/2020"]
    table, told = typed(pandas.DataFrame({"a": unclear}), "t", {})
    assert table["a"].dt.month.tolist() == [1, 3]
    assert told == ["a: 01/02/2020 could be two dates and is read as month, day, year; 2020-12-31 is never unclear"]
    assert typed(pandas.DataFrame({"a": unclear}), "t", {}, european=True)[0]["a"].dt.month.tolist() == [2, 4]
    assert typed(pandas.DataFrame({"a": unclear, "b": clear}), "t", {})[0]["a"].dt.month.tolist() == [2, 4]
    found, told = typed(pandas.DataFrame({"a": unclear}), "t", {"a": "%d/%m/%Y"})
    assert found["a"].dt.month.tolist() == [2, 4] and told == []


def test_dates_become_what_varies_of_them(tmp_path):
    table = pandas.DataFrame(
        {"when": pandas.to_datetime(["2020-01-01 06:00", "2020-07-02 12:00", "2021-12-31 00:00"] * 4), "y": range(12)}
    )
    path = tmp_path / "own.csv"
    table.assign(when=table["when"].dt.strftime("%d.%m.%Y %H:%M"), y=table["y"] + 0.5).to_csv(path, index=False)
    data = load(path, target="y", standardise=False)
    names = list(data.feature_names)
    assert names[:3] == ["when: year", "when: season, sine", "when: season, cosine"]
    assert names[3:10] == [f"when: {day}" for day in ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")]
    rows = np.random.RandomState(1).permutation(12)[: len(data.train.inputs)]
    whole = data.train.inputs.numpy()
    # 2 July 2020 at noon is day 183.5 of 366, a Thursday
    for row, inputs in zip(rows % 3, whole, strict=True):
        year = (2020 + 0.25 / 366, 2020 + 183.5 / 366, 2021 + 364 / 365)[row]
        assert inputs[0] == pytest.approx(year, abs=1e-3)
        turn = 2 * np.pi * (year % 1)
        np.testing.assert_allclose(inputs[1:3], [np.sin(turn), np.cos(turn)], atol=1e-5)
        assert inputs[3:10].tolist() == [float(day == (2, 3, 4)[row]) for day in range(7)]
        turn = 2 * np.pi * (0.25, 0.5, 0.0)[row]
        np.testing.assert_allclose(inputs[10:], [np.sin(turn), np.cos(turn)], atol=1e-5)
    assert [date_of(year) for year in (2020.0, 2020.5, 2021 + 364.5 / 365)] == [
        "2020-01-01",
        "2020-07-02",
        "2021-12-31",
    ]
    assert data.columns[0].form == "%d.%m.%Y %H:%M"


def test_a_table_in_order_of_time_is_told(tmp_path):
    path = tmp_path / "own.csv"
    months = pandas.date_range("2001-01-01", periods=60, freq="MS")
    pandas.DataFrame({"month": months, "y": STREAM.normal(size=60)}).to_csv(path, index=False)
    data = load(path, target="y")
    assert data.notes[0] == "month: dates, which become year, season"  # always the first of a month: no weekday
    assert "in order of time, but are split at random" in data.notes[1]


def test_new_rows_are_read_as_training_was_where_they_could_be_read_in_two_ways(tmp_path):
    path, new = tmp_path / "own.csv", tmp_path / "new.csv"
    days = [f"{day:02d}/{month:02d}/2020" for day, month in itertools.product((5, 13, 27), (1, 6, 11))]
    lines = [f"{day};1.{100 + 7 * place};{place},25;{place % 4},5" for place, day in enumerate(days)]
    path.write_text("when;big;small;y\n" + "\n".join(lines) + "\n")
    reader = RowReader.of(load(path, target="y"))
    reader = RowReader.from_json(reader.to_json())
    new.write_text("when,big,small\n05/01/2020,1.100,0\n")  # nothing here tells of decimal commas, or of days first
    first = RowReader.of(load(path, target="y")).read(path)[0][0]
    np.testing.assert_allclose(reader.read(new)[0][0][:-1], first[:-1], atol=1e-6)
    new.write_text("when,big,small\n2020-01-05,1100.0,0.25\n")
    np.testing.assert_allclose(reader.read(new)[0][0], first, atol=1e-6)
    new.write_text("when,big,small\nnever,1100.0,0.25\n")
    with pytest.raises(DataError, match=r"'when' of .* must hold dates as in training, got 'never'"):
        reader.read(new)


def test_texts_and_separators():
    assert decoded("ä".encode("latin-1") + b"\x81")[1] == "Latin-1"
    assert separator_of(["date;price, EUR\n", "1.1.2020;3,5\n"]) == ";"
    assert separator_of(["tags,y\n", "a;b,1\n", "c;d,2\n"]) == ","
    assert separator_of(['name,"a;b;c"\n', "x,1\n"]) == ","


def test_a_missing_reader_is_named(tmp_path, monkeypatch):
    (tmp_path / "own.xlsx").write_bytes(b"PK\3\4")

    def missing(*_, **__):
        raise ImportError("no openpyxl")

    monkeypatch.setattr(pandas, "ExcelFile", missing)
    with pytest.raises(ConfigError, match="needs openpyxl"):
        frame(tmp_path / "own.xlsx")


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
def test_dates_with_a_zone_are_read_as_their_text_is(tmp_path, zone):
    pytest.importorskip("pyarrow")
    when = pandas.date_range("2020-01-01 23:00", periods=40, freq="7h", tz=zone).to_series(index=range(40))
    when[3] = pandas.NaT
    table = pandas.DataFrame({"when": when, "y": np.arange(40) / 3})
    table.to_csv(tmp_path / "own.csv", index=False)
    table.to_parquet(tmp_path / "own.parquet")
    one, other = (load(tmp_path / f"own.{suffix}", target="y") for suffix in ("parquet", "csv"))
    assert one.feature_names == other.feature_names and one.train.inputs.equal(other.train.inputs)
    for suffix in ("csv", "parquet"):
        assert (
            RowReader.of(one)
            .read(tmp_path / f"own.{suffix}")[0]
            .equal(RowReader.of(other).read(tmp_path / "own.csv")[0])
        )


@pytest.mark.parametrize(
    ("form", "told"), [("{}%", "'0%'"), ("${},000", "'$0,000'"), ("{} kg", "'0 kg'"), ("n{}", ""), ("1.2.{}", "")]
)
def test_amounts_with_signs_or_units_are_left_out_with_the_remedy(form, told):
    frame = pandas.DataFrame({"a": [form.format(row) for row in range(60)], "b": np.arange(60) ** 2})
    note = described(frame, "own")[1][0]
    assert "60 different words in 60 rows, left out as a name or text" in note
    assert ("as plain numbers, without signs or units" in note) == bool(told) and told in note


def test_columns_that_are_the_same_in_all_rows_are_left_out(tmp_path):
    path = tmp_path / "own.csv"
    rows = "".join(f"{row % 3},7,red,2020-01-01,True,{'7' if row else ''},{row / 7}\n" for row in range(9))
    path.write_text(f"a,seven,colour,when,flag,gap,y\n{rows}")
    data = load(path, target="y")
    assert data.feature_names == ("a", "gap", "gap is missing")  # a gap says something
    assert data.notes[:4] == tuple(
        f"{name}: the same in all 9 rows, left out" for name in ("seven", "colour", "when", "flag")
    )
    reader = RowReader.of(data)
    path.write_text("a,seven,gap\n1,7,7\n1,9,7\n")
    inputs, told = reader.read(path)
    assert inputs[0].equal(inputs[1]) and told == []


def test_statistics_keep_small_differences_of_large_numbers(tmp_path):
    """New rows are scaled as training rows were, and targets come back as they are in the file."""
    path, x = tmp_path / "own.csv", 1e9 + STREAM.normal(size=60)
    pandas.DataFrame({"x": x, "y": 3 * x}).to_csv(path, index=False, float_format="%.17g")
    data = load(path, target="y")
    order = np.random.RandomState(1).permutation(60)[:48]
    inputs = RowReader.from_json(json.loads(json.dumps(RowReader.of(data).to_json()))).read(path)[0]
    torch.testing.assert_close(inputs[order], data.train.inputs, rtol=0, atol=1e-6)
    targets = data.target_scaling.undo(data.train.targets.double())[:, 0]
    np.testing.assert_allclose(targets, 3 * x[order], rtol=0, atol=1e-5)
    assert data.train.inputs.dtype == data.input_scaling.undo(data.train.inputs).dtype == torch.float32
