"""Typed calls to workers: starting them, awaiting results, and reporting the root cause of failures."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from trainer.cluster.stalls.explanation import Asked
from trainer.cluster.stalls.watch import Watch
from trainer.cluster.timeline import Answering, Device, Timeline
from trainer.config.sections.trainer import TrainerConfig
from trainer.errors import NoAnswerError, TrainerError, WorkerError

# How long to look for the root cause after a first failure: when a rank dies, the collectives of the others fail, too.
CAUSE_SECONDS = 3.0

# Of the run that this process controls.
_watch = Watch()
_timeline: Timeline | None = None

LOG_HINT = (
    "see worker-*.err in ray-logs/ of the run's directory, or in logs/ of that node's Ray session directory; running "
    "out of memory is the usual cause"
)

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
W = TypeVar("W")
W_contra = TypeVar("W_contra", contravariant=True)


@dataclass(frozen=True)
class Task(Generic[W_contra, R_co]):
    """A method for a worker of type W to run, with its arguments; the result is an R."""

    method: str
    arguments: tuple[Any, ...] | ObjectRef
    keywords: Mapping[str, Any]

    def stored(self) -> "Task[W_contra, R_co]":
        """The same task, whose arguments are sent to each node once for any number of workers."""
        return replace(self, arguments=ray.put(self.arguments))


def task(method: Callable[Concatenate[W, P], R], *arguments: P.args, **keywords: P.kwargs) -> Task[W, R]:
    """A task from a method of the worker's class or interface: `task(Scorer.score, answers)`.

    The type checker compares the arguments with the method's signature. Only the method's name is sent, so the
    caller need not import the class that implements it.
    """
    return Task(method.__name__, arguments, keywords)


@dataclass(frozen=True)
class Call(Generic[R_co]):
    """A task that a worker runs on its device since the time `begun`. `started` is the result of that worker's
    start."""

    asked: Asked
    result: ObjectRef
    started: ObjectRef
    device: Device = ("", 0)
    begun: float = field(default_factory=time.monotonic)

    @property
    def worker(self) -> str:
        return self.asked.worker

    @property
    def method(self) -> str:
        return self.asked.method


def wait(calls: Sequence[Call[R]], timeout: float) -> list[R]:
    """The results of the calls, in their order. The first failure ends the wait.

    Raises WorkerError, naming worker and node, if a worker dies, fails or does not answer within `timeout` seconds:
    NoAnswerError. A TrainerError of a worker is raised as it is.
    """
    results: dict[ObjectRef, R] = {}
    timeout = _watch.limit(_kind(calls), timeout)
    for call in _as_they_end(calls, timeout):
        try:
            results[call.result] = ray.get(call.result)
        except RayError as error:
            others = [other for other in calls if other is not call and other.result not in results]
            raise _explain(call, error, others) from error
    if missing := [call for call in calls if call.result not in results]:
        raise _no_answer(missing, timeout, [call.asked for call in calls if call.result in results])
    return [results[call.result] for call in calls]


def wait_while(calls: Sequence[Call[R]], timeout: float, progress: Callable[[], int]) -> list[R]:
    """`wait`, whose time starts again as long as `progress()` grows."""
    reached = progress()
    while True:
        try:
            return wait(calls, timeout)
        except NoAnswerError:
            before, reached = reached, progress()
            if reached <= before:
                raise


def outcomes(calls: Sequence[Call[R]], timeout: float) -> Iterator[tuple[Call[R], R | TrainerError]]:
    """Each call with its result, or the error that `wait` would raise for it, as soon as it has ended."""
    unanswered = dict.fromkeys(calls)
    timeout = _watch.limit(_kind(calls), timeout)
    for call in _as_they_end(calls, timeout):
        del unanswered[call]
        yield call, _outcome(call)
    if unanswered:
        missing = _no_answer(list(unanswered), timeout)
        for call in unanswered:
            yield call, missing


def _as_they_end(calls: Sequence[Call[R]], timeout: float, watched: bool = True) -> Iterator[Call[R]]:
    """The calls that end within `timeout` seconds, each as soon as it has: results are unpacked while others run.

    If they are `watched`, a stall is explained.
    """
    begin = time.monotonic()
    pending = {call.result: call for call in calls}
    kind, taken = _kind(calls), dict[str, float]()
    alarm = _watch.seconds(kind, timeout) if watched else timeout
    ready = alarm / 2
    with _watch.waiting(), _recorded(calls) as answering:
        while pending:
            limit = min(ready, alarm, timeout) if watched else timeout
            ended, _ = ray.wait(list(pending), timeout=max(0.0, begin + limit - time.monotonic()))
            if ended:
                call = pending.pop(ended[0])
                answering[ended[0]].ended = now = time.monotonic()
                taken[call.worker] = now - begin
                yield call
            elif limit == timeout:
                return
            elif limit < alarm:
                _watch.prepare([call.asked for call in calls])
                ready = timeout
            else:
                over = [call.asked for call in calls if call.result not in pending]
                _watch.stalled([call.asked for call in pending.values()], alarm, over)
                alarm = timeout
    _watch.learn(kind, time.monotonic() - begin, [call.asked for call in calls] if watched else [])
    if watched and calls:
        _watch.compare(calls[0].method, taken)


def _kind(calls: Sequence[Call[R]]) -> str:
    return f"{calls[0].worker.split()[0]} {calls[0].method}" if calls else ""


@contextmanager
def _recorded(calls: Sequence[Call[R]]) -> Iterator[Mapping[ObjectRef, Answering]]:
    """The calls in the timeline, until this process no longer waits for them."""
    answering = {
        call.result: Answering(call.worker, str(call.started), call.device, call.method, call.begun) for call in calls
    }
    if _timeline is not None:
        _timeline.add(answering.values())
    try:
        yield answering
    finally:
        now = time.monotonic()
        for answering_call in answering.values():
            answering_call.ended = answering_call.ended or now


@contextmanager
def recorded(timeline: Timeline) -> Iterator[None]:
    """Records the calls of this process in a timeline."""
    global _timeline
    before, _timeline = _timeline, timeline
    try:
        yield
    finally:
        _timeline = before


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Replaces what watches the calls of this process."""
    global _watch
    before, _watch = _watch, watch
    try:
        yield
    finally:
        _watch = before


