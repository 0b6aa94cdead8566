"""The verdict: which method to take, by how much, how sure, at what cost, and when to take another.

Every sentence follows from the pooled metrics and their replicates; what chance explains is never praised.
"""

from collections.abc import Mapping, Sequence
from math import prod

from .folder import MethodRow
from .replicates import Standing
from .words import duration, listed, readable, size, times

#: The method that the others are measured against.
REFERENCE = "map"
#: A difference in NLL that nobody would act on, in nats, however sure it is.
NEGLIGIBLE = 1e-3
#: What uncertainty may buy beside likelihood: metric, words, format.
GAINS = (
    ("ood_auroc", "the AUROC at out-of-distribution rows", "{:.3f}"),
    ("surest_accuracy", "the accuracy of the surest 80 % of rows", "{:.1%}"),
    ("coverage_90", "the coverage of 90 % intervals", "{:.1%}"),
    ("shift_nll", "the NLL under shift", "{:.3f}"),
)


def equal_sign(where: str) -> str:
    """What ≈ says in tables."""
    return (
        f"≈: cannot be distinguished from the best in NLL {where} (the 95 % interval of the paired difference reaches "
        f"0), or is within {NEGLIGIBLE:g} of it"
    )


def rows_in_words(test_rows: int, splits: int) -> str:
    """On how many rows and splits."""
    rows = f"{test_rows:,} test row{'s' * (test_rows != 1)}"
    return f"on {rows}" if splits == 1 else f"on {splits} splits of {rows}"


def indistinguishable(rows: Sequence[MethodRow], standing: Standing) -> dict[str, bool]:
    """Whether a method cannot be distinguished from the best in NLL; methods without replicates are left out."""
    there = [row.method for row in rows if "nll" in standing.replicates.get(row.method, {})]
    result = {}
    for name in there:
        lead = standing.ahead("nll", there[0], name)
        result[name] = name == there[0] or (lead is not None and (lead.holds(0) or lead.value < NEGLIGIBLE))
    return result


