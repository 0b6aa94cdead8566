"""Run the campaigns and print what they counted; the exit code is 1 where a case failed.

python -m tests.chaos [campaigns ...] [--size 1.0] [--seed 0] [--json counts.json]
"""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

from . import CAMPAIGNS, Report


def main() -> int:
    """Run the campaigns that were named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("campaigns", nargs="*", help=f"of {', '.join(CAMPAIGNS)} (default: all)")
    parser.add_argument("--size", type=float, default=1.0, help="part of every campaign that is run")
    parser.add_argument("--seed", type=int, default=0, help="the cases are drawn from it")
    parser.add_argument("--json", type=Path, help="file for the counts")
    arguments = parser.parse_args()
    unknown = set(arguments.campaigns) - set(CAMPAIGNS)
    if unknown:
        parser.error(f"no campaign {', '.join(sorted(unknown))}; there are {', '.join(CAMPAIGNS)}")

    counts, failed = {}, False
    for name in arguments.campaigns or CAMPAIGNS:
        start = time.monotonic()
        report: Report = importlib.import_module(f"tests.chaos.{name}").run(arguments.size, arguments.seed)
        seconds = time.monotonic() - start
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in report.outcomes.most_common())
        print(f"{name}: {report.cases} cases in {seconds:.0f} s: {outcomes}", flush=True)
        for failure in report.failures:
            print(f"  FAILED {failure}", flush=True)
        counts[name] = {"cases": report.cases, "seconds": round(seconds), **report.outcomes}
        failed = failed or bool(report.failures)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
