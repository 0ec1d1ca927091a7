"""The cause in a program's output. The lines are those of Ray 2.60, gRPC and glibc."""

from pathlib import Path

from entrypoints.error_lines import cause, causes, error_lines, read_tail

START = """
2026-11-28 15:41:17,039	INFO scripts.py:1043 -- Local node IP: 192.0.2.2
2026-11-28 15:41:49,356	INFO node.py:438 -- Failed to get node info b'RPC error: Deadline Exceeded'
Traceback (most recent call last):
  File "ray/_private/node.py", line 440, in __init__
    raise Exception(
    ^^^^^^^^^^^^^^^^
Exception: The current node timed out during startup.
2026-11-28 15:41:51,000	INFO scripts.py:1147 -- Local node IP: 192.0.2.2
"""
RAYLET = """
[2026-11-28 15:41:20,692 I 29007 29007] (raylet) main.cc:283: no error
[2026-11-28 15:41:24,344 E 29007 29032] (raylet) agent_manager.cc:87: The raylet exited because one Ray agent failed.
The raylet fate shares with the agent.
[2026-11-28 15:41:35,771 C 29007 29007] (raylet) node_manager.cc:3588: Check failed: Timed out waiting for file
*** StackTrace Information ***
/ray/raylet(+0xff9d29) [0x55bbc94b5d29] ray::Error::Error()
[2026-11-28 15:51:18,026 E 4150 4150] (raylet) logging.cc:474:     @     0x7f306a45a050      16400  (unknown)
[state-dump] - num chunks received failed (all): 0
- The agent is killed by the OS (e.g., out of memory), or failed.
"""
OTHERS = """
E1128 15:41:24.159592778   28927 thd.cc:157]    pthread_create failed: Resource temporarily unavailable
terminate called after throwing an instance of 'std::system_error'
  what():  Resource temporarily unavailable
python: error while loading shared libraries: libfoo.so.1
2026-11-28 15:37:24,679	PANIC scripts.py:1204 -- `--x` should only be specified with `--head`.
KeyError
"""


def test_the_exception_is_the_cause_and_not_the_last_line() -> None:
    assert causes(START.splitlines()) == ["Exception: The current node timed out during startup."]


def test_errors_of_rays_processes_are_those_at_their_level() -> None:
    assert [line.partition(": ")[2] for line in error_lines(RAYLET.splitlines())] == [
        "The raylet exited because one Ray agent failed.",
        "Check failed: Timed out waiting for file",
    ]


def test_every_other_form_of_an_error_is_kept() -> None:
    lines = [line.strip() for line in OTHERS.splitlines() if line]
    assert error_lines(OTHERS.splitlines()) == lines


def test_an_exception_without_the_word_error_is_one_after_its_traceback() -> None:
    assert error_lines(["Traceback (most recent call last):", '  File "x"', "Empty: the queue", "bye"]) == [
        "Empty: the queue"
    ]


def test_without_any_error_the_last_line_is_all_there_is() -> None:
    assert causes(["starting", "half done", ""]) == ["half done"]
    assert causes(["", " "]) == []


def test_repeated_and_long_lines_are_short() -> None:
    lines = causes([f"error: {'x' * 10_000}"] * 3 + [f"error {number}" for number in range(100)])
    assert len(lines) == 10
    assert max(map(len, lines)) < 500


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "raylet.err").write_text("error: old\n" + "x" * 2**20 + "\nerror: new\n")
    assert error_lines(read_tail(tmp_path / "raylet.err")) == ["error: new"]
    assert read_tail(tmp_path / "none") == []


def test_the_first_error_line_is_the_cause_of_a_failed_call() -> None:
    failed = (
        'ray::Actor.measure() (pid=7, ip=192.0.2.2)\n  File "a.py", line 1\nRuntimeError: NCCL error\nLast error:\nx'
    )
    assert cause(failed, "RayError") == "RuntimeError: NCCL error"
    assert cause("", "RayError") == "RayError"
