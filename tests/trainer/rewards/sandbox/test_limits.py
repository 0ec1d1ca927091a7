"""Programs that use too much, end badly or do not end, and what stays of them; in real sandboxes."""

import os
import signal
import time

import pytest

from tests.process_table import alive, descendants
from tests.trainer.rewards.sandbox.machines import Machine, answer
from trainer.rewards.sandbox.sandboxed import MOST_PRINTED, MOST_STORED, MOST_THREADS, MOST_WRITTEN

# A machine that is busy with other tests needs longer to start a program than to run one.
SECONDS = 20.0


def test_output_comes_from_descriptors_that_a_program_cannot_replace(machine: Machine) -> None:
    program = """
import os
print("printed", flush=True)
for name in ("output", "errors", "input", "../output", "/dev/stdout"):
    for replace in (os.unlink, os.mkdir, os.mkfifo, lambda name: os.symlink("/etc/passwd", name)):
        try:
            replace(name)
        except OSError:
            pass
os.dup2(os.open("/usr/bin/env", os.O_RDONLY), 1)
"""
    assert machine.run(program, seconds=SECONDS).stdout == "printed\n"


@pytest.mark.parametrize("ending", ["os.close(1); os.close(2)", "os.lseek(1, 10**9, 0)"])
def test_damaged_output_costs_the_program_alone(machine: Machine, ending: str) -> None:
    program = f"import os\nif input() == 'damage':\n    {ending}\nprint('printed')"
    damaged, good = machine.outputs(program, ["damage", "good"], seconds=SECONDS)
    assert damaged != "printed\n"
    assert good == "printed\n"


def test_standard_input_cannot_be_changed(machine: Machine) -> None:
    program = """
import os
for change in (lambda: os.write(0, b"x"), lambda: os.ftruncate(0, 0), lambda: open("/proc/self/fd/0", "w").write("x")):
    try:
        change()
        print("changed")
    except OSError:
        pass
print(input())
"""
    assert machine.outputs(program, ["given"], seconds=SECONDS) == ["given\n"]


def test_output_is_bounded_and_its_excess_is_an_error(machine: Machine) -> None:
    ended = machine.run(f"print('x' * {MOST_WRITTEN - 1}); print('y' * 100)", seconds=SECONDS)
    assert len(ended.stdout) == MOST_WRITTEN
    assert ended.error
    assert "File too large" in ended.stderr


def test_output_of_all_tests_is_bounded(machine: Machine) -> None:
    program = f"import os, sys\nsys.stdout.write(chr(0) * {MOST_WRITTEN})\nsys.stderr.write('x' * {MOST_WRITTEN})"
    outputs = machine.outputs(program, [""] * 10, seconds=SECONDS)
    full = MOST_PRINTED // (2 * 4 * -(-MOST_WRITTEN // 3))
    assert outputs == ["\0" * MOST_WRITTEN] * full + [None] * (10 - full)


@pytest.mark.parametrize(
    "program",
    [
        "bytearray(2 * 2**30)",
        "import mmap\nmmap.mmap(-1, 2 * 2**30)",
        "[open('/dev/null') for _ in range(100)]",
        "import os\n[os.pipe() for _ in range(100)]",
    ],
)
def test_memory_and_descriptors_are_bounded(machine: Machine, program: str) -> None:
    assert "Error" in machine.run(program, seconds=SECONDS, memory_mb=512).stderr


@pytest.mark.parametrize("memory_mb", [64, 128])
def test_little_memory_is_enough_for_a_small_program(machine: Machine, memory_mb: int) -> None:
    ended = machine.run("print('small')", seconds=SECONDS, memory_mb=memory_mb)
    assert (ended.stdout, ended.error) == ("small\n", "")


def test_a_program_inherits_nothing_but_its_input_and_output(machine: Machine) -> None:
    program = """
import os
for descriptor in range(64):
    try:
        os.fstat(descriptor)
        print(descriptor, end=" ")
    except OSError:
        pass
print("hidden" in str(os.environ))
"""
    assert machine.run(program, seconds=SECONDS).stdout == "0 1 2 False\n"


