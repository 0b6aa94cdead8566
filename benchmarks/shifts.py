"""All 75 corruptions of 1,000 colour images of 32 × 32 pixels."""

import torch

from dubito.shifts import CORRUPTIONS, SEVERITIES, corrupt

from .bars import Bar, Values, benchmark, interleaved

UNIT = "CPU-seconds"


@benchmark({"all 75": Bar(60.0, UNIT), **{name: Bar(None, UNIT) for name in CORRUPTIONS}})
def shifts(rounds: int) -> Values:
    images = torch.rand(1000, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def severities(name: str) -> None:
        for severity in SEVERITIES:
            corrupt(images, name, severity)

    works = {name: (lambda name=name: severities(name)) for name in CORRUPTIONS}
    seconds = interleaved(works, rounds, warm=1)
    return {"all 75": [sum(values) for values in zip(*seconds.values(), strict=True)], **seconds}
