"""Watchdogs: detect slow failures in the metrics of the last steps, before the next update."""

import logging
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import psutil

from trainer.config.sections.watchdogs import Watchdog, WatchdogsConfig
from trainer.errors import WatchdogError
from trainer.runs.checkpoints.manifest import TrainingState
from trainer.runs.session import Session

logger = logging.getLogger(__name__)

# From mild to severe; of several alarms the most severe one decides.
SEVERITY = ("off", "log", "skip", "roll_back", "stop")


@dataclass(frozen=True)
class Alarm:
    """A watchdog's finding about a metric of the last `steps` steps, and the action from its settings."""

    name: str
    action: str
    message: str
    metric: str = ""
    steps: int = 1


@dataclass(frozen=True)
class Kind:
    """The metric of a watchdog, the measure of its last values, and whether a low measure is bad.

    `of_processes`: the values say nothing of a run that is resumed, whose processes are new, and perhaps its nodes.
    """

    metric: str
    measure: Callable[[Sequence[float]], float]
    meaning: str
    low_is_bad: bool = False
    of_processes: bool = False


def last(values: Sequence[float]) -> float:
    return values[-1]


def growth(values: Sequence[float]) -> float:
    """Slope of the least-squares line through the values, per step."""
    return statistics.linear_regression(range(len(values)), values).slope


KINDS: dict[str, Kind] = {
    "reward_deviation": Kind("reward/mean", statistics.pstdev, "standard deviation of the mean reward"),
    "kl": Kind("reference/kl", last, "KL to the reference per token"),
    "entropy": Kind("actor/entropy", last, "entropy per token", low_is_bad=True),
    "ratio_drift": Kind("rollout/ratio_outside_tenth", last, "share of tokens that engine and trainer disagree about"),
    "memory_growth": Kind(
        "memory/node_gib", growth, "GiB that the node's memory in use grows by in a step", of_processes=True
    ),
}