class Verdict:
    """The sentences about one comparison.

    Args:
        rows: finished methods, best NLL first.
        standing: their metrics and replicates.
        where: on how many rows and splits, in words.
        timed: whether time was the input, so that it says nothing of the methods.
    """

    def __init__(self, rows: Sequence[MethodRow], standing: Standing, where: str, timed: bool) -> None:
        self.rows, self.standing, self.where, self.timed = rows, standing, where, timed
        self.by_name = {row.method: row for row in rows}
        self.level = indistinguishable(rows, standing)

    def sentences(self) -> tuple[str, ...]:
        """The verdict, sentence by sentence."""
        if not self.rows:
            return ("No method has finished.",)
        best = self.rows[0]
        if len(self.rows) == 1:
            told = [f"Only {best.method} was compared: NLL {self._nll(best)} {self.where}."]
        else:
            told = [self._winner(best), self._cost(best, "It takes"), *self._map(best), *self._cheapest(best)]
            told += [*self._shift(best), *self._out_of_distribution(best)]
        return tuple(filter(None, [*told, self._stopped()]))

    def _nll(self, row: MethodRow) -> str:
        return f"{row.metrics['nll']:.3f}"

    def _winner(self, best: MethodRow) -> str:
        others = [(f"the runner-up, {self.rows[1].method}", self.rows[1].method)]
        if REFERENCE in self.by_name and REFERENCE not in (best.method, others[0][1]):
            others.insert(0, (REFERENCE, REFERENCE))
        leads = [f"that of {words} by {self._lead(best.method, name)}" for words, name in others]
        return f"Take {best.method}: its NLL {self.where} is {self._nll(best)}, lower than {listed(leads)}."

    def _lead(self, first: str, second: str) -> str:
        """By how much one method is ahead of another in NLL, and how sure that is."""
        lead = self.standing.ahead("nll", first, second)
        if lead is None:
            values = [self.standing.metrics[name]["nll"] for name in (second, first)]
            return (
                f"{values[0] - values[1]:.3f} (how sure that is cannot be said: some losses are not finite)"
            )
        chance = ", so that the two cannot be distinguished" if lead.holds(0) else ""
        return f"{lead.value:.3f} (95 % interval {lead.lower:.3f} to {lead.upper:.3f}{chance})"

    def _ratios(self, row: MethodRow, base: MethodRow) -> list[tuple[float, str]]:
        """What a method costs relative to another."""
        amounts = [
            (row.nbytes, base.nbytes, "memory"),
            (row.predict_seconds, base.predict_seconds, "prediction time"),
        ]
        if not self.timed:
            amounts.insert(1, (row.seconds, base.seconds, "CPU time of training"))
        return [(amount / max(unit, 1e-9), name) for amount, unit, name in amounts]

    def _cost(self, row: MethodRow, opening: str) -> str:
        base = self.by_name.get(REFERENCE)
        if base is None or row is base:
            parts = [size(row.nbytes), f"{duration(row.predict_seconds)} for 1,000 predictions"]
            if not self.timed:
                parts.insert(1, f"{duration(row.seconds)} of CPU time to train")
            return f"{opening} {listed(parts)}."
        parts = [f"{times(ratio)} the {name}" for ratio, name in self._ratios(row, base)]
        return f"{opening} {listed(parts)} of {REFERENCE}."

    def _map(self, best: MethodRow) -> list[str]:
        """Where MAP cannot be distinguished from the best: what uncertainty buys beside likelihood, if anything."""
        if best.method == REFERENCE:
            told = f"No method has a lower NLL than {REFERENCE}"
        elif self.level.get(REFERENCE):
            told = f"In NLL {REFERENCE}, without any uncertainty of its weights, cannot be distinguished from the best"
        else:
            return []
        gains, measured = [], []
        level = 1 - 0.05 / max(1, len(self.rows) - 1)  # Bonferroni: the best of so many is looked at
        for metric, words, form in GAINS:
            leads = {
                row.method: lead
                for row in self.rows
                if row.method != REFERENCE
                and (lead := self.standing.ahead(metric, row.method, REFERENCE, level)) is not None
            }
            if not leads:
                continue
            measured.append(words)
            first = max(leads, key=lambda name: leads[name].value)
            if leads[first].lower > 0 and (metric != "ood_auroc" or self._beyond_chance(first)):
                values = [form.format(self.standing.metrics[name][metric]) for name in (first, REFERENCE)]
                gains.append(f"{words} ({first} {values[0]}, {REFERENCE} {values[1]})")
        if gains:
            return [f"{told}. What uncertainty buys here beyond chance: {listed(gains)}."]
        if not measured:
            return [f"{told}."]
        return [
            f"{told}, and none is ahead of it beyond chance in {listed(measured)}: uncertainty buys nothing here."
        ]

    def _cheapest(self, best: MethodRow) -> list[str]:
        level = [row for row in self.rows if self.level.get(row.method)]
        base = self.by_name.get(REFERENCE, best)
        cheapest = min(
            level, key=lambda row: prod(ratio for ratio, _ in self._ratios(row, base)), default=best
        )
        if cheapest is best:
            return []
        others = f"of the {len(level)} methods" if len(level) > 2 else "of the two"
        return [
            f"Where cost matters take {cheapest.method}, the cheapest {others} that cannot be distinguished from the "
            f"best {self.where}.",
            *([] if cheapest is base else [self._cost(cheapest, f"{cheapest.method} takes")]),
        ]

    def _shift(self, best: MethodRow) -> list[str]:
        rows = [row for row in self.rows if "shift_nll" in row.metrics]
        if len(rows) < 2:
            return []
        first = min(rows, key=lambda row: row.metrics["shift_nll"])
        lead = self.standing.ahead("shift_nll", first.method, best.method)
        if first is best or lead is None or lead.lower <= 0:
            return []
        return [
            f"Under shift take {first.method}: its NLL there is lower than that of {best.method} by "
            f"{lead.value:.3f} (95 % interval {lead.lower:.3f} to {lead.upper:.3f})."
        ]

    def _beyond_chance(self, name: str) -> bool:
        interval = self.standing.interval(name, "ood_auroc")
        return interval is not None and interval.lower > 0.5

    def _out_of_distribution(self, best: MethodRow) -> list[str]:
        rows = [row for row in self.rows if "ood_auroc" in row.metrics]
        if not rows:
            return []
        first = max(rows, key=lambda row: row.metrics["ood_auroc"])
        if not self._beyond_chance(first.method):
            return [
                f"No method recognises out-of-distribution rows beyond chance: the 95 % interval of the highest AUROC, "
                f"{self._auroc(first.method)}, reaches 0.5."
            ]
        lead = self.standing.ahead("ood_auroc", first.method, best.method)
        if first is not best and (lead is None or lead.lower > 0):
            beside = f"AUROC {self._auroc(first.method)}, {best.method} {self._auroc(best.method)}"
            return [f"To recognise out-of-distribution rows take {first.method}: {beside}."]
        if not self._beyond_chance(best.method):
            return []
        return [
            f"In recognising out-of-distribution rows no method is ahead of {best.method} beyond chance: its AUROC is "
            f"{self._auroc(best.method)}."
        ]

    def _auroc(self, name: str) -> str:
        interval = self.standing.interval(name, "ood_auroc")
        if interval is None:
            return readable(self.standing.metrics[name]["ood_auroc"], 3)
        return f"{interval.value:.3f} ({interval.lower:.3f} to {interval.upper:.3f})"

    def _stopped(self) -> str:
        fits = [fit for row in self.rows for fit in row.fits]
        count = sum(fit.ended == "budget" for fit in fits)
        if not count:
            return ""
        return (
            f"{count} of {len(fits)} fits were stopped by the budget: the ranking is that of this budget, not of what "
            "the methods reach when they are trained to the end."
        )


def differences(rows: Sequence[MethodRow], standing: Standing) -> tuple[str, Mapping[str, float]]:
    """The method that NLLs are measured against, MAP or else the best, and half the width of each one's interval."""
    names = [row.method for row in rows]
    base = REFERENCE if REFERENCE in names else (names or [""])[0]
    leads = {name: standing.ahead("nll", base, name) for name in names if name != base}
    return base, {name: lead.half_width for name, lead in leads.items() if lead is not None}
