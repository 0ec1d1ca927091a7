"""The Ray cluster of a run: an existing one, or one on this machine that ends with the run."""

import fcntl
import getpass
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private.utils import read_ray_address
from ray.exceptions import RayError

from trainer.background import ended_within
from trainer.cluster.ending import before_exit, disconnect, ray_hangs
from trainer.errors import TrainerError, WorkerError

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 20.0
REMOVAL_SECONDS = 30.0
LOGS = "ray-logs"
"""The folder in the directory of a failed run that gets Ray's logs."""
_PREFIX = "slipway-run-"
_LONGEST_PARENT = 20  # characters: Ray needs 64 of the 107 of a socket's path for itself
_MOST_LOGGED = 2**24  # bytes of a log that are kept, its end


@contextmanager
def connected(run_dir: Path | None = None) -> Iterator[None]:
    """Connects to the cluster at RAY_ADDRESS, else to one that `ray start` left here, else starts one on this machine.

    Nothing stays of a cluster that is started here, except for its logs in the directory of a run that fails. Raises
    WorkerError if Ray does not start, answer or go on.
    """
    if ray_hangs():
        raise WorkerError("Ray did not answer when this run disconnected from it")
    # The caller that waits reports a failed call. Ray would also report the calls that nobody waits for any more.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Of a cluster that is started here: as many calls as `ray list tasks` shows. Ray keeps 3 KiB of each of 100,000.
    os.environ.setdefault("RAY_task_events_max_num_task_in_gcs", "10000")
    address = os.environ.get("RAY_ADDRESS") or read_ray_address()
    with ExitStack() as stack:
        if address and address != "local":
            stack.callback(disconnect)
            _start(address)
        else:
            directory = stack.enter_context(_own_directory(run_dir))
            stack.callback(_end, directory)
            _start("local", directory)
        try:
            yield
        except RayError as error:
            first = str(error).partition("\n")[0]
            raise WorkerError(f"Ray failed: {type(error).__name__}: {first}", hint=_HINT) from error


_HINT = (
    "start the run with `launch`, or unset RAY_ADDRESS and run `ray stop` to use this machine alone; on a machine that "
    "is busy, try again"
)


def _start(address: str, directory: Path | None = None) -> None:
    """Connects to a cluster, or starts one whose files lie in this directory. Raises WorkerError."""
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    environment: dict[str, str] = {}
    if directory is not None:
        settings |= {"_temp_dir": str(directory / "r"), "include_dashboard": False}
        environment = _temporary_files(directory / "t")
    try:
        # Workers' output stays in their log files; their errors come back as exceptions.
        with _environment(environment), _without_hangups():
            ray.init(address, **settings)
    except Exception as error:  # Ray raises it as it is where its processes are slow to start
        place = "this machine" if directory else address
        raise WorkerError(f"cannot reach Ray at {place}: {error}", hint=_HINT) from error


def _temporary_files(directory: Path) -> dict[str, str]:
    """Variables for workers: their temporary files end with the run, what torch compiled stays where it is."""
    if "TMPDIR" in os.environ:
        return {}
    directory.mkdir()
    with suppress(KeyError, OSError):  # a user without a name
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        return {"TMPDIR": str(directory), "TORCHINDUCTOR_CACHE_DIR": str(compiled)} | _given("TORCHINDUCTOR_CACHE_DIR")
    return {"TMPDIR": str(directory)}


def _given(name: str) -> dict[str, str]:
    return {name: os.environ[name]} if name in os.environ else {}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for the processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


@contextmanager
def _without_hangups() -> Iterator[None]:
    """Processes that are started meanwhile outlive their terminal: the run saves with their help."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _own_directory(run_dir: Path | None) -> Iterator[Path]:
    """A directory that only this user enters and that ends with the block, as do those whose process was killed.

    Raises WorkerError.
    """
    parents = (os.environ.get("RAY_TMPDIR"), tempfile.gettempdir())
    parent = Path(next((path for path in parents if path and len(path) <= _LONGEST_PARENT), "/tmp"))
    try:
        _remove_abandoned(parent)
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = _locked(directory)
    except OSError as error:
        raise WorkerError(f"{parent}: no place for Ray's files: {error}", hint="set RAY_TMPDIR to another") from error
    try:
        yield directory
    except Exception as error:
        if run_dir is not None and (isinstance(error, WorkerError) or not isinstance(error, TrainerError)):
            _keep_logs(directory, run_dir / LOGS)
        raise
    finally:
        ended_within(REMOVAL_SECONDS, partial(shutil.rmtree, directory, ignore_errors=True), f"removal of {directory}")
        if lock is not None:
            os.close(lock)


def _locked(directory: Path) -> int | None:
    """A lock on a directory that lasts as long as this process; None if another process has it. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(parent: Path) -> None:
    """Removes the directories of this user's processes that were killed."""
    for left in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # of other users, or removed meanwhile
            if left.lstat().st_uid == os.getuid() and (lock := _locked(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)


def _keep_logs(directory: Path, target: Path) -> None:
    """Copies the non-empty logs of a session."""
    for logs in directory.glob("r/session_2*/logs"):
        kept = target / logs.parent.name
        with suppress(OSError):  # the run's disk may be what failed
            for file in sorted(logs.iterdir()):
                if file.is_file() and not file.is_symlink() and (size := file.stat().st_size):
                    kept.mkdir(parents=True, exist_ok=True)
                    with file.open("rb") as opened:
                        opened.seek(max(0, size - _MOST_LOGGED))
                        (kept / file.name).write_bytes(opened.read())
            logger.warning("Ray's logs of the failed run are in %s", kept)


def _end(directory: Path) -> None:
    """Ends the cluster whose files lie in this directory, within a time. What hangs is killed as this process ends."""
    disconnect(SHUTDOWN_SECONDS)
    if ray_hangs():
        before_exit(partial(_kill, directory))
    else:
        psutil.wait_procs(_kill(directory), REMOVAL_SECONDS)


def _kill(directory: Path) -> list[psutil.Process]:
    """Kills the processes that are left of the cluster whose files lie in this directory."""
    left: list[psutil.Process] = []
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if any(str(directory) in word for word in process.cmdline()):
                left += [process, *process.children(recursive=True)]
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    return left
