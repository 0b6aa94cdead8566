"""Run the toy experiment in a process of its own, to be killed by a test: `papers_killed.py FOLDER`."""

import sys
from pathlib import Path

from papers_examples import experiment

from papers.runner import Results, run

if __name__ == "__main__":
    made = experiment(wait=0.4)
    run(made, "paper", made.scales["paper"].cells, Results(folder=Path(sys.argv[1])))
