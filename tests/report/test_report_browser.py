"""The page in a real browser: no error, no request, charts drawn, tables sorted, hover answered."""

import json
import re
import shutil
import subprocess

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="needs a browser: apt-get install chromium (or brew install chromium)"
)

#: Holds the page in a frame, for no window of the browser is as narrow as a phone; shows what the probe found.
FRAME = """
<iframe src="{page}" style="border:0" width="{width}" height="900"></iframe>
<script>
addEventListener("message", (event) => {{
  const told = {{ id: "found", textContent: event.data }};
  document.body.append(Object.assign(document.createElement("pre"), told));
}});
</script>
"""
#: Runs after the page's own script and tells what it found.
PROBE = """
<script>
addEventListener("load", () => {
  const found = { errors: window.errors };
  const rows = () => [...document.querySelectorAll("#summary .sortable tbody tr")];
  const column = (place) => rows().map((row) => row.cells[place].dataset.value ?? row.cells[place].textContent.trim());
  const heads = [...document.querySelectorAll("#summary .sortable thead button")];
  found.first = column(0);
  heads[1].click();
  found.up = column(1);
  heads[1].click();
  found.down = column(1);
  found.sort = heads[1].parentElement.getAttribute("aria-sort");
  heads[0].click();
  found.names = column(0);
  const charts = [...document.querySelectorAll("svg[data-box]")];
  found.charts = charts.length;
  found.empty = charts.filter((svg) => {
    const box = svg.querySelector(".plot").getBBox();
    return !(box.width > 20 && box.height > 0) || !svg.querySelector("g.m");
  }).map((svg) => svg.getAttribute("aria-label"));
  const line = document.querySelector("svg polyline").closest("svg");
  line.scrollIntoView();
  const mark = line.querySelector("g.m polyline").points[1];
  const spot = new DOMPoint(mark.x, mark.y).matrixTransform(line.getScreenCTM());
  line.dispatchEvent(new PointerEvent("pointermove", { clientX: spot.x, clientY: spot.y, bubbles: true }));
  found.tip = document.getElementById("tip").textContent;
  const box = document.querySelector(".pick input");
  const group = document.querySelector(`#trust svg g.m${box.id.slice(2)}`);
  found.shown = getComputedStyle(group).display;
  box.click();
  found.hidden = getComputedStyle(group).display;
  const colour = () => getComputedStyle(document.body).backgroundColor;
  const before = colour();
  document.getElementById("theme").click();
  found.themes = [before, colour()];
  const head = document.querySelector("#summary thead th:nth-child(2)");
  head.querySelector("button").focus();
  found.told = document.getElementById("tip").textContent;
  found.described = head.querySelector("button").getAttribute("aria-description");
  head.querySelector("button").blur();
  const word = document.querySelector("#verdict abbr");
  word.dispatchEvent(new PointerEvent("pointerenter"));
  found.word = document.getElementById("tip").textContent;
  dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
  found.closed = document.getElementById("tip").hidden;
  found.width = innerWidth;
  found.outside = [...document.querySelectorAll("#summary .sortable td")].filter((cell) => {
    const box = cell.getBoundingClientRect();
    return box.width && (box.left < 0 || box.right > innerWidth);
  }).length;
  found.labels = getComputedStyle(document.querySelector("#summary td[data-label]"), "::before").content;
  const table = document.querySelector("#summary .wide");
  found.more = table.scrollWidth > table.clientWidth;
  found.hint = getComputedStyle(document.querySelector(".scroll")).display !== "none";
  found.wide = document.documentElement.scrollWidth - innerWidth;
  found.cut = [...document.querySelectorAll("svg text")].filter((text) => {
    const [outer, inner] = [text.closest("figure").getBoundingClientRect(), text.getBoundingClientRect()];
    return inner.width && (inner.left < outer.left || inner.right > outer.right);
  }).map((text) => text.textContent);
  found.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  parent.postMessage(JSON.stringify(found), "*");
});
</script>
"""
#: Runs before everything else.
WATCH = '<script>window.errors = []; addEventListener("error", (event) => errors.push(event.message));</script>'


def browse(page, tmp_path, width):
    """What the probe found, and what the browser's console said."""
    text = page.read_text().replace("<style>", WATCH + "<style>", 1).replace("</body>", PROBE + "</body>")
    probed = tmp_path / "probed.html"
    probed.write_text(text)
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(page=probed, width=width))
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--dump-dom",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
        "--enable-logging=stderr", "--virtual-time-budget=10000", f"--user-data-dir={tmp_path / 'profile'}",
        f"file://{frame}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stdout[-500:] + done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    text = found.group(1).replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")
    return json.loads(text), console


@pytest.mark.parametrize(("data", "width"), [("digits", 1280), ("digits", 400), ("diabetes", 1280), ("diabetes", 400)])
def test_the_page_works(pages, tmp_path, data, width):
    found, console = browse(pages[data], tmp_path, width)
    assert found["errors"] == [] and console == []
    assert found["charts"] > 15 and found["empty"] == []
    numbers = [float(text) for text in found["up"]]
    assert numbers == sorted(numbers) and len(numbers) == 3
    assert found["down"] == found["up"][::-1] and found["sort"] == "descending"
    assert found["names"] == sorted(found["first"])
    assert re.search(r"(map|mc-dropout|k-tied)", found["tip"])
    assert found["shown"] != "none" and found["hidden"] == "none"
    assert found["themes"][0] != found["themes"][1]
    assert found["width"] == width and found["wide"] <= 0  # nothing sticks out sideways
    assert found["cut"] == []
    # On a phone the lines of the table are cards with all its numbers, each with its name.
    assert not found["hint"] and not found["more"] and found["outside"] == 0
    assert found["labels"] == ("none" if width > 400 else '"accuracy"' if data == "digits" else '"RMSE"')
    assert found["told"] and found["told"] == found["described"] and "negative log-likelihood" in found["word"]
    assert found["closed"]
    # What the page's own policy stops would be told on the console.
    assert [name for name in found["requests"] if not name.startswith("data:")] == []
