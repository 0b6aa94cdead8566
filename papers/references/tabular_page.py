"""docs/tabular.md: dubito's estimators beside other tools, from stored results."""

from collections.abc import Mapping
from statistics import mean

from dubito.compare.words import listed, readable, size
from dubito.integrations.sklearn import training_for

from ..runner.experiment import Cell, Experiment, Outcome
from ..runner.intervals import half_width
from ..runner.shared_map import cut_short, to_run_again
from ..runner.store import Results
from .tabular import CLASSES, MOST_ROWS_OF_A_PROCESS, OURS, PEERS, REALS, SPLITS, TABLES, TEST_ROWS, TRAIN_ROWS

RIVAL = "boosting"
#: By what tools are compared: the same rule for all of them.
COMPARED = {"tabular-reals": "crps_quantiles", "tabular-classes": "nll"}
COLUMNS = {
    "tabular-reals": {
        "crps": "CRPS", "nll": "NLL", "rmse": "RMSE", "coverage_90": "coverage", "width_90": "width",
        "auroc": "AUROC",
    },
    "tabular-classes": {
        "nll": "NLL", "accuracy": "accuracy", "coverage_90": "coverage", "set_size_90": "set", "auroc": "AUROC",
    },
}  # fmt: skip
PLACES = ("better, and shown to be", "better", "worse", "worse, and shown to be")
Rows = Mapping[str, Mapping[int, Outcome]]

_CUT = [name.removeprefix("uci/") for name, rows in (REALS | CLASSES).items() if rows > TRAIN_ROWS]
_FEW = [name.removeprefix("uci/") for name, rows in (REALS | CLASSES).items() if rows <= MOST_ROWS_OF_A_PROCESS]
HEAD = f"""# Tables against other tools

`BayesianRegressor(method)` and `BayesianClassifier(method)` [as they come](sklearn.md), an MLP 64-64, beside what
people use instead. All see the same rows as the same numbers: columns standardised, words as columns of zeros and ones,
gaps filled by the median and flagged. {SPLITS} splits; of {listed(_CUT)} at most {TRAIN_ROWS:,} training rows, of all
at most {TEST_ROWS:,} test rows, drawn by the number of the split. No setting of
ours was chosen by these tables' test rows.

- **boosting**: scikit-learn's `HistGradientBoosting` with its defaults; of reals ten models by the pinball loss at the
  levels 0.05, 0.15, … 0.95, sorted where they cross. A fifth of the training rows is kept back and stops the training
  when its loss has not fallen for 10 trees (at most 300).
- **boosting-mapie**: the same models, with [MAPIE](https://mapie.readthedocs.io)'s conformalised quantiles (of classes
  sets by LAC, which may be empty) on the rows that stopped them. Its CPU time includes that of the models.
- **ngboost**: [NGBoost](https://github.com/stanfordmlgroup/ngboost), Normal or categorical, with its defaults but a
  rate of 0.05 for 0.01, for the sake of time; the trees of the least loss on a fifth of the rows, patience 20, at most
  2,000. A look at split 0 of concrete, kin8nm and ames, test rows too, found its NLL within 0.003 of the slower rate's
  or better.
- **gaussian-process**: scikit-learn's, RBF with a length for each column (one for all where there are more than 20) and
  noise by the marginal likelihood, where there are at most {MOST_ROWS_OF_A_PROCESS:,} rows: {listed(_FEW)}.
- dubito's keep back a fifth by themselves. Neither they nor the peers are fitted again to all rows.

CRPS, RMSE and widths are in standard deviations of the training targets, NLL is of standardised targets. The CRPS is
exact where there is a distribution. Of ten quantiles it is that of ten points of equal weight, a little larger (0.7 %
for a Normal that is right), so that tools are *compared* by this rule alone, taken of all of them. The mean of
quantiles is the point that RMSE judges. Coverage and width are of 90 % intervals; of classes, of the fewest classes
that have 90 % together. AUROC is of test rows with columns shuffled independently against test rows, by the width of
the 90 % interval or by entropy. CPU-seconds are of the fit, on one thread. Bytes are of the posterior's tensors
(float64), and of what pickle writes of others.

Targets of wine-red and pol take few values, and rows of wine-red repeat: a tool that meets single values with little
noise has a low NLL there without knowing more. Neighbouring rows of satimage share pixels.

Differences are paired by split. Intervals are of 95 %, Student's t with the variance of overlapping splits corrected
[Nadeau & Bengio 2003]; they are of one pair each, not of all together."""


def page(results: Results | None = None) -> str:
    """The page."""
    results, parts, lacking = results or Results(), [HEAD], []
    for table in TABLES:
        data = list(dict.fromkeys(cell.data for cell in table.experiment.scales["paper"].cells))
        read = {name: rows_of(table.experiment, name, results) for name in data}
        shown = {name: rows for name, rows in read.items() if rows.get(RIVAL)}
        if table.name == "tabular-reals" and (told := earlier(shown)):
            parts.append(told)
        if shown:
            parts.append(verdicts(table.name, shown))
            parts += [section(table.name, name, rows) for name, rows in shown.items()]
        cells = table.experiment.scales["paper"].cells
        if sum(len(splits) for rows in read.values() for splits in rows.values()) < len(cells):
            lacking.append(table.name)
    if lacking:
        told = f"All or some cells of {listed(lacking)}. With the data in a folder of DUBITO_DATA, and "
        told += "`make bench-env` for NGBoost:"
        lines = "\n".join(f"make runs RUNS=\"--only '{name} *'\"" for name in lacking)
        parts.append(f"## Not run\n\n{told}\n\n```sh\n{lines}\npython -m papers.references.page\n```")
    return "\n\n".join(parts) + "\n"


