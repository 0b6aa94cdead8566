"""What notebooks and prompts show: tables, escaped, and no longer than a screen."""

from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from dubito import MAP, Categorical, Gaussian, Training
from dubito.notebook import MOST_ROWS
from dubito.prediction import CategoricalPrediction
from dubito.summary import Summary, SummaryRow


class Cells(HTMLParser):
    """The words of a page, by the tag they stand in; tags must match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.cells = [], {"th": [], "td": [], "b": [], "small": []}
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag in {"div", "table", "thead", "tbody", "tr", "th", "td", "b", "small"}
        self.open.append(tag)
        if tag in self.cells:
            self.cells[tag].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in set(self.open) & set(self.cells):
            self.cells[tag][-1] += data


def rows():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


@pytest.fixture(scope="module")
def posterior():
    return MAP().fit(nn.Linear(3, 2), rows(), Categorical(), training=Training(epochs=1))


def test_a_summary_is_its_table_everywhere(posterior):
    summary = posterior.summary()
    assert repr(summary) == str(summary) and "MAP: 8 parameters, 32 bytes" in repr(summary)
    for page in (summary._repr_html_(), posterior._repr_html_()):
        cells = Cells(page).cells
        assert cells["th"] == ["parameter", "shape", "holds", "numbers"]
        assert cells["td"] == ["weight", "2×3", "point", "6", "bias", "2", "point", "2"]
        assert cells["b"] == ["MAP: 8 parameters, 32 bytes"]


def test_names_are_escaped_and_never_markup():
    evil = "<script>alert(1)</script>[bold]x[/bold]&amp;"
    summary = Summary(evil, (SummaryRow(evil, (), evil, 1),), 1, 4, notes=(evil,))
    page = summary._repr_html_()
    cells = Cells(page).cells
    assert cells["td"][0] == cells["td"][2] == cells["small"][0] == evil and "<script" not in page


def test_a_long_summary_is_cut_and_says_so():
    rows = tuple(SummaryRow(f"layer{i}", (2,), "point", 2) for i in range(MOST_ROWS + 1200))
    cells = Cells(Summary("MAP", rows, 1, 1)._repr_html_()).cells
    assert len(cells["td"]) == 4 * MOST_ROWS and cells["small"] == ["… and 1,200 rows more"]


def test_predictions_of_classes_show_their_first_rows(posterior):
    prediction = posterior.predict(rows()[0])
    cells = Cells(prediction._repr_html_()).cells
    assert cells["th"][:4] == ["row", "labels", "confidence", "total"] and cells["th"][-1] == "probs_1"
    assert cells["b"] == ["CategoricalPrediction of 40 rows"] and cells["small"] == ["… and 32 rows more"]
    width = len(cells["th"])
    third = dict(zip(cells["th"], cells["td"][2 * width : 3 * width], strict=True))
    assert third["row"] == "2" and third["labels"] == str(int(prediction.labels[2]))
    assert float(third["confidence"]) == pytest.approx(float(prediction.confidence[2]), rel=1e-3)


def test_printed_predictions_show_their_first_rows(posterior):
    x = rows()[0]
    title, heads, *lines = str(posterior.predict(x)).splitlines()
    assert title == "CategoricalPrediction of 40 rows" and heads.split()[:3] == ["row", "labels", "confidence"]
    assert (
        len(lines) == 9 and lines[-1] == "… and 32 rows more" and len({len(line) for line in [heads, *lines[:-1]]}) == 1
    )
    confidence = posterior.predict(x).confidence[2]
    assert float(lines[2].split()[2]) == pytest.approx(float(confidence), rel=1e-3)
    one = MAP().fit(nn.Linear(3, 1), (x, x[:, :1]), Gaussian(), training=Training(epochs=1)).predict(x[:1])
    assert repr(one).splitlines()[0] == "RealPrediction of 1 row" and len(repr(one).splitlines()) == 3


def test_many_classes_and_several_positions_stay_small():
    wide = CategoricalPrediction(
        torch.full((2, 1000), -7.0), torch.zeros(2), function_variance=torch.zeros(2)
    )._repr_html_()
    assert len(wide) < 5000 and len(Cells(wide).cells["td"]) == 2 * 13
    pixels = torch.full((2, 3, 4, 5), -1.0)
    flat = torch.zeros(2, 4, 5)
    cells = Cells(CategoricalPrediction(pixels, flat, function_variance=flat)._repr_html_()).cells
    assert cells["th"] == ["quantity", "of a row"] and cells["td"][-2:] == ["probs", "3×4×5"]


def test_predictions_draw_themselves(posterior):
    pytest.importorskip("matplotlib")
    x, y = rows()
    axis = posterior.predict(x).plot(y)
    assert axis.get_xlabel() == "aleatoric, nats" and len(axis.collections) == 2  # right and wrong
    values = x[:, :1]
    real = MAP().fit(nn.Linear(3, 1), (x, values), Gaussian(), training=Training(epochs=1)).predict(x)
    other = real.plot(values, inputs=x[:, 0], axis=axis)
    assert other is axis and axis.get_xlabel() == "input"
    assert real.plot().get_xlabel() == "rows, by their mean"
    two = MAP().fit(nn.Linear(3, 2), (x, x[:, :2]), Gaussian(), training=Training(epochs=1)).predict(x)
    assert two.plot().get_ylabel() == "epistemic, standard deviation"
