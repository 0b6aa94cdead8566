"""Differences between methods on PhysioNet, paired by patient: `python -m papers.rank1.derive`.

Needs the data (for who died) and the cells of rank1-table-4-physionet at the scale `small`; claims about methods that
lack some are left out. Writes papers/rank1/derived/patients.json, which docs/methods/rank1.md shows.
"""

import json
from dataclasses import asdict
from pathlib import Path

import torch

from dubito import __version__
from dubito.data import load

from ..runner.store import Results
from ..runner.tables import tables
from .patients import patient_differences
from .table_4 import DATA, kept_probs

NAME, SCALE = "rank1-table-4-physionet", "small"


def main() -> None:
    """Every claim's two methods, by every metric."""
    table, results = tables()[NAME], Results()
    cells, died = table.experiment.scales[SCALE].cells, load(DATA).test.targets

    def probs(method: str) -> torch.Tensor | None:
        stored = [results.read(table.experiment, SCALE, cell) for cell in cells if cell.method == method]
        missing = sum(outcome is None for outcome in stored)
        if missing:
            print(f"{missing} cells of {method} are missing; run `dubito reproduce {NAME} --scale {SCALE}`")
            return None
        return kept_probs([outcome for outcome in stored if outcome is not None])

    pairs = dict.fromkeys((claim.better, claim.than) for claim in table.claims)
    known = {method: probs(method) for method in dict.fromkeys(name for pair in pairs for name in pair)}
    complete = [(*pair, known[pair[0]], known[pair[1]]) for pair in pairs]
    found = [
        {"first": first, "second": second, "metric": metric, **asdict(difference), "over": difference.over.value}
        for first, second, ours, theirs in complete
        if ours is not None and theirs is not None
        for metric, difference in patient_differences(ours, theirs, died).items()
    ]
    content = {"version": __version__, "patients": len(died), "resamples": 2_000, "differences": found}
    path = Path(__file__).parent / "derived" / "patients.json"
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
