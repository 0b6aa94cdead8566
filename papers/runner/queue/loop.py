"""The queue itself: hands tasks to workers, keeps what comes back, replaces workers that die, stops when asked."""

import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path

from ..experiment import Cell
from ..jobs import Finished, written
from ..provenance import commit
from ..store import Results, Spent
from .claims import Claims
from .failures import ATTEMPTS, Failures
from .ranking import Group, Task, tasks
from .state import Ended, State
from .stopping import stop_signals
from .workers import Died, Worker

#: Locks and marks of failed cells, below the folder of results.
FOLDER = ".runs"
#: Seconds between two looks at the clock and at signals.
TICK = 0.5


class Queue:
    """Runs groups of cells, in their order, until they are done or it is asked to stop.

    Args:
        groups: what to run.
        modules: the module of each table.
        results: where results go.
        jobs: workers.
        report: called with each cell as it ends, and the state after it.
        tick: called with the state now and then.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        modules: Mapping[str, str],
        results: Results,
        *,
        jobs: int,
        report: Callable[[Group, Finished, State], None] = lambda group, finished, state: None,
        tick: Callable[[State], None] = lambda state: None,
    ) -> None:
        self.modules, self.results, self.jobs = modules, results, jobs
        self.report, self.tick = report, tick
        now = commit()
        self.claims = Claims(results.folder / FOLDER / "claims")
        self.claims.sweep()
        self.failures = Failures(results.folder / FOLDER / "failed", now.sha if now else None)
        self.waiting = deque(tasks(groups))
        self.open = {group: set(group.waiting) for group in groups}
        self.spent: dict[Group, list[float]] = {}
        self.wall = 0.0
        self.running: dict[Worker, tuple[Task, float]] = {}
        self.idle: list[Worker] = []
        self.ended = Ended()

    def run(self) -> Ended:
        """Run what is there; a signal to stop ends it with what is finished kept."""
        with stop_signals() as asked:
            try:
                while not asked():
                    self._hand_out()
                    if not self.running:
                        break
                    self._take_in()
                    self.tick(self.state())
                self.ended.stopped = asked()
                self._take_in(timeout=0.0)  # what ended in the meantime is kept
            finally:
                self._close()
        return self.ended

    def state(self) -> State:
        """What runs and what is left now."""
        now = time.monotonic()
        under_way = sum(max(0.0, self._expected(task) - (now - start)) for task, start in self.running.values())
        seconds = sum(map(self._expected, self.waiting)) + under_way
        open_groups = {task.group for task in (*self.waiting, *self._running_tasks())}
        return State(
            running=[(task, now - start) for task, start in self.running.values()],
            cells=sum(len(task.cells) for task in self.waiting),
            rows=sum(group.rows for group in open_groups),
            seconds=seconds * self._slowness() / self.jobs,
        )

    def _running_tasks(self) -> list[Task]:
        return [task for task, _ in self.running.values()]

    def _expected(self, task: Task) -> float:
        """CPU-seconds of a task, by those of its group that ended in this queue where there are any."""
        measured = self.spent.get(task.group)
        return task.cpu_seconds if not measured else len(task.cells) * sum(measured) / len(measured)

    def _slowness(self) -> float:
        """Seconds that pass per CPU-second of a worker, where others use the machine too."""
        cpu = sum(map(sum, self.spent.values()))
        return max(1.0, self.wall / cpu) if cpu > 0 else 1.0

    def _hand_out(self) -> None:
        while self.waiting and len(self.running) < self.jobs:
            task = self._next()
            if task is None:
                return
            worker, group = self._worker(task.key), task.group
            worker.give(self.modules[group.table], group.table, group.scale, task.cells)
            self.running[worker] = task, time.monotonic()

    def _worker(self, key: Hashable | None) -> Worker:
        """A free worker, one that has what the task shares with others if there is one."""
        able = [worker for worker in self.idle if key in worker.shared] or self.idle
        worker = able[0] if able else Worker()
        if able:
            self.idle.remove(worker)
        if key is not None:
            worker.shared.add(key)
        return worker

    def _next(self) -> Task | None:
        """The first task whose cells are free, still without results and not failed too often; it is claimed."""
        self.ended.elsewhere = 0
        busy = {task.key for task in self._running_tasks()} - {None}
        for task in [task for task in self.waiting if task.key not in busy]:
            self.waiting.remove(task)
            cells = [cell for cell in task.cells if self._wanted(task.group, cell)]
            names = [self._name(task.group, cell) for cell in cells]
            if not cells:
                continue
            if not self.claims.take(names):
                self.ended.elsewhere += len(cells)
                self.waiting.append(task)  # another queue may give it up
                continue
            fresh = [cell for cell in cells if self._wanted(task.group, cell)]  # while this one looked
            self.claims.release([self._name(task.group, cell) for cell in cells if cell not in fresh])
            if fresh:
                return Task(group=task.group, cells=tuple(fresh))
        return None

    def _wanted(self, group: Group, cell: Cell) -> bool:
        if self.results.stored(group.experiment, group.scale, cell) is not None:
            self._closed(group, cell)
            return False
        digest = group.experiment.digest(group.scale, cell)
        failure = self.failures.read(self._name(group, cell), digest)
        if failure is not None and failure.attempts >= ATTEMPTS:
            self.ended.failed[f"{group.experiment.name} ({group.scale}) {cell}"] = failure.reason
            return False
        return True

    def _name(self, group: Group, cell: Cell) -> Path:
        path = self.results.path(group.experiment, group.scale, cell)
        return path.relative_to(self.results.folder)

    def _take_in(self, timeout: float = TICK) -> None:
        ready = wait([worker.connection for worker in self.running], timeout=timeout)
        for worker in [worker for worker in self.running if worker.connection in ready]:
            try:
                finished = worker.take()
            except Died as error:
                task, _ = self.running.pop(worker)
                worker.end()
                self._died(task, str(error))
            else:
                if finished is None:  # it has started, and imported what it needs
                    self.running[worker] = self.running[worker][0], time.monotonic()
                    continue
                task, start = self.running.pop(worker)
                self.wall += time.monotonic() - start
                self.idle.append(worker)
                for ending in finished:
                    self._keep(task.group, ending)
            self.claims.release([self._name(task.group, cell) for cell in task.cells])

    def _keep(self, group: Group, finished: Finished) -> None:
        finished = written(group.experiment, group.scale, finished, self.results)
        if finished.failure is not None:
            self._mark(group, finished.cell, finished.failure)
        else:
            self.failures.remove(self._name(group, finished.cell))
            self.spent.setdefault(group, []).append(finished.spent.cpu_seconds)
            self.ended.finished += 1
            self.ended.rows += self._closed(group, finished.cell)
        self.report(group, finished, self.state())

    def _closed(self, group: Group, cell: Cell) -> int:
        """The rows that are closed because a cell is there."""
        left = self.open[group]
        if cell not in left:
            return 0
        left.remove(cell)
        return 0 if left else group.rows

    def _mark(self, group: Group, cell: Cell, reason: str) -> int:
        digest = group.experiment.digest(group.scale, cell)
        self.ended.failed[f"{group.experiment.name} ({group.scale}) {cell}"] = reason
        return self.failures.add(self._name(group, cell), digest, reason).attempts

    def _died(self, task: Task, reason: str) -> None:
        """A death may have been somebody else's doing (memory, a signal): the task has a second try, at the end."""
        attempts = [self._mark(task.group, cell, reason) for cell in task.cells]
        spent = Spent(cpu_seconds=0.0, peak_memory_bytes=None, together=())
        if max(attempts) < ATTEMPTS:
            self.waiting.append(task)
            for cell in task.cells:
                del self.ended.failed[f"{task.group.experiment.name} ({task.group.scale}) {cell}"]
        for cell in task.cells:
            self.report(task.group, Finished(cell=cell, outcome=None, spent=spent, failure=reason), self.state())

    def _close(self) -> None:
        workers = [*self.running, *self.idle]
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.end()
        self.claims.release_all()
