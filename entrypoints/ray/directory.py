"""This node's directory in /tmp: files of Ray and its workers, output of its programs, the note for `launch attach`.

Only its user can enter it. Ray makes its own directory writable by everybody, so that one lies below. Names are short,
as a socket's path has at most 107 bytes.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

PATTERN = "slipway-ray-*"
ROOT = Path("/tmp")
"""Not TMPDIR: Ray needs 64 of the 107 bytes for itself."""
_RAY = "r"
_TEMPORARY = "t"
_LOCK = "lock"
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in its place must not block


def directory_prefix(job_id: str, node_rank: int, chosen_port: int | None) -> str:
    """The prefix of the directories that this node creates for this job.

    Two jobs on the same hosts at the same time need different control ports, so the port tells them apart here too.
    """
    job = re.sub(r"\+\d+", "", job_id)  # equal for all starts of a requeued job, so that the next finds leftovers
    return f"{PATTERN.rstrip('*')}{hashlib.sha256(f'{job} {chosen_port}'.encode()).hexdigest()[:6]}-{node_rank}-"


class NodeDirectory:
    """A new directory for this launch, locked until this process ends."""

    def __init__(self, prefix: str, root: Path = ROOT) -> None:
        """Raises OSError if the root cannot be written."""
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))  # mode 0700
        self.ray = self.path / _RAY
        """The directory for Ray, which creates it."""
        self.temporary = self.path / _TEMPORARY
        """The directory for temporary files."""
        self.temporary.mkdir(mode=0o700)
        self._lock = os.open(self.path / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the directory. Raises OSError."""
        os.close(self._lock)
        shutil.rmtree(self.path)


def in_use(directory: Path) -> bool:
    """Whether the launch that made this directory still lives. Another user's launch counts as alive."""
    try:
        with _opened(os.open(directory, _OPEN_DIRECTORY)) as handle:
            return _locked(handle)
    except PermissionError:
        return True
    except OSError:
        return False


def read_private(directory: Path, name: str, limit: int) -> bytes | None:
    """At most `limit` bytes of a file in the directory of a living launch.

    None unless directory and file belong to this user alone. Both are checked once open and no link is followed, so
    nobody can replace them between check and use.
    """
    try:
        with _opened(os.open(directory, _OPEN_DIRECTORY)) as handle:
            if not (_is_private(handle, stat.S_ISDIR) and _locked(handle)):
                return None
            with _opened(os.open(name, _OPEN_FILE, dir_fd=handle)) as file:
                return os.read(file, limit) if _is_private(file, stat.S_ISREG) else None
    except OSError:
        return None


@contextlib.contextmanager
def _opened(handle: int) -> Iterator[int]:
    try:
        yield handle
    finally:
        os.close(handle)


def _is_private(handle: int, is_kind: Callable[[int], bool]) -> bool:
    status = os.fstat(handle)
    return is_kind(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _locked(directory: int) -> bool:
    with _opened(os.open(_LOCK, _OPEN_FILE, dir_fd=directory)) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
