"""The verdict, sentence by sentence, from made-up results whose truth is known."""

import re

import numpy as np
import pytest
import torch

from dubito.compare.folder import FitRecord, MethodRow
from dubito.compare.replicates import Standing
from dubito.compare.table import training_words
from dubito.compare.verdict import Verdict, differences, indistinguishable, rows_in_words
from dubito.compare.words import duration, readable, size, times, with_error

COSTS = {"map": (1000, 2.0, 0.010), "swag": (21000, 2.0, 0.3), "rank1": (1200, 15.0, 0.2), "vogn": (2000, 8.0, 0.1)}


def made_up(values, errors=None, *, stopped=0, timed=False, where="on 69 test rows"):
    """The verdict on methods of known metrics, whose replicates are Normal around them.

    Args:
        values: metrics by method.
        errors: by metric, the standard deviation of each method's replicates, which do not depend on each other.
        stopped: fits of the first method that the budget stopped.
        timed: whether time was the input.
        where: in words.
    """
    errors = {"nll": 0.01, **(errors or {})}
    stream = np.random.default_rng(0)
    replicates = {
        name: {
            key: torch.tensor(value + errors.get(key, 0.01) * stream.normal(size=2000)) for key, value in row.items()
        }
        for name, row in values.items()
    }
    rows = []
    for number, (name, metrics) in enumerate(sorted(values.items(), key=lambda item: item[1]["nll"])):
        nbytes, seconds, predict = COSTS[name]
        fits = [FitRecord(split=k, steps=10, ended="budget" if k < stopped and not number else "limit") for k in (0, 1)]
        rows.append(MethodRow(name, metrics, 10, nbytes, seconds, predict, fits=tuple(fits)))
    standing = Standing(values, replicates)
    return Verdict(rows, standing, where, timed), rows, standing


def test_a_sure_winner_is_named_with_its_leads_and_what_it_costs():
    values = {"map": {"nll": 0.50}, "rank1": {"nll": 0.40}, "vogn": {"nll": 0.60}}
    verdict, rows, standing = made_up(values)
    first, cost, *others = verdict.sentences()
    numbers = r"0\.\d{3} \(95 % interval 0\.\d{3} to 0\.\d{3}\)"
    # map is the runner-up, and so told of once
    assert re.fullmatch(
        rf"Take rank1: its NLL on 69 test rows is 0\.400, lower than that of the runner-up, map, by {numbers}\.", first
    )
    assert cost == "It takes 1.2× the memory, 7.5× the CPU time of training and 20× the prediction time of map."
    assert others == [] and verdict.level == {"rank1": True, "map": False, "vogn": False}
    base, widths = differences(rows, standing)
    # of two independent Normals: 1.96 · √2 · 0.01
    assert base == "map" and widths == {name: pytest.approx(0.0277, rel=0.1) for name in ("rank1", "vogn")}


def test_the_lead_over_map_stands_beside_that_over_the_runner_up():
    verdict, *_ = made_up({"map": {"nll": 0.60}, "rank1": {"nll": 0.40}, "vogn": {"nll": 0.405}})
    first, *_, cheap, cheap_cost = verdict.sentences()
    assert "lower than that of map by 0.200 (95 % interval 0.1" in first
    tie = r"that of the runner-up, vogn, by 0\.005 \(95 % interval −0\.\d+ to 0\.\d+, so that the two cannot be dist"
    assert re.search(tie, first)
    # rank1 1.2 · 7.5 · 20 = 180 times map's, vogn 2 · 4 · 10 = 80 times
    assert cheap == (
        "Where cost matters take vogn, the cheapest of the two that cannot be distinguished from the best on 69 test "
        "rows."
    )
    assert cheap_cost.startswith("vogn takes 2.0× the memory, 4.0× the CPU time")


def test_where_map_ties_it_is_said_what_uncertainty_buys():
    values = {
        "map": {"nll": 0.41, "ood_auroc": 0.60, "surest_accuracy": 0.95, "shift_nll": 0.9},
        "swag": {"nll": 0.40, "ood_auroc": 0.90, "surest_accuracy": 0.951, "shift_nll": 0.89},
    }
    told = " ".join(made_up(values)[0].sentences())
    assert "In NLL map, without any uncertainty of its weights, cannot be distinguished from the best." in told
    assert (
        "What uncertainty buys here beyond chance: the AUROC at out-of-distribution rows (swag 0.900, map 0.600)."
        in told
    )
    assert (
        "In recognising out-of-distribution rows no method is ahead of swag beyond chance: its AUROC is 0.900" in told
    )
    assert "Where cost matters take map, the cheapest of the two" in told and "Under shift" not in told


def test_where_nothing_is_ahead_of_map_uncertainty_buys_nothing():
    values = {
        "map": {"nll": 0.40, "surest_accuracy": 0.95, "coverage_90": 0.9},
        "swag": {"nll": 0.41, "surest_accuracy": 0.951, "coverage_90": 0.901},
    }
    told = made_up(values)[0].sentences()
    assert told[0].startswith("Take map: its NLL on 69 test rows is 0.400, lower than that of the runner-up, swag, by ")
    assert told[1] == "It takes 1 kB, 2 seconds of CPU time to train and 0.01 seconds for 1,000 predictions."
    assert told[2] == (
        "No method has a lower NLL than map, and none is ahead of it beyond chance in the accuracy of the surest 80 % "
        "of rows and the coverage of 90 % intervals: uncertainty buys nothing here."
    )
    assert len(told) == 3


