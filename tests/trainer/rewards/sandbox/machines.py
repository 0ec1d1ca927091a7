"""Sandboxes as on other machines: another user, no bubblewrap, a kernel without Landlock.

An old kernel is this one behind a filter that answers Landlock's first call as an old one does.
"""

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trainer
from trainer.rewards.sandbox.programs import Ended

ROOT = Path(trainer.__file__).parent.parent
_CODE = (
    *("trainer/__init__.py", "trainer/api.py", "trainer/errors.py", "trainer/packages.py"),
    *("trainer/rewards/__init__.py", "trainer/rewards/sandbox"),
)
_USER = 12345
# A client of the sandbox, in a process of its own: calls on standard input, results on standard output.
_CLIENT = """
import json, os, sys
from trainer.rewards.sandbox import programs
for line in sys.stdin:
    name, arguments = json.loads(line)
    if "limits" in arguments:
        arguments["limits"] = programs.Limits(**arguments["limits"])
    if "program" in arguments:
        arguments["program"] = arguments["program"].replace("CLIENT", str(os.getpid()))
    try:
        result = getattr(programs, name)(**arguments)
    except Exception as error:
        result = {"raised": f"{type(error).__name__}: {error}"}
    print(json.dumps(result, default=vars), flush=True)
"""


def answer(client: "subprocess.Popen[str]", name: str, **arguments: Any) -> Any:
    """What a client returns for a call."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(json.dumps([name, arguments]) + "\n")
    client.stdin.flush()
    return json.loads(client.stdout.readline())


@dataclass
class Machine:
    """Where a sandbox runs. `folder`, which its user owns, holds the code and is the place of temporary files."""

    bubblewrap: bool
    root: bool
    landlock: bool
    folder: Path = Path()
    _client: "subprocess.Popen[str] | None" = None

    def __str__(self) -> str:
        confined = "bubblewrap" if self.bubblewrap else "filter"
        return f"{confined}-{'root' if self.root else 'user'}{'' if self.landlock else '-old kernel'}"

    @property
    def reads_files(self) -> bool:
        """Whether programs can read the files of their user: nothing hides them."""
        return not (self.bubblewrap or self.root or self.landlock)

    @property
    def writes_files(self) -> bool:
        """Whether programs have a folder to write to."""
        return self.bubblewrap or self.landlock

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def close(self) -> None:
        if self._client is not None:
            self._client.communicate()

    def start(self, code: str = _CLIENT, python: str = "") -> "subprocess.Popen[str]":
        """A process on this machine that can import the sandbox."""
        return subprocess.Popen(
            [python or self.python, "-c", code],
            cwd=self.folder,
            env={
                "PATH": f"{self.folder}/bin" if not self.bubblewrap else os.environ["PATH"],
                "PYTHONPATH": str(self.folder),
                "TMPDIR": str(self.temporary),
                "SECRET_OF_THE_RUN": "hidden",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=self._enter,
        )

    @property
    def python(self) -> str:
        """This Python, or the system's where the sandbox's user cannot enter a folder above it."""
        alone = os.geteuid() != 0 or (self.root and (self.landlock or self.bubblewrap))
        return sys.executable if alone or is_open_to_all(Path(sys.prefix)) else "/usr/bin/python3"

    def call(self, name: str, **arguments: Any) -> Any:
        """The result of a function of `programs`, or {"raised": error}."""
        if self._client is None:
            self._client = self.start()
        return answer(self._client, name, **arguments)

    def run(self, program: str, **limits: float) -> Ended:
        """What a program wrote."""
        result = self.call("run_program", program=program, limits=limits)
        assert "raised" not in result, result
        return Ended(**result)

    def outputs(self, program: str, inputs: Sequence[str], **limits: float) -> list[str | None]:
        """The outputs of a program for each input."""
        results = self.call("run_tests", program=program, function=None, inputs=inputs, limits=limits)
        assert isinstance(results, list), results
        return results

    def _enter(self) -> None:
        """Becomes the user and, for an old kernel, hides Landlock. Runs between fork and exec."""
        if not self.root and os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(_USER, _USER, _USER)
            os.setresuid(_USER, _USER, _USER)
        if not self.landlock:
            library = ctypes.CDLL("libseccomp.so.2")
            library.seccomp_init.restype = ctypes.c_void_p
            context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(0x7FFF0000)))
            action = ctypes.c_uint32(0x00050000 | errno.ENOSYS)
            assert library.seccomp_rule_add_array(context, action, 444, 0, None) == 0
            assert library.seccomp_load(context) == 0


def is_open_to_all(folder: Path) -> bool:
    """Whether every user can enter it."""
    return all(path.stat().st_mode & 1 for path in (folder.resolve(), *folder.resolve().parents))


MACHINES = [
    Machine(bubblewrap, root, landlock)
    for bubblewrap in (True, False)
    for root in (True, False)
    for landlock in (True, False)
    if not root or os.geteuid() == 0
]


@contextmanager
def on(machine: Machine) -> Iterator[Machine]:
    """The machine with its folder, which is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="machine-"))
    try:
        for name in _CODE:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            copy: Callable[..., Any] = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
        (folder / "tmp").mkdir()
        (folder / "bin").mkdir()
        (folder / "bin" / "rm").symlink_to(shutil.which("rm") or "/bin/rm")
        folder.chmod(0o755)
        if not machine.root and os.geteuid() == 0:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, _USER, _USER, follow_symlinks=False)
        with closing(Machine(machine.bubblewrap, machine.root, machine.landlock, folder)) as opened:
            yield opened
    finally:
        shutil.rmtree(folder)
