"""One queue for the unfinished cells of all tables: those that close most rows per CPU-hour first."""

from .loop import Queue as Queue
from .ranking import Task as Task
from .ranking import ranked as ranked
from .state import Ended as Ended