class Watchdogs:
    """The watchdogs of a run; remembers the metrics of the last steps."""

    def __init__(self, settings: WatchdogsConfig) -> None:
        self._settings: dict[str, Watchdog] = {name: getattr(settings, name) for name in KINDS}
        self._seen: dict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=max(w.window for w in self._settings.values()))
        )

    def look(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """The alarms after one more step's metrics. A watchdog is silent until its window is full."""
        for metric in {kind.metric for kind in KINDS.values()} & metrics.keys():
            self._seen[metric].append(metrics[metric])
        alarms = [self._alarm(name, kind) for name, kind in KINDS.items() if kind.metric in metrics]
        return [alarm for alarm in alarms if alarm is not None]

    @property
    def lag(self) -> int | None:
        """How many steps the first faulty weights may be older than the newest checkpoint when the run rolls back; None
        if no watchdog rolls back."""
        named = [(kind, self._settings[name]) for name, kind in KINDS.items()]
        lags = [
            1 if kind.measure is last else settings.window for kind, settings in named if settings.action == "roll_back"
        ]
        return max(lags, default=None)

    def seen(self) -> dict[str, list[float]]:
        """The values of the last steps by metric, as a resumed run needs them."""
        kept = {kind.metric for kind in KINDS.values() if not kind.of_processes}
        return {metric: list(values) for metric, values in self._seen.items() if metric in kept}

    def recall(self, seen: Mapping[str, Sequence[float | None]]) -> None:
        """Continues from these values; None is one that was not finite."""
        for metric, values in seen.items():
            self._seen[metric].extend(math.nan if value is None else value for value in values)

    def forget(self) -> None:
        """Forgets all steps, for example after a roll-back."""
        self._seen.clear()

    def _alarm(self, name: str, kind: Kind) -> Alarm | None:
        settings = self._settings[name]
        values = list(self._seen[kind.metric])[-settings.window :]
        if settings.action == "off" or len(values) < settings.window:
            return None
        value = kind.measure(values)
        # A measure that is NaN raises an alarm, too.
        fine = value >= settings.threshold if kind.low_is_bad else value <= settings.threshold
        if fine:
            return None
        side = "below" if kind.low_is_bad else "above"
        window = f" over {settings.window} steps" if settings.window > 1 else ""
        message = f"{kind.meaning}{window} is {value:.4g}, {side} {settings.threshold:g}"
        return Alarm(name, settings.action, message, kind.metric, 1 if kind.measure is last else len(values))


def most_severe(alarms: Sequence[Alarm]) -> str:
    """The most severe action of the alarms; `off` without alarms."""
    return max((alarm.action for alarm in alarms), key=SEVERITY.index, default="off")


class UpdateGuard:
    """Decides before each update whether the watchdogs allow it, and rolls the weights back if one demands that."""

    def __init__(self, session: Session, settings: WatchdogsConfig) -> None:
        self._session, self._saver, self._watchdogs = session, session.saver, Watchdogs(settings)
        self._after_update: dict[str, float] = {}  # metrics of the last update, not yet seen
        if (lag := self._watchdogs.lag) is not None:
            self._saver.keep_for_roll_backs(lag)

    def allows(self, step: int, metrics: dict[str, float]) -> bool:
        """Whether the watchdogs allow an update. They see this step's metrics and those of the last update; the alarms
        are added to `metrics`.

        Raises WatchdogError if one demands a stop.
        """
        metrics["memory/node_gib"] = psutil.virtual_memory().used / 2**30
        alarms = self._watchdogs.look(self._after_update | metrics)
        # Sampled metrics measure the weights of the previous step, those of its update perhaps the weights before it.
        newest = {name: step - (1 if name in metrics else 2) for name in (*self._after_update, *metrics)}
        self._after_update = {}
        for alarm in alarms:
            metrics[f"watchdog/{alarm.name}"] = 1.0
            logger.warning("watchdog %s (%s): %s", alarm.name, alarm.action, alarm.message)
        action = most_severe(alarms)
        if action == "stop":
            alarm = next(alarm for alarm in alarms if alarm.action == "stop")
            raise WatchdogError(
                f"watchdog {alarm.name}: {alarm.message}",
                hint=f"look at the curves, or set watchdogs.{alarm.name}.action=log to continue regardless",
            )
        if action == "roll_back":
            faults = [alarm for alarm in alarms if alarm.action == "roll_back"]
            self._roll_back(min(newest[alarm.metric] - (alarm.steps - 1) for alarm in faults))
        return action not in ("skip", "roll_back")

    def updated(self, metrics: Mapping[str, float]) -> None:
        """Keeps what an update measured for the next step."""
        self._after_update = {name: metrics[name] for name in ("actor/entropy", "reference/kl") if name in metrics}

    def _roll_back(self, faulty: int) -> None:
        """Loads the weights of the last checkpoint before step `faulty`, the first whose weights may be at fault."""
        with self._session.tracker.phase("save"):
            self._saver.settle()
        checkpoint = self._saver.before(faulty)
        if checkpoint is None:
            logger.warning("no checkpoint from before step %d to roll back to: only the update is skipped", faulty)
            return
        logger.warning("rolled back to the weights of %s, from before step %d", checkpoint, faulty)
        self._session.load_weights(checkpoint)
        self._watchdogs.forget()
        self._saver.schedule.retry(0.0)  # so that the newest checkpoint is not the faulty one

    def state(self) -> dict[str, Any]:
        """Fields of TrainingState."""
        return {"watched": self._watchdogs.seen(), "after_update": dict(self._after_update)}

    def resume(self, state: TrainingState) -> None:
        """Continues from the state of a checkpoint."""
        self._watchdogs.recall(state.watched)
        self._after_update = {name: math.nan if value is None else value for name, value in state.after_update.items()}

    def snapshot(self) -> Callable[[], None]:
        """A function that returns to the present state."""
        kept = deepcopy((self._watchdogs, self._after_update))

        def go_back() -> None:
            self._watchdogs, self._after_update = deepcopy(kept)

        return go_back