def test_lower_limits_of_the_run_stay(machine: Machine) -> None:
    client = machine.start(
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "from trainer.rewards.sandbox.programs import *\n"
        "print(run_program('import resource; print(resource.getrlimit(7))', Limits()).stdout)"
    )
    written, _ = client.communicate()
    assert written == "(40, 40)\n\n"


def test_threads_are_bounded(machine: Machine) -> None:
    program = """
import threading, time
threading.stack_size(2**16)
count = 0
try:
    for count in range(20_000):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError:  # no memory for one more: the limit of threads is below, and seen next
    pass
print(count, flush=True)
time.sleep(60)
"""
    assert machine.run(program, seconds=SECONDS).error == f"the program has more than {MOST_THREADS} threads"


@pytest.mark.parametrize(
    "program",
    [
        "for number in range(10**6): open(str(number), 'w').close()",
        "for number in range(10**3): open(str(number), 'wb').write(bytes(2**20))",
        "for number in range(5000): os.mkdir('a'); os.chdir('a')",
        "for number in range(50): os.mkdir('a' * 255); os.chdir('a' * 255)",
        "os.chdir('..'); [open(f'../{number}', 'w').close() for number in range(10**6)]",
        "for number in range(10**6): open(str(number), 'w').close(); os.rename('b', 'c'); os.rename('c', 'b')",
        "for number in range(10**5): os.makedirs(f'{number % 100}/{number}')",
    ],
)
def test_files_are_bounded_and_removed(machine: Machine, program: str) -> None:
    """Also for the next test of the same program."""
    attack = f"os.mkdir('b')\n    {program}\n    time.sleep(60)"
    program = f"import os, time\nif input() == 'attack':\n    {attack}\nprint(os.listdir())"
    outputs = machine.outputs(program, ["attack", "good"], seconds=SECONDS)
    assert outputs == [None, "[]\n"]
    assert list(machine.temporary.iterdir()) == []


HELD = {
    "a descriptor": "held.append(os.open('x', os.O_RDWR | os.O_CREAT))",
    "a descriptor of a file without a name": "held.append(os.open('.', os.O_RDWR | os.O_TMPFILE, 0o600))",
    "a map": "held.append(os.open('x', os.O_RDWR | os.O_CREAT)); libc.mmap(None, 4096, 1, 1, held[-1], 0)",
}


@pytest.mark.parametrize("by", HELD)
@pytest.mark.parametrize("remove", ["os.unlink('x')", "open('y', 'w').close(); os.rename('y', 'x')"])
def test_files_that_are_removed_and_held_count_as_well(machine: Machine, by: str, remove: str) -> None:
    if not machine.writes_files:
        pytest.skip("programs write no files")
    program = f"""
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
held = []
for number in range({3 * MOST_STORED // MOST_WRITTEN}):
    try:
        {HELD[by]}
        os.write(held[-1], bytes({MOST_WRITTEN}))
        {remove if "name" not in by else ""}
    except OSError:
        break
    if "map" in {by!r}:
        os.close(held.pop())
time.sleep(60)
"""
    assert f"{MOST_STORED // 2**20} MiB in files" in machine.run(program, seconds=SECONDS).error


def test_page_tables_are_bounded(machine: Machine) -> None:
    program = """
import ctypes, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
for gigabyte in range(1, 40_000):
    place = libc.mmap(gigabyte << 30, 4096, 3, 0x100022, -1, 0)
    if place not in (None, 2**64 - 1):
        ctypes.c_char.from_address(place).value = b"x"
time.sleep(60)
"""
    assert "of page tables" in machine.run(program, seconds=SECONDS).error


def test_a_program_keeps_its_first_thread(machine: Machine) -> None:
    """Its files, threads and memory are counted there."""
    program = """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
"""
    assert "lost its first thread" in machine.run(program, seconds=SECONDS).error