@contextmanager
def stalls_explained(settings: TrainerConfig, run_dir: Path) -> Iterator[None]:
    """Explains in the log and in the run's directory when calls to workers, or this process, make no progress."""
    watch = Watch(settings.stall_seconds, ends=settings.on_stall == "end", run_dir=run_dir)
    with watched(watch), watch.controller(settings.worker_timeout):
        yield


def _outcome(call: Call[R]) -> R | TrainerError:
    try:
        result: R = ray.get(call.result)
    except RayError as error:
        return _explain(call, error, [])
    return result


def _no_answer(missing: Sequence[Call[object]], seconds: float, ended: Sequence[Asked] = ()) -> NoAnswerError:
    names, method = ", ".join(call.worker for call in missing), missing[0].method
    lines = _watch.over([call.asked for call in missing], seconds, ended).lines
    return NoAnswerError(
        f"{names}: no answer to {method} within {seconds:g} s: {'; '.join(lines)}",
        hint=_watch.hint
        or "check that the node still answers, or raise trainer.worker_timeout if the work takes that long",
    )


def _explain(call: Call[object], error: RayError, others: Sequence[Call[object]]) -> TrainerError:
    """The root cause as an error for the user: a failed start first, then a dead worker, then the call that failed."""
    start = Call[None](replace(call.asked, method="start"), call.started, call.started)
    if (at_start := _failure(start)) is not None:
        call, error = start, at_start
    if isinstance(error, RayTaskError) and isinstance(error.cause, TrainerError):
        return error.cause
    if not isinstance(error, RayActorError):
        for other in _as_they_end(others, CAUSE_SECONDS, watched=False):
            if isinstance(death := _failure(other), RayActorError):
                call, error = other, death
                break
    if isinstance(error, RayActorError):
        return WorkerError(f"{call.worker} died during {call.method}", hint=LOG_HINT)
    cause = error.cause if isinstance(error, RayTaskError) else error
    return WorkerError(f"{call.worker} failed in {call.method}: {type(cause).__name__}: {cause}", hint=LOG_HINT)


def _failure(call: Call[object]) -> RayError | None:
    """How a call has failed; None if it runs or has succeeded."""
    try:
        ray.get(call.result, timeout=0)
    except GetTimeoutError:
        return None
    except RayError as error:
        return error
    return None
