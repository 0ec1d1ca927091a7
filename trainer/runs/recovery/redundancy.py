"""A run goes on after a rank was lost or a GPU's memory was full: from copies of the trained roles in the memory of
other processes."""

import logging
import time
from collections.abc import Callable, Sequence

import ray

from trainer.cluster.calls import task, wait
from trainer.cluster.keepers import Keeper, links, start_keepers
from trainer.cluster.workers import WorkerGroup
from trainer.errors import LostRankError, LoweredLimit, MemoryFullError, TrainerError, WorkerError
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.runs.interfaces import TrainedRole, TrainingRole
from trainer.runs.session import Session
from trainer.runs.step import Metrics, Progress, Step
from trainer.runs.workers import TrainingGroups

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 10.0  # in which the ranks of a role answer unless they are lost
MOST_RECOVERIES = 3  # of one step, whose data may be what kills its ranks

Connect = Callable[[Sequence[WorkerGroup[TrainingRole]]], None]


class Copies:
    """The copies of a run's trained roles, after the same step; `state` is the run's state after it.

    Each rank's copy is in the memory of another node's keeper, or of another process if there is one node. `connect`
    connects the ranks of groups that were started again.
    """

    def __init__(self, groups: TrainingGroups, connect: Connect, state: TrainingState) -> None:
        """Takes the first copies. Raises WorkerError."""
        self._groups, self._connect = groups, connect
        self._timeout = groups.actor.timeout
        self._keepers = start_keepers([slot for group in groups.trained for slot in group.slots], self._timeout)
        self._recoveries = 0
        self._lowered: list[LoweredLimit] = []  # since the workers started
        if len(self._keepers) == 1:
            logger.warning(
                "trainer.redundancy=1 with one node: the copies outlive the death of a rank, but not of the node"
            )
        self.state = state
        self._copy(state)

    def take(self, state: TrainingState) -> None:
        """Replaces the copies by those of the current state. Raises WorkerError if a rank is lost."""
        try:
            self._copy(state)
        except WorkerError as error:
            if self._keepers.answer(HEALTH_SECONDS):
                raise
            logger.warning("%s; the keepers are started again", error)
            for rank in range(len(self._keepers)):
                self._keepers.restart(rank)
            self._keepers.call(Keeper.keep_only, 0)  # ranks may only call keepers that have started
            self._copy(state)

    def restore(self, error: WorkerError, before_restart: Callable[[], object]) -> TrainingState:
        """Starts the roles again that have lost a rank, and gives all trained roles the state of the copies, which it
        returns. `error` is how the loss was noticed. Ranks that wait for one whose memory was full are lost, too: then
        all compute under the lower limit. `before_restart` is called once it is certain that ranks are replaced.

        Raises `error` if no rank is lost, if no node can take the place of a lost one, or if the step was interrupted
        too often. Raises LostRankError if the copies are not complete, or a spare node takes the place of a lost one.
        """
        began = time.monotonic()
        lowered = error.lowered if isinstance(error, MemoryFullError) else None
        helpless = isinstance(error, MemoryFullError) and lowered is None
        if helpless or self._recoveries == MOST_RECOVERIES:
            raise error
        lost = [group for group in self._groups.all if not group.answer(HEALTH_SECONDS)]
        if not lost:
            raise error
        self._check_nodes(error)
        self._recoveries += 1
        self._lowered += [lowered] if lowered else []
        roles = " and ".join(group.role for group in lost)
        how = f" with {lowered}" if lowered else ""
        logger.warning("%s; the ranks of %s are started again%s", error, roles, how)
        before_restart()
        try:
            for group in lost:
                for rank in range(len(group)):
                    group.restart(rank)
            self._connect(lost)
            self._lower(self._groups.all)
            calls = [
                call
                for group in self._groups.trained
                for call in group.start(TrainedRole.restore, self.state.step, links(self._keepers, group))
            ]
            wait(calls, self._timeout)
        except TrainerError as failure:
            raise LostRankError(f"{error}; its copy in memory cannot be used: {failure}", failure.hint) from error
        logger.warning(
            "%s continued from the copies of step %d in memory after %.1f s",
            *(roles, self.state.step, time.monotonic() - began),
        )
        return self.state

    def _lower(self, groups: Sequence[WorkerGroup[TrainingRole]]) -> None:
        for lowered in self._lowered:
            calls = [call for group in groups for call in group.start(TrainingRole.lower, lowered)]
            wait(calls, self._timeout)

    def _copy(self, state: TrainingState) -> None:
        calls = []
        for group in self._groups.trained:
            kept = [task(TrainedRole.keep, state.step, link) for link in links(self._keepers, group)]
            calls += group.start_each(kept)
        wait(calls, self._timeout)
        if state.step > self.state.step:
            self._recoveries = 0
        self.state = state
        self._keepers.call(Keeper.keep_only, state.step)

    def _check_nodes(self, error: WorkerError) -> None:
        """Raises LostRankError if a node is lost and Ray has another one for it, `error` if it has none."""
        alive = {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]}
        used = {slot.node.id: slot.node.address for group in self._groups.all for slot in group.slots}
        gone = [address for id, address in used.items() if id not in alive]
        if gone and len(alive) < len(used):
            raise error
        if gone:
            raise LostRankError(f"{error}; {' and '.join(gone)} left the cluster", error.hint) from error


class Recovery:
    """Returns a run to its last finished step, from copies of the trained roles, after a worker failed."""

    def __init__(self, session: Session, steps: Step, progress: Progress) -> None:
        """Takes the first copies. Raises WorkerError."""
        self._session, self._steps, self._progress, self._phase = session, steps, progress, session.tracker.phase
        self._copies = Copies(session.workers.training, session.connect, progress.state)
        self._go_back = steps.snapshot()
        self._recoveries = 0  # since the last step that is recorded

    def copy(self, _step: int, metrics: Metrics) -> None:
        """Copies the state after a step."""
        with self._phase("copy"):
            self._copies.take(self._progress.state)
        self._go_back = self._steps.snapshot()
        metrics["trainer/recoveries"] = float(self._recoveries)
        self._recoveries = 0

    def recover(self, error: WorkerError) -> None:
        """Returns to the step of the copies. Raises as `Copies.restore` does."""
        with self._phase("recovery"):
            try:
                self._progress.return_to(self._copies.restore(error, self._session.saver.abandon))
            except LostRankError:
                self._progress.lose()
                raise
            self._go_back()
        if isinstance(error, MemoryFullError) and error.lowered is not None:
            self._progress.lower(error.lowered, self._progress.step + 1)
        self._recoveries += 1
