"""The summary: data, and a table that shows names as they are."""

import dataclasses

import pytest

from dubito.summary import Summary, SummaryRow

ROWS = (
    SummaryRow("body.0.weight", (1024, 784), "Normal, own std", 2 * 1024 * 784),
    SummaryRow("scale", (), "point", 1),
    SummaryRow("odd[bold]name:smile:", (3,), "dropout 0.1 on 3 inputs", 3),
)
SUMMARY = Summary("MeanField", ROWS, 1_605_636, 6_422_544)


def test_the_table_shows_every_parameter_as_the_user_named_it(capsys):
    text = str(SUMMARY)
    assert capsys.readouterr().out == ""  # making the text prints nothing
    assert "MeanField: 1,605,636 parameters, 6,422,544 bytes" in text
    lines = [line for line in text.splitlines() if any(row.name in line for row in ROWS)]
    assert len(lines) == 3
    assert "1024×784" in lines[0] and "Normal, own std" in lines[0] and "1,605,632" in lines[0]
    assert "scalar" in lines[1]
    assert "\x1b" not in text  # no colours in plain text


def test_a_long_name_is_folded_and_not_cut():
    name = "block." * 30 + "weight"
    text = str(Summary("MAP", (SummaryRow(name, (2, 2), "point", 4),), 4, 16))
    cells = [line.strip("│ ").split("│")[0].strip() for line in text.splitlines() if line.startswith("│")]
    assert "".join(cells) == name


def test_it_is_data():
    assert [row.num_parameters for row in SUMMARY.rows] == [1_605_632, 1, 3]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SUMMARY.method = "MAP"  # pyright: ignore
