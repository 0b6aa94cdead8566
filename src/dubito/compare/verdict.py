"""The verdict: which method to take, by how much, how sure, at what cost, and when to take another.

Every sentence follows from the pooled metrics and their replicates; what chance explains is never praised.
"""

from collections.abc import Mapping, Sequence
from math import prod

from .folder import MethodRow
from .replicates import Interval, Standing
from .words import duration, listed, size, times

#: The method that the others are measured against, and a difference in NLL that nobody would act on, however sure.
REFERENCE, NEGLIGIBLE = "map", 1e-3
#: What uncertainty may buy beside likelihood: metric, words, format.
GAINS = (
    ("ood_auroc", "the AUROC at out-of-distribution rows", "{:.3f}"),
    ("surest_accuracy", "the accuracy of the surest 80 % of rows", "{:.1%}"),
    ("coverage_90", "the coverage of 90 % intervals", "{:.1%}"),
    ("shift_nll", "the NLL under shift", "{:.3f}"),
)


def rows_in_words(test_rows: int, splits: int) -> str:
    """On how many rows and splits."""
    rows = f"{test_rows:,} test row{'s' * (test_rows != 1)}"
    return f"on {rows}" if splits == 1 else f"on {splits} splits of {rows}"


def differences(rows: Sequence[MethodRow], standing: Standing) -> tuple[str, Mapping[str, float]]:
    """The method that NLLs are measured against, MAP or else the best, and half the width of each one's interval."""
    names = [row.method for row in rows]
    base = REFERENCE if REFERENCE in names else (names or [""])[0]
    leads = {name: standing.ahead("nll", base, name) for name in names if name != base}
    return base, {name: (lead.upper - lead.lower) / 2 for name, lead in leads.items() if lead is not None}