def earlier(shown: Mapping[str, Rows]) -> str:
    """Which splits stand as they were before longer MAP fits."""
    counts = {}
    for data, rows in shown.items():
        details = [outcome.details for outcome in rows.get("map", {}).values() if "protocol" in outcome.details]
        counts[data] = sum(
            cut_short(facts, training_for(facts["rows"]), seen["train_rows"] - facts["rows"])
            for seen in details
            for facts in [seen["protocol"]]
        )
    return to_run_again(counts)


def rows_of(experiment: Experiment, data: str, results: Results) -> dict[str, dict[int, Outcome]]:
    """The outcomes of every tool by split."""
    rows: dict[str, dict[int, Outcome]] = {}
    for name in (*PEERS, *OURS):
        if (data, name) not in experiment.scales["paper"].variants:
            continue
        for split in range(SPLITS):
            if (outcome := results.read(experiment, "paper", Cell(data, name, split))) is not None:
                rows.setdefault(name, {})[split] = outcome
    return rows


def difference(rows: Rows, name: str, rival: str, metric: str) -> tuple[float, float] | None:
    """The mean paired difference, and half of its interval; None for fewer than two splits of both.

    Test rows of one split are training rows of another, so that the variance of the mean is not s²/n but
    (1/n + test rows / training rows) s².
    """
    pairs = [(rows[name][split], rows[rival][split]) for split in rows[name] if split in rows[rival]]
    if len(pairs) < 2:
        return None
    values = [first.metrics[metric] - second.metrics[metric] for first, second in pairs]
    details = pairs[0][0].details
    share = 1 / len(values) + details["test_rows"] / details["train_rows"]
    return mean(values), half_width(values, share=share)


def place(pair: tuple[float, float]) -> int:
    """Which of `PLACES` a difference has; lower is better."""
    centre, half = pair
    return (0 if centre + half < 0 else 1) if centre < 0 else (3 if centre - half > 0 else 2)


def verdicts(table: str, read: Mapping[str, Rows]) -> str:
    """On which tables each tool is better than boosting, and on how many than the others."""
    metric, others = COMPARED[table], [name for name in PEERS if name != RIVAL]
    what = "CRPS of ten quantiles" if metric == "crps_quantiles" else "NLL"
    lines = [
        f"## {'Reals' if table == 'tabular-reals' else 'Classes'}",
        "",
        f"{what} less that of {RIVAL}, table by table, by whether the interval leaves 0 out. Beside it the counts of "
        f"the same four against {listed(others)}.",
        "",
        f"| | mean difference | {' | '.join(PLACES)} | {' | '.join(others)} |",
        "|---|---:|" + "---|" * (len(PLACES) + len(others)),
    ]
    for name in (*others, *OURS):
        pairs = {data: _pair(rows, name, RIVAL, metric) for data, rows in read.items()}
        told = {data: pair for data, pair in pairs.items() if pair is not None}
        if not told:
            continue
        groups: list[list[str]] = [[], [], [], []]
        for data, pair in told.items():
            groups[place(pair)].append(data.removeprefix("uci/"))
        counts = []
        for other in others:
            against = [_pair(rows, name, other, metric) for rows in read.values()] if name != other else []
            places = [place(pair) for pair in against if pair is not None]
            counts.append(" / ".join(str(places.count(number)) for number in range(len(PLACES))) if places else "")
        centre = f"{mean(pair[0] for pair in told.values()):+.3f} of {len(told)}"
        lines.append(
            f"| {name} | {centre} | {' | '.join(', '.join(group) or '–' for group in groups)} | {' | '.join(counts)} |"
        )
    return "\n".join(lines)


def _pair(rows: Rows, name: str, rival: str, metric: str) -> tuple[float, float] | None:
    return difference(rows, name, rival, metric) if name in rows and rival in rows else None


def section(table: str, data: str, rows: Rows) -> str:
    """The numbers of one table."""
    columns, metric = COLUMNS[table], COMPARED[table]
    details = next(iter(rows[RIVAL].values())).details
    lines = [
        f"### {data}",
        "",
        f"{details['train_rows']:,} training and {details['test_rows']:,} test rows.",
        "",
        f"| | {' | '.join(columns.values())} | CPU-seconds | bytes | compared, less {RIVAL}'s | splits |",
        "|---|" + "---:|" * (len(columns) + 4),
    ]
    for name, splits in rows.items():
        cells = [_mean(splits, column) for column in columns]
        seconds = readable(mean(outcome.metrics["cpu_seconds"] for outcome in splits.values()), 2)
        pair = difference(rows, name, RIVAL, metric) if name != RIVAL else None
        less = "" if pair is None else f"{pair[0]:+.3f} ± {pair[1]:.3f}"
        nbytes = size(mean(outcome.metrics["bytes"] for outcome in splits.values()))
        lines.append(f"| {name} | {' | '.join(cells)} | {seconds} | {nbytes} | {less} | {len(splits)} |")
    return "\n".join(lines)


def _mean(splits: Mapping[int, Outcome], metric: str) -> str:
    values = [outcome.metrics[metric] for outcome in splits.values() if metric in outcome.metrics]
    return f"{mean(values):.3f}" if values else "–"
