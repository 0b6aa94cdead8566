"""UCI-gap on the page of references: every method's log-likelihood inside gaps and outside of them, beside MAP's."""

from collections.abc import Mapping
from statistics import mean

from dubito.compare.words import readable

from ..runner.store import Results
from .gap import EXPERIMENT, METHODS, SPLITS, WITH_GAPS
from .ranking import Key, Span, spanned

BASE = "map"
#: Tables where held-out rows share values of the column with training rows.
PARTIAL = ("boston", "energy", "naval")
HEAD = """## Inside the gaps of nine UCI tables

Table `uci-gap`, all methods at their defaults: log-likelihood of test rows inside a gap, and of a tenth of the rows
around it that was kept back, in units where targets have standard deviation 1. Higher is better. Differences from MAP
are paired by split, with Student's t over splits, which share rows; means are over the nine tables, without naval's two
splits that have no gap. In boston, energy and naval gaps are partial. Single far splits of energy and naval decide the
mean of nine (there a closer fit around the gap is a surer miss inside), so the mean of the *six* whole gaps stands
beside it and orders the rows, and *tables* counts where a difference from MAP is shown (better : worse)."""

Values = Mapping[str, Mapping[str, Mapping[Key, float]]]  # by method and metric


def section(results: Results) -> str:
    """The section; nothing where nothing was run."""
    read = stored(results)
    complete = [name for name in METHODS if len(read.get(name, {}).get("log_likelihood_inside", {})) == splits()]
    if BASE not in complete:
        return ""
    left_out = [name for name in METHODS if name not in complete]
    told = f" Not run whole: {', '.join(left_out)}." if left_out else ""
    return "\n\n".join([HEAD + told, overall(read, complete), by_table(read, complete)])


def splits() -> int:
    """All splits with gaps."""
    return sum(SPLITS[name] for name in WITH_GAPS)


def stored(results: Results) -> dict[str, dict[str, dict[Key, float]]]:
    """What was measured on splits with gaps, by method and metric."""
    read: dict[str, dict[str, dict[Key, float]]] = {}
    for cell in EXPERIMENT.scales["paper"].cells:
        if cell.data in WITH_GAPS and (outcome := results.read(EXPERIMENT, "paper", cell)) is not None:
            for name, value in outcome.metrics.items():
                key = cell.data, cell.split, cell.seed
                read.setdefault(cell.method, {}).setdefault(name, {})[key] = value
    return read


def overall(read: Values, methods: list[str]) -> str:
    """Means over the tables, the best inside whole gaps on top."""
    lines = [
        "| | six, inside | nine, inside | less MAP's | tables | coverage of 90 %, inside | nine, outside "
        "| less MAP's | tables | coverage, outside |",
        "|---|" + "---:|" * 9,
    ]
    inside = {name: read[name]["log_likelihood_inside"] for name in methods}
    whole = {
        name: spanned({key: value for key, value in values.items() if key[0] not in PARTIAL}).value
        for name, values in inside.items()
    }
    for name in sorted(methods, key=lambda name: -whole[name]):
        cells = [f"{whole[name]:.3f}"]
        for where in ("inside", "outside"):
            cells.append(f"{spanned(read[name][f'log_likelihood_{where}']).value:.3f}")
            gaps = {data: less(read, name, where, data) for data in WITH_GAPS}
            counts = [sum(sign(gap) == way for gap in gaps.values()) for way in (1, -1)]
            cells += ["", ""] if name == BASE else [interval(less(read, name, where)), f"{counts[0]} : {counts[1]}"]
            cells.append(f"{spanned(read[name][f'coverage_90_{where}']).value:.3f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_table(read: Values, methods: list[str]) -> str:
    """Log-likelihood inside the gaps of each table, less MAP's."""
    heads = [f"{name}{' (partial)' if name in PARTIAL else ''}" for name in WITH_GAPS]
    lines = [
        "Inside, less MAP's, table by table; intervals that leave 0 out are bold:",
        "",
        f"| | {' | '.join(heads)} |",
        "|---|" + "---:|" * len(heads),
    ]
    for name in methods:
        if name != BASE:
            gaps = [less(read, name, "inside", data) for data in WITH_GAPS]
            cells = [f"**{interval(gap)}**" if sign(gap) else interval(gap) for gap in gaps]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    values = [mean(v for key, v in read[BASE]["log_likelihood_inside"].items() if key[0] == d) for d in WITH_GAPS]
    lines.append(f"| MAP itself | {' | '.join(readable(value, 3) for value in values)} |")
    return "\n".join(lines)


def less(read: Values, name: str, where: str, data: str | None = None) -> Span:
    """How much higher a method's log-likelihood is than MAP's, paired by split, on a table or over all."""
    ours, base = (read[method][f"log_likelihood_{where}"] for method in (name, BASE))
    return spanned({key: value - base[key] for key, value in ours.items() if data in (None, key[0])})


def sign(gap: Span) -> int:
    """1 where a difference is shown to be better, -1 worse, 0 where its interval holds 0."""
    low, high = gap.ends
    return (low > 0) - (high < 0)


def interval(gap: Span) -> str:
    """A difference with half of its interval."""
    return f"{readable(gap.value, 3)} ± {readable(gap.half or 0.0, 2)}"
