"""The page as text: whole, self-contained, readable without a script and without eyes."""

import html
import itertools
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dubito import StorageError, Training
from dubito.compare import Settings, compare
from dubito.compare.folder import Folder, MethodRow
from dubito.compare.words import readable
from dubito.data import load
from dubito.registry import methods
from dubito.report import colours, write_page
from dubito.report.charts import Item, _quality, training
from dubito.report.multiples import fans
from dubito.report.panels import confusions
from dubito.report.svg import Axis, Chart, even_ticks, log_ticks, span
from dubito.report.terms import explained

QUICK = Training(iterations=40, batch_size=64, lr=5e-3)
VOID = {"meta", "link", "input", "img", "br"}


class Outline(HTMLParser):
    """Elements with their attributes, after checking that every one is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.found = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"{tag} closes nothing"

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


@pytest.mark.parametrize("data", ["digits", "diabetes", "sinc"])
def test_pages_are_whole_and_need_nothing_else(pages, data):
    text = pages[data].read_text()
    outline = Outline(text)
    assert len(text) < 6e6
    assert not re.search(r"(?:src|href)=(?!\"data:|\"#)", text) and "@import" not in text and "url(" not in text
    assert set(re.findall(r"https?://[^\"' ]+", text)) <= {"http://www.w3.org/2000/svg"}
    for attributes in outline.all("svg"):
        assert attributes["role"] == "img" and len(attributes["aria-label"]) > 40
    assert all(attributes["alt"] for attributes in outline.all("img"))
    assert "NaN" not in text and "nan" not in re.sub(r"[^0-9. ,\"]nan[a-z]|[a-z]nan", "", text.split("<main>")[1])


def plain(page):
    """A page without its explanations of words."""
    return re.sub("</?abbr.*?>", "", page.read_text())


def test_every_chart_of_a_classification_is_there(pages):
    text = plain(pages["digits"])
    for part in (
        "Quality against memory", "Quality against training time", "Quality against prediction time", "Reliability.",
        "Selective prediction", "Out-of-distribution rows: held-out 8, 9", "Confidence.", "Entropy.",
        "Accuracy under shift", "NLL under shift", "Calibration error (ECE) under shift",
        "Aleatoric against epistemic", "The test rows of which each method is least certain", "NLL of validation rows",
        "Settings and versions", "torch 2", "<b>NLL</b> with its 95 % intervals", "Confusion matrix.",
        "<b>OOD AUROC</b> with its 95 % intervals",
    ):  # fmt: skip
        assert part in text, part
    assert text.count("data:image/png;base64,") == 3 * 8


def test_every_chart_of_a_regression_is_there(pages):
    text = plain(pages["diabetes"])
    for part in (
        "Predictions and their intervals", "Interval coverage", "RMSE of progression, rows kept",
        "Out-of-distribution rows: far", "Standard deviation.", "RMSE under shift", "progression",
    ):  # fmt: skip
        assert part in text, part
    assert "test rows, by their prediction" in text
    assert "over x" in pages["sinc"].read_text()  # one input: the fan is drawn over it


def test_the_table_says_what_the_results_say(pages):
    text = pages["digits"].read_text()
    results = json.loads((pages["digits"].parent / "results.json").read_text())
    body = re.search(r"<tbody>(.*?)</tbody>", text, re.DOTALL).group(1)
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    headings = re.findall(r'<th scope="col" title=".+?">(.*?)</th>', text.split("<tbody>")[0])
    assert len(rows) == 3
    for shown, row in zip(rows, results["rows"], strict=True):
        assert row["method"] in shown
        assert f">{row['metrics']['accuracy']:.2%}<" in shown
        first, last = results["intervals"][row["method"]]["accuracy"]
        assert first <= row["metrics"]["accuracy"] <= last
        assert f"<small>{100 * first:.1f}–{last:.1%}</small>" in shown
        labels = re.findall(r'data-label="(.*?)"', shown)
        assert labels == headings  # where the table becomes cards, every number has its name
        assert f'data-value="{row["metrics"]["nll"]:.9g}"' in shown


def test_the_page_opens_with_the_verdict_and_explains_its_columns(pages):
    text = pages["digits"].read_text()
    results = json.loads((pages["digits"].parent / "results.json").read_text())
    opening = plain(pages["digits"]).split("<main>")[0]
    for sentence in results["verdict"]:
        assert html.escape(sentence) in opening
    told = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    headings = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', text.split('class="sortable"')[1].split("</thead>")[0])
    assert set(headings) - set(told) == {"method"}
    assert "0.5 is guessing" in told["OOD AUROC"] and "squared error" in told["Brier"]
    told = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", pages["diabetes"].read_text()))
    assert {"shuffled", "far", "90 % coverage", "90 % width", "NLL, shifted"} <= set(told)
    half = results["half_widths"]["k-tied"]
    assert re.search(rf"\d ± {re.escape(readable(half, 2))}", text)
    assert "±: half the 95 % interval of the paired difference to map in NLL" in text


def test_what_the_data_are_is_told(pages):
    text = pages["digits"].read_text()
    panel = text.split('<section id="data">')[1].split("</section>")[0]
    task = json.loads((pages["digits"].parent / "task.json").read_text())
    assert sum(task["spread"]["training"]) == task["rows"]["training"]
    for name, fitted, judged in zip(
        task["class_names"], *(task["spread"][k] for k in ("training", "test")), strict=True
    ):
        share = f"{fitted / task['rows']['training']:.1%}"
        assert f'<th scope="row">{name}</th><td>{fitted:,}</td><td>{share}</td><td>{judged:,}</td>' in panel
    assert "64 of numbers; 64 inputs of the network" in panel and "<td>nothing</td>" in panel
    assert "Histogram of progression in training and test rows" in pages["diabetes"].read_text()


def test_a_table_of_ones_own_tells_of_gaps_dates_and_units(tmp_path):
    stream = random.Random(0)
    lines = ["when;a;name;price"]
    for row in range(60):
        gap = "" if row % 5 == 0 else f"{stream.random():.3f}".replace(".", ",")
        lines.append(f"{1 + row % 28:02d}.{1 + row % 12:02d}.2020;{gap};n{row};{stream.uniform(1e5, 9e5):.2f}")
    (tmp_path / "own.csv").write_text("\n".join(lines))
    settings = Settings(data=str(tmp_path / "own.csv"), target="price", training=QUICK, num_samples=4)
    compare(settings, ["map", "mc-dropout"], out=tmp_path / "out")
    text = write_page(tmp_path / "out").read_text()
    Outline(text)
    panel = text.split('<section id="data">')[1].split("</section>")[0]
    assert "1 of numbers, 1 of dates and 1 left out" in panel
    train = load(tmp_path / "own.csv", target="price", validation=0.1, standardise=False).train.inputs
    assert f"a {float(train[:, -1].mean()):.1%}" in panel  # the share of gaps
    assert "when: dates, which become year, season, weekday" in panel and "separated by &#x27;;&#x27;" in panel
    assert "root mean squared error of the mean, in the units of price" in text
    assert not re.search(
        r"\d[eE]\+\d", re.sub(r"<script>.*?</script>|<pre>.*?</pre>|<code>.*?</code>", "", text, flags=re.S)
    )


def test_confusions_count_the_test_rows(pages):
    text = pages["digits"].read_text()
    blocks = re.findall(r'<table class="confusion">.*?</table>', text)
    assert len(blocks) == 3
    results = json.loads((pages["digits"].parent / "results.json").read_text())
    truth = json.loads((pages["digits"].parent / "task.json").read_text())["spread"]["test"]
    for block, row in zip(blocks, results["rows"], strict=True):
        lines = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', block)
        right = total = 0
        for place, (name, cells) in enumerate(lines):
            counts = [int(count or 0) for count in re.findall(r'<td style="[^"]*"(?: class=right)?>(\d*)</td>', cells)]
            rows, recall, _ = re.findall(r'<td class="sum">(.*?)</td>', cells)
            assert name == str(place) and sum(counts) == int(rows) == truth[place]
            assert recall == f"{counts[place] / int(rows):.1%}"
            right, total = right + counts[place], total + int(rows)
        assert right / total == pytest.approx(row["metrics"]["accuracy"])


def test_many_classes_are_told_by_their_most_frequent_confusions():
    names = [f"c{place}" for place in range(30)]
    matrix = [[5 if a == b else 0 for b in range(30)] for a in range(30)]
    matrix[3][7], matrix[4][1] = 4, 2
    item = Item("map", 7, MethodRow("map", {}), {"confusion": matrix})
    text = confusions([item], names)
    found = re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td>', text)
    assert found == [("c3", "c7", "4 of 9"), ("c4", "c1", "2 of 7")]


def test_words_explain_themselves_once_where_they_stand():
    text = explained('<b class="NLL">NLL</b> and NLL, Brier; notNLL')
    assert text.count("<abbr") == 2 and 'class="NLL"' in text and "notNLL" in text
    assert re.search(r'<abbr tabindex="0" title="squared error [^"]*">Brier</abbr>', text)


def test_training_is_told_fit_by_fit(pages):
    text = pages["digits"].read_text()
    table = text.split("Steps, convergence and chosen settings")[1].split("</table>")[0]
    rows = re.findall(r"<tr><th scope=\"row\".*?</tr>", table)
    assert len(rows) == 3 and all("<td>0</td><td>40</td><td>made all its steps</td>" in row for row in rows)


def test_failures_are_rows(pages, tmp_path):
    folder = pages["diabetes"].parent
    for path in filter(Path.is_file, folder.iterdir()):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    results = json.loads((tmp_path / "results.json").read_text())
    results["rows"].append({**results["rows"][0], "method": "rank1", "metrics": {}, "failure": "no <layer> here"})
    with pytest.raises(StorageError, match=r"task\.json is altered: it has another sha256"):
        task = tmp_path / "task.json"
        unchanged = task.read_text()
        task.write_text(unchanged.replace("progression", "regression"))
        write_page(tmp_path, tmp_path / "other.html")
    task.write_text(unchanged)
    Folder(tmp_path).write("results", {k: v for k, v in results.items() if k not in ("format", "sha256")})
    text = write_page(tmp_path, tmp_path / "other.html").read_text()
    Outline(text)
    assert "failed: no &lt;layer&gt; here" in text
    with pytest.raises(StorageError, match="must be a folder that `dubito compare` wrote"):
        write_page(tmp_path / "nowhere")


def contrast(one, other):
    """WCAG's ratio of two colours."""
    weights = (0.2126, 0.7152, 0.0722)
    low, high = sorted(sum(a * b for a, b in zip(weights, linear(colour), strict=True)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def linear(colour):
    """A colour's linear red, green and blue."""
    levels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [level / 12.92 if level <= 0.04045 else ((level + 0.055) / 1.055) ** 2.4 for level in levels]


#: Severe protanopia, deuteranopia and tritanopia in linear RGB [Machado et al. 2009, Table 1].
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881),
    ),
    "tritan": (
        (1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900),
    ),
}  # fmt: skip


