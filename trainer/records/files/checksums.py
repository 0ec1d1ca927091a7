"""The SHA-256 of files."""

import hashlib
import stat
import threading
from concurrent.futures import Future
from pathlib import Path

# Device, inode, size and times, which change with the content.
_Key = tuple[int, int, int, int, int]
_lock = threading.Lock()
_sums: dict[_Key, Future[str]] = {}


def sha256(file: Path) -> str:
    """The SHA-256 of a regular file, in hexadecimal. A file that did not change is read once per process.

    Raises OSError, also for a pipe or a device, which might never end.
    """
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{file} is not a regular file")
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    with _lock:
        known = _sums.get(key)
        result: Future[str] = _sums.setdefault(key, Future())
    if known is None:
        try:
            with file.open("rb") as opened:
                result.set_result(hashlib.file_digest(opened, "sha256").hexdigest())
        except OSError as error:
            with _lock:
                del _sums[key]
            result.set_exception(error)
    return result.result()
