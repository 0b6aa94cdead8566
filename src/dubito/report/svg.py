"""Charts as SVG text: axes, lines, bands, bars and dots that a small script can read for its hover."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from .colours import marker

Values = Sequence[float | None]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis.

    Attributes:
        title: what it shows.
        low: where it begins.
        high: where it ends.
        log: whether equal ratios take equal room.
        percent: whether numbers are shares.
        ticks: where to put numbers; None chooses.
    """

    title: str
    low: float
    high: float
    log: bool = False
    percent: bool = False
    ticks: tuple[float, ...] | None = None

    def share(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def numbers(self, most: int) -> list[float]:
        """Where numbers stand."""
        if self.ticks is not None:
            return list(self.ticks)
        return log_ticks(self.low, self.high) if self.log else even_ticks(self.low, self.high, most)

    def text(self, value: float) -> str:
        """A number as it is shown, with digits that tell the two ends apart."""
        if self.percent:
            return f"{100 * value:g}%"
        digits = max(6, 2 + math.ceil(math.log10(max(abs(self.low), abs(self.high)) / (self.high - self.low))))
        for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
            if abs(value) >= size:
                return f"{value / (1e3 if unit == 'k' else size):.{digits}g}{unit}"
        return f"{value:.{digits}g}"


def even_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two ends, about so many, and no fewer than two."""
    rough = (high - low) / max(most, 1)
    size = 10 ** math.floor(math.log10(rough))
    steps = [factor * size for factor in (10, 5, 2.5, 2, 1, 0.5, 0.25, 0.2, 0.1)]
    largest = max(place for place, step in enumerate(steps) if step >= rough * 0.999)
    ticks: list[float] = []
    for step in steps[largest:]:
        first = math.ceil(low / step - 1e-9)
        ticks = [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]
        if len(ticks) > 1:
            break
    return ticks


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, or powers alone where there are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if len(powers) > 4 else (1, 2, 5)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in ticks if low * 0.999 <= value <= high * 1.001]


def span(values: Sequence[float | None], *, zero: bool = False, pad: float = 0.06) -> tuple[float, float]:
    """Ends of an axis that holds the values with some room."""
    there = [value for value in values if value is not None]
    low, high = (min(there), max(there)) if there else (0.0, 1.0)
    if zero:
        low = min(low, 0.0)
    room = (high - low) * pad or abs(high) * 0.1 or 1.0
    return (low if zero and low == 0 else low - room), high + room


@dataclass
class Chart:
    """A chart that is drawn mark by mark, then rendered.

    Attributes:
        x: the axis across.
        y: the axis up.
        label: what a reader who does not see it is told.
        width: in units that are pixels at full size.
        height: likewise.
        small: one of many small ones, with fewer numbers.
        margin: room to the left; 0 leaves what the numbers need.
        marks: what was drawn.
    """

    x: Axis
    y: Axis
    label: str
    width: int = 400
    height: int = 290
    small: bool = False
    margin: int = 0
    marks: list[str] = field(default_factory=list)

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, right, top and bottom of the plot; long numbers on the axis up take more room."""
        longest = max((len(self.y.text(value)) for value in self._numbers(self.y)), default=0)
        if self.small:
            return max(30, 10 + 6 * longest), self.width - 6, 6, self.height - 18
        return self.margin or max(52, 26 + 7 * longest), self.width - 12, 10, self.height - 42

    def _numbers(self, axis: Axis) -> list[float]:
        return axis.numbers(2 if self.small else 5)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point lies, kept near the plot."""
        left, right, top, bottom = self.box
        share_x, share_y = (min(max(value, -0.02), 1.02) for value in (self.x.share(x), self.y.share(y)))
        return left + share_x * (right - left), bottom - share_y * (bottom - top)

    def path(self, xs: Values, ys: Values) -> str:
        """Points of a line; a gap where a number is missing is closed."""
        pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None and y is not None]
        return " ".join(f"{px:.1f},{py:.1f}" for px, py in (self.at(x, y) for x, y in pairs))

    def line(self, place: int, name: str, xs: Values, ys: Values, *, dots: bool = False) -> None:
        """A method's line."""
        points = self.path(xs, ys)
        inner = f'<polyline points="{points}"/>'
        if dots:
            spots = (tuple(map(float, point.split(","))) for point in points.split())
            inner += "".join(shape(marker(place), x, y, 2.6) for x, y in spots)
        self.group(place, name, inner)

    def dot(self, place: int, name: str, x: float, y: float, tip: str) -> None:
        """A method's mark with its own hover text."""
        px, py = self.at(x, y)
        self.group(place, name, shape(marker(place), px, py, 5.5, tip))

    def whisker(self, place: int, name: str, x: float | tuple[float, float], y: float | tuple[float, float]) -> None:
        """An interval along one of the axes, the one that has two ends."""
        first, last = (
            self.at(*(value[end] if isinstance(value, tuple) else value for value in (x, y))) for end in (0, 1)
        )
        ends = f"M{first[0]:.1f} {first[1]:.1f}L{last[0]:.1f} {last[1]:.1f}"
        self.group(place, name, f'<path class="whisker" d="{ends}"/>')

    def cloud(self, place: int, name: str, xs: Values, ys: Values, kind: str = "") -> None:
        """Many small dots of one kind, as one path."""
        spots = self.path(xs, ys).split()
        path = "".join(f"M{spot.replace(',', ' ')}h0" for spot in spots)
        self.group(place, name, f'<path class="cloud {kind}" d="{path}"/>')

    def band(self, place: int, name: str, xs: Values, low: Values, high: Values, kind: str) -> None:
        """The room between two lines."""
        back = " ".join(reversed(self.path(xs, low).split()))
        self.group(place, name, f'<polygon class="{kind}" points="{self.path(xs, high)} {back}"/>')

    def bars(self, place: int, name: str, heights: Values, kind: str) -> None:
        """A histogram over the whole axis, as one outline."""
        count, corners = len(heights), []
        for number, height in enumerate(heights):
            for edge in (number, number + 1):
                corners.append((self.x.low + edge * (self.x.high - self.x.low) / count, height or 0.0))
        ends = [(self.x.low, 0.0), *corners, (self.x.high, 0.0)]
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in (self.at(*corner) for corner in ends))
        self.group(place, name, f'<polygon class="{kind}" points="{points}"/>')

    def guide(self, xs: Values, ys: Values) -> None:
        """A thin line that belongs to no method."""
        self.marks.append(f'<polyline class="guide" points="{self.path(xs, ys)}"/>')

    def group(self, place: int, name: str, inner: str) -> None:
        """Marks of one method."""
        self.marks.append(f'<g class="m m{place}" data-name="{escape(name)}">{inner}</g>')

    def render(self) -> str:
        """The chart as SVG."""
        left, right, top, bottom = self.box
        scales = " ".join(
            f'data-{name}="{axis.low:.8g} {axis.high:.8g} {"log" if axis.log else "even"} {int(axis.percent)}"'
            for name, axis in (("x", self.x), ("y", self.y))
        )
        titles = f'data-xtitle="{escape(self.x.title)}" data-ytitle="{escape(self.y.title)}"'
        body = [
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.label)}" '
            f'{scales} {titles} data-box="{left} {right} {top} {bottom}"{" class=small" if self.small else ""}>',
            *self._grid(),
            f'<g class="plot">{"".join(self.marks)}</g>',
        ]
        if not self.small:
            middle = (left + right) / 2
            body += [
                f'<text class="title" x="{middle}" y="{self.height - 6}">{escape(self.x.title)}</text>',
                f'<text class="title" transform="translate(13 {(top + bottom) / 2}) rotate(-90)">'
                f"{escape(self.y.title)}</text>",
            ]
        return "".join([*body, "</svg>"])

    def _grid(self) -> list[str]:
        left, right, top, bottom = self.box
        lines = []
        for value in self._numbers(self.y):
            y = self.at(self.x.low, value)[1]
            lines.append(f'<path class="grid" d="M{left} {y:.1f}H{right}"/>')
            lines.append(f'<text class="ytick" x="{left - 5}" y="{y + 3.5:.1f}">{self.y.text(value)}</text>')
        for value in self._numbers(self.x):
            x = self.at(value, self.y.low)[0]
            lines.append(f'<path class="tick" d="M{x:.1f} {bottom}v4"/>')
            anchor = "end" if self.small and x > right - 12 else "middle"
            lines.append(
                f'<text class="xtick" x="{x:.1f}" y="{bottom + 15}" text-anchor="{anchor}">{self.x.text(value)}</text>'
            )
        return [*lines, f'<path class="axis" d="M{left} {top}V{bottom}H{right}"/>']


def shape(kind: str, x: float, y: float, size: float, tip: str = "") -> str:
    """A marker around a point."""
    told = f' data-tip="{escape(tip)}"' if tip else ""
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}"{told}/>'
    corners = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "triangle": ((0, -1.25), (1.15, 0.85), (-1.15, 0.85)),
        "diamond": ((0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)),
    }[kind]
    points = " ".join(f"{x + size * dx * 0.9:.1f},{y + size * dy * 0.9:.1f}" for dx, dy in corners)
    return f'<polygon class="mark" data-x="{x:.1f}" data-y="{y:.1f}" points="{points}"{told}/>'
