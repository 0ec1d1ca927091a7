"""Right programs, which a sandbox must not disturb; in real sandboxes."""

import subprocess
import sys

import pytest

from tests.trainer.rewards.sandbox.machines import Machine, answer

PROGRAMS = {
    "imports": "import fractions, decimal, queue, uuid, zlib, hashlib, lzma; print(fractions.Fraction(1, 2))",
    "exit": "import sys; print('1/2'); sys.exit(0)",
    "threads": """
import threading, sys
sys.setrecursionlimit(10**6); threading.stack_size(2**26)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
thread = threading.Thread(target=lambda: print(f"{depth(10**4) // 10**4}/2")); thread.start(); thread.join()
""",
    "threads that nobody waits for": """
import threading, time
threading.Thread(target=lambda: (time.sleep(0.2), print("1/2"))).start()
""",
    "an executor that nobody ends": """
from concurrent.futures import ThreadPoolExecutor
ThreadPoolExecutor(8).submit(print, "1/2")
""",
    "exit functions": """
import atexit, io, sys
sys.stdout = io.StringIO()
atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))
print("1/2")
""",
    "an executor": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as threads:
    print(f"{sum(threads.map(int, '10'))}/2")
""",
    "asyncio": "import asyncio; print(asyncio.run(asyncio.to_thread(lambda: '1/2')))",
    "timers": """
import signal, time
signal.signal(signal.SIGALRM, lambda *_: print("1/2")); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.1)
""",
    "a pipe": "import os; r, w = os.pipe(); os.write(w, b'1/2'); print(os.read(r, 9).decode())",
    "its own signals": "import signal; signal.signal(10, lambda *_: print('1/2')); signal.raise_signal(10)",
    "the clock": "import time, datetime; time.localtime(); datetime.datetime.now().astimezone(); print('1/2')",
    "chance": "import random, secrets, os; secrets.token_hex(); os.urandom(8); random.random(); print('1/2')",
    "a database in memory": "import sqlite3; print(*sqlite3.connect(':memory:').execute(\"select '1/2'\").fetchone())",
    "the null device for reading": "open('/dev/null').read(); print('1/2')",
}
FILES = {
    "files": "open('a', 'w').write('1/2'); print(open('a').read())",
    "folders": """
import os
os.makedirs("a/b"); open("a/b/c", "w").close(); os.rename("a/b/c", "d"); os.rmdir("a/b"); print("1/2")
""",
    "temporary files": """
import tempfile, shutil
with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as file, tempfile.NamedTemporaryFile() as named:
    file.write(b"1/2"); file.seek(0); shutil.copyfile(named.name, folder + "/copy"); print(file.read().decode())
""",
    "a database": """
import sqlite3
with sqlite3.connect("a.db") as base:
    base.execute("create table t (x)"); base.execute("insert into t values ('1/2')")
print(sqlite3.connect("a.db").execute("select x from t").fetchone()[0])
""",
    "home": "import pathlib; (pathlib.Path.home() / 'x').write_text('1/2'); print(open('x').read())",
    "the null device": "open('/dev/null', 'w').write('1'); print('1/2')",
}
READERS = [
    "print(input())",
    "import sys; print(sys.stdin.read())",
    "print(open(0).read())",
    "print(open('/dev/stdin').read())",
    "import os; print(os.read(0, os.fstat(0).st_size).decode())",
    "import sys; sys.stdin.seek(0); print(*sys.stdin.buffer.readlines()[0].decode())",
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_may_use(machine: Machine, name: str) -> None:
    ended = machine.run(PROGRAMS[name], seconds=20)
    assert (ended.stdout, ended.error) == ("1/2\n", ""), ended


@pytest.mark.parametrize("name", FILES)
def test_programs_have_a_folder_where_it_is_safe(machine: Machine, name: str) -> None:
    ended = machine.run(FILES[name], seconds=20)
    if machine.writes_files:
        assert (ended.stdout, ended.error) == ("1/2\n", ""), ended
    else:
        assert "Error" in ended.stderr


@pytest.mark.parametrize("program", READERS)
def test_standard_input_is_read_in_every_way(machine: Machine, program: str) -> None:
    (output,) = machine.outputs(program, ["a b"], seconds=20)
    assert output is not None
    assert output.replace(" ", "").strip() == "ab"


def test_installed_packages_can_be_imported(machine: Machine) -> None:
    pytest.importorskip("numpy")
    if machine.python != sys.executable:
        pytest.skip("the user of this machine cannot read this Python")
    ended = machine.run("import numpy; print(int(numpy.linalg.det(numpy.eye(3))))", seconds=60)
    assert ended.stdout == "1\n", ended


def test_python_below_a_folder_that_others_cannot_enter(machine: Machine) -> None:
    """An environment of root alone; where nothing but the user could hide root's files, programs do not run."""
    if not machine.root:
        pytest.skip("its user is not root")
    private = machine.folder / "private-python"
    private.mkdir(mode=0o700)
    subprocess.run([machine.python, "-m", "venv", "--without-pip", private / "venv"], check=True)
    (packages,) = (private / "venv").glob("lib/*/site-packages")
    (packages / "lonely.py").write_text("value = '1/2'")
    python = str(private / "venv/bin/python")
    with machine.start(python=python) as client:
        result = answer(client, "run_program", program="import lonely; print(lonely.value)", limits={"seconds": 20})
        note = answer(client, "check")
    if machine.bubblewrap or machine.landlock:
        assert result == {"stdout": "1/2\n", "stderr": "", "error": ""}
        assert note.startswith("programs are confined by")
    else:
        assert f"no user but root can read Python in {private / 'venv'}" in result["raised"]
        assert note["raised"].startswith("ConfigError: the sandbox cannot run programs: ")