def test_space_is_taken_by_writing_alone(machine: Machine) -> None:
    """`fallocate` would take gigabytes between two counts."""
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
try:
    with open("x", "w+b") as file:
        print(libc.fallocate(file.fileno(), 0, ctypes.c_long(0), ctypes.c_long(2**20)))
        os.posix_fallocate(file.fileno(), 0, 2**20)
        print(os.stat("x").st_size)
except PermissionError:
    print(-1)
    print(2**20)
"""
    assert machine.run(program, seconds=SECONDS).stdout == f"-1\n{2**20}\n"


def test_a_file_is_bounded(machine: Machine) -> None:
    ended = machine.run(
        f"open('big', 'wb', buffering=0).write(bytes({MOST_WRITTEN}))\nopen('big', 'ab', buffering=0).write(b'x')",
        seconds=SECONDS,
    )
    assert ("File too large" if machine.writes_files else "PermissionError") in ended.stderr


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGXCPU, signal.SIG_IGN); time.sleep(60)",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "threading.Thread(target=time.sleep, args=(60,)).start(); sys.exit()",
    ],
)
def test_a_program_that_does_not_end_costs_its_own_time_only(machine: Machine, program: str) -> None:
    program = f"import os, signal, threading, time\nif input() == 'attack':\n    {program}\nprint('good')"
    started = time.monotonic()
    assert machine.outputs(program, ["good", "attack", "good"], seconds=2.0) == ["good\n", None, "good\n"]
    assert time.monotonic() - started < SECONDS


def test_nothing_outlives_a_client_that_is_killed(machine: Machine) -> None:
    program = "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nprint(time.sleep(60))"
    client = machine.start(
        f"from trainer.rewards.sandbox.programs import *\nprint(run_program({program!r}, Limits({SECONDS * 3})))"
    )
    deadline = time.monotonic() + SECONDS
    while len(below := descendants(client.pid)) < 2 + machine.bubblewrap or time.monotonic() < deadline - SECONDS + 2:
        assert time.monotonic() < deadline, below
        time.sleep(0.05)
    os.kill(client.pid, signal.SIGKILL)
    client.communicate()
    while any(map(alive, below)):
        assert time.monotonic() < deadline, list(map(alive, below))
        time.sleep(0.05)


def test_a_later_run_removes_the_folders_of_killed_ones_alone(machine: Machine) -> None:
    program = "import time\nprint(time.sleep(60))"
    code = f"from trainer.rewards.sandbox.programs import *\nprint(run_program({program!r}, Limits({SECONDS * 3})))"
    started = [machine.start(code) for _ in range(2)]
    deadline = time.monotonic() + SECONDS
    folders = 0 if machine.bubblewrap else len(started)
    while len(list(machine.temporary.iterdir())) < folders or not all(descendants(client.pid) for client in started):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    victim, living = started
    below = descendants(victim.pid)
    os.kill(victim.pid, signal.SIGKILL)
    victim.communicate()
    while any(map(alive, below)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    foreign = [machine.temporary / "slipway-sandbox-file", machine.temporary / "slipway-sandbox-link"]
    foreign[0].write_text("x")
    foreign[1].symlink_to("/etc")
    with machine.start() as client:
        assert answer(client, "run_program", program="print(1)", limits={"seconds": SECONDS})["stdout"] == "1\n"
    assert len(list(machine.temporary.iterdir())) == bool(folders) + len(foreign)
    for path in foreign:
        path.unlink()
    living.kill()
    living.communicate()
    with machine.start() as client:
        answer(client, "run_program", program="print(1)", limits={"seconds": SECONDS})
    assert list(machine.temporary.iterdir()) == []


def test_a_program_that_breaks_its_sandbox_off_is_no_wrong_answer(machine: Machine) -> None:
    """A sandbox that cannot start raises, so that the response counts as failed instead of wrong."""
    result = machine.call("run_program", program="1", limits={"memory_mb": 2**60})
    assert set(result) == {"raised"}
    assert result["raised"].startswith("SandboxError: the sandbox cannot run programs: ")