def oklab(rgb):
    """Björn Ottosson's OKLab."""
    r, g, b = (max(value, 0.0) for value in rgb)
    l_ = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    m_ = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    s_ = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * l_ + 0.7936177850 * m_ - 0.0040720468 * s_,
        1.9779984951 * l_ - 2.4285922050 * m_ + 0.4505937099 * s_,
        0.0259040371 * l_ + 0.7827717662 * m_ - 0.8086757660 * s_,
    )


STYLE = (Path(colours.__file__).parent / "style.css").read_text()
GROUNDS = {
    name: (palette, dict(re.findall(r"(--\w+):(#\w{6})", line)))
    for name, palette, line in (
        ("light", colours.LIGHT, STYLE.splitlines()[0]),
        ("dark", colours.DARK, STYLE.splitlines()[2]),
    )
}


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("kind", BLINDNESS)
def test_hues_stay_apart_for_colour_blind_readers(ground, kind, turn):
    """Those of one dash and marker; others are distinguished by these too."""
    hues = GROUNDS[ground][0][turn]
    seen = []
    for colour in hues:
        rgb = linear(colour)
        seen.append(oklab([sum(a * b for a, b in zip(row, rgb, strict=True)) for row in BLINDNESS[kind]]))
    for first, second in itertools.combinations(range(len(hues)), 2):
        # 0.02 is about what the eye just tells apart in large patches; lines want more, and a third of ink takes some
        assert math.dist(seen[first], seen[second]) > (0.07, 0.045, 0.07)[turn], (hues[first], hues[second])


