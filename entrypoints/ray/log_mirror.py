"""Ray's logs, copied to a folder that outlives this node while the job runs."""

import logging
from pathlib import Path

log = logging.getLogger(__name__)


class LogMirror:
    """Copies what was appended to the files below `source` into the same files below `target`."""

    def __init__(self, source: Path, target: Path) -> None:
        self._source, self._target = source, target
        self._copied: dict[Path, int] = {}
        """Bytes of each file that `target` has."""
        self._failed = False

    def update(self) -> None:
        """Copy the new bytes. A folder that cannot be written is logged once."""
        try:
            for path in self._source.rglob("*"):
                if path.is_file() and not path.is_symlink():
                    self._copy(path, self._target / path.relative_to(self._source))
        except OSError as error:
            if not self._failed:
                log.warning("cannot keep Ray's logs in %s: %s", self._target, error)
            self._failed = True

    def _copy(self, path: Path, copy: Path) -> None:
        start, size = self._copied.get(path, 0), path.stat().st_size
        if size == start:
            return
        if size < start:  # it was rotated
            start = 0
        copy.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as source, copy.open("ab" if start else "wb") as target:
            source.seek(start)
            self._copied[path] = start + target.write(source.read())
