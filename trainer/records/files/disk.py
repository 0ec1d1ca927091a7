"""Explains why a file or directory cannot be written: its path, and what its disk lacks.

Libraries report a full disk in words of their own, which name neither: torch a failed check of inline_container.cc,
safetensors and Transformers the state of their buffers.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from trainer.errors import CheckpointError, TrainerError
from trainer.records.files.atomic import bytes_below, visible_name

_PROBE = bytes(2**20)
_FULL = (errno.ENOSPC, errno.EDQUOT)
HINT = "check free space and permissions of that directory"


@contextmanager
def writing(path: Path, size: int = 0) -> Iterator[None]:
    """For a block that writes about `size` bytes to `path`. Raises CheckpointError for an error of the disk."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:  # tokenizers raises no narrower class
        trouble = refusal(path, size)
        if trouble is None and not isinstance(error, OSError | SafetensorError):
            raise
        raise unwritable(path, trouble or str(error)) from error


def unwritable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{visible_name(path)}: cannot be written: {reason}", hint=HINT)


def refusal(path: Path, size: int = 0) -> str | None:
    """Why the disk of `path` cannot take about `size` bytes; None if it can."""
    place = next(parent for parent in (path, *path.parents) if parent.is_dir())
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(_PROBE)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        free = shutil.disk_usage(place).free
        missing = size - bytes_below(path) - free
        parts = [os.strerror(error.errno or 0)]
        if error.errno in _FULL:
            parts += [f"{_text(free)} are free"] + ([f"about {_text(missing)} are missing"] if missing > 0 else [])
        return ", ".join(parts)
    return None


def _text(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
