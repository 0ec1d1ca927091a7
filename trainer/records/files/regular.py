"""Reads files of an untrusted directory: opens regular files only."""

import errno
import os
import stat
from pathlib import Path

# A pipe in place of a file must not block, and a link must not lead elsewhere.
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_regular(file: Path, most: int) -> bytes:
    """The content of a file with at most `most` bytes.

    Raises OSError, also if it is larger, a link, a pipe or a device.
    """
    with os.fdopen(open_regular(file), "rb") as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise OSError(f"{file} is larger than {most} bytes")
    return content


def open_regular(file: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file. Raises OSError, also if it is a link, a pipe or a device."""
    try:
        descriptor = os.open(file, flags | _OPEN, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise OSError(f"{file} is not a regular file") from error
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(f"{file} is not a regular file")


def regular_files(directory: Path) -> dict[str, int]:
    """The size of each file below a directory, by its path there.

    Raises OSError, also if there is a link, a pipe or a device: whoever reads by name would follow it.
    """
    sizes = {}
    for folder, folders, names in os.walk(directory):
        for name in (*folders, *names):
            path = Path(folder, name)
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                sizes[str(path.relative_to(directory))] = status.st_size
            elif not stat.S_ISDIR(status.st_mode):
                raise OSError(f"{path} is a link, a pipe or a device")
    return dict(sorted(sizes.items()))