def indistinguishable(rows: Sequence[MethodRow], standing: Standing) -> dict[str, bool]:
    """Whether a method cannot be distinguished from the best in NLL; methods without replicates are left out."""
    names = [row.method for row in rows if "nll" in standing.replicates[row.method]]
    leads = {name: standing.ahead("nll", names[0], name) for name in names}
    return {name: lead is not None and (lead.lower <= 0 or lead.value < NEGLIGIBLE) for name, lead in leads.items()}


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
        self.best, self.base = (rows or [None])[0], next((r for r in rows if r.method == REFERENCE), None)
        self.level = indistinguishable(rows, standing)

    def sentences(self) -> tuple[str, ...]:
        """The verdict, sentence by sentence."""
        if self.best is None:
            return ("No method has finished.",)
        if len(self.rows) == 1:
            told = [f"Only {self.best.method} was compared: NLL {self.best.metrics['nll']:.3f} {self.where}."]
        else:
            told = [self._winner(self.best), self._cost(self.best, "It takes"), self._gains(self.best.method)]
            told += [*self._cheapest(self.best), self._shift(self.best.method), self._outside(self.best.method)]
        return tuple(filter(None, [*told, self._stopped()]))

    def _winner(self, best: MethodRow) -> str:
        second = self.rows[1].method
        others = [(f"the runner-up, {second},", second)]
        if self.base and REFERENCE not in (best.method, second):
            others.insert(0, (REFERENCE, REFERENCE))
        leads = [f"that of {words} by {self._lead(best.method, name)}" for words, name in others]
        return f"Take {best.method}: its NLL {self.where} is {best.metrics['nll']:.3f}, lower than {listed(leads)}."

    def _lead(self, first: str, second: str) -> str:
        lead = self.standing.ahead("nll", first, second)
        if lead is None:
            value = self.standing.metrics[second]["nll"] - self.standing.metrics[first]["nll"]
            return f"{value:.3f} (how sure that is cannot be said: some losses are not finite)"
        chance = ", so that the two cannot be distinguished" if lead.lower <= 0 else ""
        shown = f"{lead.value:.3f}" if lead.value >= 5e-4 else "less than 0.001"
        return f"{shown} ({_ends(lead)}{chance})"

    def _costs(self, row: MethodRow) -> dict[str, float]:
        costs = {"memory": row.nbytes, "CPU time of training": row.seconds, "prediction time": row.predict_seconds}
        return {name: max(cost, 1e-9) for name, cost in costs.items() if not (self.timed and "training" in name)}

    def _cost(self, row: MethodRow, opening: str) -> str:
        costs = self._costs(row)
        if self.base is None or row is self.base:
            parts = [size(row.nbytes), f"{duration(row.seconds)} of CPU time to train"][: 1 if self.timed else 2]
            return f"{opening} {listed([*parts, f'{duration(row.predict_seconds)} for 1,000 predictions'])}."
        base = self._costs(self.base)
        parts = [f"{times(costs[name] / base[name])} the {name}" for name in costs]
        return f"{opening} {listed(parts)} of {REFERENCE}."

    def _gains(self, best: str) -> str:
        """Where MAP cannot be distinguished from the best: what uncertainty buys beside likelihood, if anything."""
        if self.base is None or not (best == REFERENCE or self.level.get(REFERENCE)):
            return ""
        told = f"In NLL {REFERENCE}, without any uncertainty of its weights, cannot be distinguished from the best"
        told = f"No method has a lower NLL than {REFERENCE}" if best == REFERENCE else told
        gains, measured, others = [], [], [row.method for row in self.rows if row is not self.base]
        level = 1 - 0.05 / len(others)  # Bonferroni: the best of so many is looked at
        for metric, words, form in GAINS:
            leads = {name: self.standing.ahead(metric, name, REFERENCE, level) for name in others}
            there = {name: lead for name, lead in leads.items() if lead is not None}
            if not there:
                continue
            measured.append(words)
            first = max(there, key=lambda name: there[name].value)
            if there[first].lower > 0 and (metric != "ood_auroc" or self._area(first).lower > 0.5):
                values = [form.format(self.standing.metrics[name][metric]) for name in (first, REFERENCE)]
                gains.append(f"{words} ({first} {values[0]}, {REFERENCE} {values[1]})")
        if gains:
            return f"{told}. What uncertainty buys here beyond chance: {listed(gains)}."
        nothing = f", and none is ahead of it beyond chance in {listed(measured)}: uncertainty buys nothing here"
        return f"{told}{nothing if measured else ''}."

    def _cheapest(self, best: MethodRow) -> list[str]:
        level = [row for row in self.rows if self.level.get(row.method)]
        cheapest = min(level, key=lambda row: prod(self._costs(row).values()), default=best)
        if cheapest is best:
            return []
        among = f"of the {len(level)} methods" if len(level) > 2 else "of the two"
        told = f"Where cost matters take {cheapest.method}, the cheapest {among} that cannot be distinguished from "
        told += f"the best {self.where}."
        return [told] if cheapest is self.base else [told, self._cost(cheapest, f"{cheapest.method} takes")]

    def _shift(self, best: str) -> str:
        first = min(self.rows, key=lambda row: row.metrics.get("shift_nll", float("inf"))).method
        lead = self.standing.ahead("shift_nll", first, best)
        if lead is None or lead.lower <= 0:
            return ""
        lower = f"its NLL there is lower than that of {best} by {lead.value:.3f} ({_ends(lead)})"
        return f"Under shift take {first}: {lower}."

    def _area(self, name: str) -> Interval:
        return Interval.of(self.standing.metrics[name]["ood_auroc"], self.standing.replicates[name]["ood_auroc"])

    def _outside(self, best: str) -> str:
        areas = {row.method: self._area(row.method) for row in self.rows if "ood_auroc" in row.metrics}
        if best not in areas:
            return ""
        first = max(areas, key=lambda name: areas[name].value)
        shown = {name: f"{area.value:.3f} ({_ends(area)})" for name, area in areas.items()}
        if areas[first].lower <= 0.5:
            reach = f"the highest AUROC, {shown[first]}, reaches 0.5"
            return f"No method recognises out-of-distribution rows beyond chance: the interval of {reach}."
        lead = self.standing.ahead("ood_auroc", first, best)
        if lead is not None and lead.lower > 0:
            beside = f"AUROC {shown[first]}, {best} {shown[best]}"
            return f"To recognise out-of-distribution rows take {first}: {beside}."
        told = f"In recognising out-of-distribution rows no method is ahead of {best} beyond chance"
        return f"{told}: its AUROC is {shown[best]}." if areas[best].lower > 0.5 else ""

    def _stopped(self) -> str:
        fits = [fit for row in self.rows for fit in row.fits]
        count = sum(fit.ended == "budget" for fit in fits)
        told = f"{count} of {len(fits)} fits were stopped by the budget: the ranking is that of this budget, not of "
        return f"{told}what the methods reach when they are trained to the end." if count else ""


def _ends(interval: Interval) -> str:
    return f"95 % interval {interval.lower:.3f} to {interval.upper:.3f}".replace("-", "−")
