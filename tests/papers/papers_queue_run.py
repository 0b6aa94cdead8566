"""A queue in a process of its own, to be stopped or killed by a test: `papers_queue_run.py FOLDER TABLE JOBS`."""

import sys
from pathlib import Path

from papers_queue import MODULES

from papers import index
from papers.__main__ import main
from papers.runner.queue import workers

if __name__ == "__main__":
    folder, table, jobs = sys.argv[1:]
    workers.NICENESS = 0
    index.TABLES = {name: module for name, module in MODULES.items() if name == table}
    sys.exit(main(["runs", "--results", str(Path(folder)), "--jobs", jobs]))
