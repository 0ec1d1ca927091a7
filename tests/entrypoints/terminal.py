"""`launch` in a terminal of its own, as a user has it."""

import os
import pty
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.entrypoints.conftest import PATIENCE, python_path


class Terminal:
    """The terminal of one `launch`, from the user's side; `status` is known once it is closed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.status: int | None = None

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def read_until(self, text: str | None) -> str:
        """The output up to this text, or until the other side closes."""
        seen = ""
        while text is None or text not in seen:
            readable, _, _ = select.select([self._descriptor], [], [], PATIENCE)
            assert readable, f"nothing more after {seen!r}"
            try:
                seen += os.read(self._descriptor, 1024).decode()
            except OSError:  # the other side is closed
                break
        return seen


@contextmanager
def launch_in_terminal(directory: Path, *arguments: str) -> Iterator[Terminal]:
    """Starts a launch in this directory. The end of the block hangs up, which ends it if it still runs."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.chdir(directory)
        os.environ["PYTHONPATH"] = python_path(directory)
        os.execv(sys.executable, [sys.executable, "-m", "entrypoints", *arguments])
    terminal = Terminal(descriptor)
    try:
        yield terminal
    finally:
        os.close(descriptor)
        terminal.status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