@pytest.mark.parametrize("ground", GROUNDS)
def test_all_hues_differ(ground):
    hues = [colour for turn in GROUNDS[ground][0] for colour in turn]
    for one, other in itertools.combinations(hues, 2):
        assert math.dist(oklab(linear(one)), oklab(linear(other))) > 0.04, (one, other)


@pytest.mark.parametrize("ground", GROUNDS)
def test_lines_stand_out_from_their_ground(ground):
    palette, sheet = GROUNDS[ground]
    for colour in (colour for turn in palette for colour in turn):
        assert contrast(colour, sheet["--card"]) > 2.98, colour  # WCAG 2.1 asks 3 for what is drawn


@pytest.mark.parametrize("ground", GROUNDS)
def test_text_can_be_read_on_its_ground(ground):
    sheet = GROUNDS[ground][1]
    for text, below in itertools.product(("--ink", "--soft", "--accent", "--bad"), ("--paper", "--card", "--good")):
        assert contrast(sheet[text], sheet[below]) > 4.5, f"{text} on {below}"  # WCAG 2.1 AA


def test_no_two_methods_look_alike():
    names = [*methods(), "one-more"]
    places = colours.places(names, methods())
    assert len(set(places.values())) == len(names)
    assert places["map"] == 7
    assert colours.places(["rank1", "map"], names)["map"] == 7
    rules = colours.rules(places.values())
    found = re.findall(r"--colour:var\(--hue(\d)-(\d)\)", rules)
    assert len(set(found)) == len(names)
    for palette in (colours.LIGHT, colours.DARK):
        assert len({palette[int(turn)][int(hue)] for turn, hue in found}) == len(names)