def test_coverage_is_better_where_it_is_nearer_to_its_level():
    values = {"map": {"nll": 0.40, "coverage_90": 0.99}, "swag": {"nll": 0.41, "coverage_90": 0.89}}
    told = " ".join(made_up(values)[0].sentences())
    assert "What uncertainty buys here beyond chance: the coverage of 90 % intervals (swag 89.0%, map 99.0%)." in told


def test_an_area_at_chance_is_not_praised():
    values = {"map": {"nll": 0.60, "ood_auroc": 0.40}, "swag": {"nll": 0.40, "ood_auroc": 0.51}}
    told = made_up(values, {"ood_auroc": 0.02})[0].sentences()[-1]
    shape = r"No method recognises out-of-distribution rows beyond chance: the interval of the highest AUROC, "
    assert re.fullmatch(shape + r"0\.510 \(95 % interval 0\.4\d+ to 0\.5\d+\), reaches 0\.5\.", told)
    # map ties in NLL, swag's area is above map's for sure, but not above chance: it buys nothing
    values = {"map": {"nll": 0.41, "ood_auroc": 0.30}, "swag": {"nll": 0.40, "ood_auroc": 0.51}}
    told = " ".join(made_up(values, {"ood_auroc": 0.02})[0].sentences())
    assert "uncertainty buys nothing here" in told and "What uncertainty buys" not in told


def test_another_is_named_for_shift_and_for_out_of_distribution_rows():
    values = {
        "map": {"nll": 0.60, "ood_auroc": 0.6, "shift_nll": 1.2},
        "swag": {"nll": 0.40, "ood_auroc": 0.7, "shift_nll": 1.0},
        "vogn": {"nll": 0.55, "ood_auroc": 0.9, "shift_nll": 0.7},
    }
    told = made_up(values)[0].sentences()
    shift = r"Under shift take vogn: its NLL there is lower than that of swag by 0\.300 "
    assert re.fullmatch(shift + r"\(95 % interval 0\.2\d+ to 0\.3\d+\)\.", told[-2])
    away = r"To recognise out-of-distribution rows take vogn: AUROC 0\.900 "
    away += r"\(95 % interval 0\.8\d+ to 0\.9\d+\), swag 0\.700"
    assert re.match(away, told[-1])


def test_a_budget_is_told_of_and_takes_the_words_of_time():
    values = {"map": {"nll": 0.50}, "rank1": {"nll": 0.40}}
    verdict, rows, _ = made_up(values, stopped=1, timed=True)
    told = verdict.sentences()
    assert told[1] == "It takes 1.2× the memory and 20× the prediction time of map."
    assert told[-1].startswith("1 of 4 fits were stopped by the budget: the ranking is that of this budget")
    assert training_words(rows[0]) == "10, stopped 1 of 2"
    assert not any("train" in sentence for sentence in told[:-1])


def test_verdicts_on_one_method_on_none_and_on_losses_without_a_mean():
    assert made_up({"swag": {"nll": 0.5}})[0].sentences() == ("Only swag was compared: NLL 0.500 on 69 test rows.",)
    assert Verdict([], Standing({}, {}), "", False).sentences() == ("No method has finished.",)
    _, rows, standing = made_up({"map": {"nll": 0.5}, "swag": {"nll": 0.4}})
    standing.replicates["map"].pop("nll")
    told = Verdict(rows, standing, "on 3 test rows", False).sentences()
    assert "swag: its NLL on 3 test rows is 0.400, lower than that of the runner-up, map, by 0.100 (how sure" in told[0]
    assert indistinguishable(rows, standing) == {"swag": True}
    assert not any("cannot be distinguished" in sentence for sentence in told)


def test_next_to_nothing_is_no_difference_though_it_is_sure():
    values = {"map": {"nll": 0.4002}, "swag": {"nll": 0.4}}
    assert made_up(values, {"nll": 1e-6})[0].level == {"swag": True, "map": True}
    values = {"map": {"nll": 0.402}, "swag": {"nll": 0.4}}
    assert made_up(values, {"nll": 1e-6})[0].level == {"swag": True, "map": False}


def test_numbers_as_people_read_them():
    assert [readable(value) for value in (16170.2, 0.012345, 123456, -2.5, 0, 1e-7, float("inf"))] == [
        "16,170", "0.01235", "123,500", "-2.500", "0", "1e-07", "inf",
    ]  # fmt: skip
    assert with_error(16170, 1600) == "16,200 ± 1,600" and with_error(314.9, 1800) == "300 ± 1,800"
    assert with_error(0.41234, 0.0113) == "0.412 ± 0.011" and with_error(3.0, 0.0) == "3.000"
    assert [size(value) for value in (12, 1234, 5e6, 7.5e9)] == ["12 bytes", "1.23 kB", "5 MB", "7.5 GB"]
    assert [duration(value) for value in (3, 100, 600, 7300)] == ["3 seconds", "100 seconds", "10 minutes", "2 hours"]
    assert (times(1.04), times(1234.0)) == ("1.0×", "1,234×")
    assert rows_in_words(69, 1) == "on 69 test rows" and rows_in_words(1000, 5) == "on 5 splits of 1,000 test rows"
