"""The command line: thin, each command calls what the library offers.

Exit codes: 0 done; 1 an error, in one line, or a job that failed; 2 a wrong call; 130 interrupted by Ctrl-C,
143 by SIGTERM, with what was finished kept.
"""

from .main import main as main
from .main import make_parser as make_parser
