"""Run the toy experiment in a process of its own, to be killed by a test: `reproduce_killed.py FOLDER`."""

import sys
from pathlib import Path

from reproduce_examples import experiment

from dubito.reproduce import Results, run

if __name__ == "__main__":
    made = experiment(wait=0.4)
    run(made, "paper", made.scales["paper"].cells, Results(folder=Path(sys.argv[1])))