def test_the_axis_of_quality_gives_close_methods_room():
    assert _quality([0.05, 0.06, 0.35]).log
    assert not _quality([5.5, 5.9]).log and not _quality([-1.0, 3.0]).log
    numbers = [readable(value, 3) for value in (111.2, 1234.5, 0.01234, 0.0, 2.5e9)]
    assert numbers == ["111", "1,230", "0.0123", "0", "2,500,000,000"]


def test_a_training_of_one_epoch_is_a_point():
    row = MethodRow("map", {"nll": 0.5})
    item = Item("map", 7, row, {"training": {"epoch": [1.0], "nll": [0.25]}})
    text = training([item], "nll")
    assert text.count("<circle") == 1
    assert re.findall(r'class="xtick"[^>]*>([^<]*)<', text) == ["0", "1", "2"]
    item = Item("map", 7, row, {"training": {"epoch": [1.0, 2.0], "nll": [0.25, 0.2]}})
    assert "<circle" not in training([item], "nll")


def test_a_fan_over_inputs_that_differ_in_their_last_digits_is_drawn():
    fan = {name: [0.0, 1.0, 2.0] for name in ("mean", "low95", "high95", "low50", "high50", "dots")}
    for x in ([1e9] * 3, [0.0] * 3, [1e9, 1e9, 1e9 + 1]):
        item = Item("map", 7, MethodRow("map", {"nll": 0.5}), {"fan": {"name": "x", "x": x, "dots_x": x, **fan}})
        assert "<polyline" in fans([item], "y") or "<path" in fans([item], "y")


def test_a_page_of_one_input_with_a_large_offset_tells_its_ends_apart(tmp_path):
    stream = random.Random(0)
    rows = [(1e9 + stream.gauss(0, 1), stream.gauss(0, 1)) for _ in range(60)]
    (tmp_path / "own.csv").write_text("x,y\n" + "".join(f"{x!r},{y!r}\n" for x, y in rows))
    settings = Settings(data=str(tmp_path / "own.csv"), target="y", training=QUICK, num_samples=4)
    compare(settings, ["map"], out=tmp_path / "out")
    chart = write_page(tmp_path / "out").read_text().split('class="multiples larger"')[1]
    numbers = re.findall(r'class="xtick"[^>]*>([^<]*)<', chart.split("</svg>")[0])
    assert len(set(numbers)) == len(numbers) > 1


def test_ticks_are_round_and_inside():
    assert even_ticks(0, 1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert even_ticks(-3.2, 7.9, 4) == pytest.approx([0, 5])
    assert even_ticks(-60, 450, 2) == pytest.approx([0, 250])  # one number alone would be no scale
    assert log_ticks(90, 2500) == [100, 200, 500, 1000, 2000]
    assert log_ticks(1, 1e6) == [10.0**power for power in range(7)]
    assert span([2.0, 4.0], zero=True) == (0.0, pytest.approx(4.24))
    assert span([]) == (-0.06, 1.06)
    assert span([3.0, 3.0])[0] < 3 < span([3.0, 3.0])[1]


def test_marks_lie_where_their_numbers_say():
    chart = Chart(Axis(title="x", low=1, high=100, log=True), Axis(title="y", low=-1, high=1), "two points")
    left, right, top, bottom = chart.box
    assert chart.at(10, 0) == pytest.approx(((left + right) / 2, (top + bottom) / 2))
    assert chart.at(1, 1) == pytest.approx((left, top))
    chart.line(3, "a & b", [1, 10, None, 100], [-1, 0, 0.5, 1])
    text = chart.render()
    middle = f"{(left + right) / 2:.1f},{(top + bottom) / 2:.1f}"
    assert f'points="{left:.1f},{bottom:.1f} {middle} {right:.1f},{top:.1f}"' in text
    assert 'data-name="a &amp; b"' in text and 'data-x="1 100 log 0"' in text
