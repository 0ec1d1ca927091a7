"""How a container behaves: users, read-only roots, signals and exit codes."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from docker.models.containers import Container

TMP = {"/tmp": "rw,exec,size=1g"}
ANYWHERE = "--no-preflight"  # the image of a GPU may be looked at on a host without one

Start = Callable[..., Container]


def finish(container: Container, timeout: int = 60) -> tuple[int, str]:
    status = container.wait(timeout=timeout)["StatusCode"]
    return status, container.logs().decode()


@pytest.mark.parametrize(("script", "expected"), [("exit 7", 7), ("kill -TERM $$", 143)])
def test_exit_code_passes_through(start: Start, script: str, expected: int) -> None:
    status, output = finish(start("--no-ray", "--", "sh", "-c", script))
    assert status == expected, output


def test_no_command_is_a_usage_error_with_a_hint(start: Start) -> None:
    status, output = finish(start())
    assert status == 2
    assert "hint:" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("words", "status", "output"),
    [
        (["bash", "-c", "echo $0 $$"], 0, "bash"),
        (["python", "-c", "import sys, trainer.config.tree; sys.exit(5)"], 5, ""),
        (["python3", "-m", "verl.trainer.main_ppo", "trainer.val_onli=True"], 2, "there is no such setting"),
        (["python3", "-m", "recipe.dapo.main_dapo", "trainer.val_onli=True"], 2, "there is no such setting"),
        (["test", "-f", "verl/trainer/runtime_env.yaml"], 0, ""),
        (["python3", "examples/data_preprocess/gsm8k.py", "--help"], 0, "--local_dir"),
        (["trian"], 2, "did you mean `launch train`?"),
    ],
)
def test_a_program_is_run_as_in_any_other_image(start: Start, words: list[str], status: int, output: str) -> None:
    ended, text = finish(start(*words))
    assert ended == status, text
    assert output in text


def test_a_cluster_can_be_started_by_hand_in_a_sleeping_container(start: Start) -> None:
    container = start("tail", "-f", "/dev/null", shm_size="1g")
    status, output = container.exec_run(["ray", "start", "--head", "--num-cpus=1", "--include-dashboard=false"])
    assert status == 0, output.decode()
    code = "import ray, trainer.cluster.connection as n\nwith n.connected(): print(ray.cluster_resources()['CPU'])"
    status, output = container.exec_run(["python", "-c", code])
    assert (status, output.decode().splitlines()[-1]) == (0, "1.0"), output.decode()


def test_verl_s_lines_are_submitted_to_a_cluster_that_was_started_by_hand(start: Start) -> None:
    """The published way: a sleeping container, `ray start` in it, and `ray job submit` with verl's runtime_env.yaml."""
    container = start("tail", "-f", "/dev/null", shm_size="1g")
    status, output = container.exec_run(["ray", "start", "--head", "--num-cpus=1"])
    assert status == 0, output.decode()
    submit = ["ray", "job", "submit", "--runtime-env=verl/trainer/runtime_env.yaml", "--"]
    status, output = container.exec_run([*submit, "python3", "-m", "verl.trainer.main_ppo", "trainer.val_onli=True"])
    text = output.decode()
    assert status == 1, text
    assert "hint: did you mean trainer.val_only=VALUE?" in text
    assert "Job entrypoint command failed with exit code 2" in text


def test_missing_command_is_named(start: Start) -> None:
    status, output = finish(start("--no-ray", "--", "no-such-program"))
    assert status == 127
    assert "no-such-program" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("options", [{}, {"user": "12345:12345", "read_only": True, "tmpfs": TMP}])
def test_trainer_imports_as_any_user_on_any_root(start: Start, options: dict[str, Any]) -> None:
    code = "import getpass, pathlib, trainer.config.tree; (pathlib.Path.home() / 'x').touch(); print(getpass.getuser())"
    status, output = finish(start("--no-ray", "--", "python", "-c", code, **options))
    assert status == 0, output


WHO_AND_WHERE = (
    "import getpass, os, pathlib, tempfile; (pathlib.Path.home() / 'x').touch(); "
    "print(getpass.getuser(), os.environ['TRITON_CACHE_DIR'])"
)


@pytest.mark.parametrize("options", [{}, {"read_only": True, "tmpfs": TMP}])
@pytest.mark.parametrize(
    "program", [["python", "-c"], ["sh", "-c", 'exec python -c "$0"'], ["--no-ray", "--", "python", "-c"]]
)
def test_programs_of_any_user_have_a_name_and_a_home(start: Start, program: list[str], options: dict[str, Any]) -> None:
    status, output = finish(start(*program, WHO_AND_WHERE, user="12345:12345", **options))
    assert status == 0, output
    assert output.splitlines()[-1] == "uid12345 /tmp/slipway-12345/triton"


def test_programs_that_docker_exec_starts_have_a_name_and_a_home(start: Start) -> None:
    container = start("sleep", "600")
    status, output = container.exec_run(["python", "-c", WHO_AND_WHERE], user="12345:12345")
    assert (status, output.decode().split()) == (0, ["uid12345", "/tmp/slipway-12345/triton"])


def test_root_keeps_its_home_and_environment(start: Start) -> None:
    code = "import os; print(os.environ['HOME'], 'USER' in os.environ, 'TRITON_CACHE_DIR' in os.environ)"
    status, output = finish(start("python", "-c", code))
    assert (status, output.split()) == (0, ["/root", "False", "False"])


@pytest.mark.parametrize("command", [["vllm", "serve", "--help"], ["vllm", "bench", "--help"]])
def test_vllms_own_commands_start(start: Start, manifest: dict[str, Any], command: list[str]) -> None:
    if "vllm" in manifest["excluded"]:
        pytest.skip(manifest["excluded"]["vllm"])
    status, output = finish(start(*command), timeout=120)
    assert status == 0, output
    assert "Traceback" not in output


def test_ray_forms_on_one_node_as_any_user_on_a_read_only_root(start: Start) -> None:
    options = {"user": "12345:12345", "read_only": True, "tmpfs": TMP}
    code = "import ray; ray.init(log_to_driver=False); print('nodes', len(ray.nodes()))"
    status, output = finish(start(ANYWHERE, "--", "python", "-c", code, shm_size="1g", **options), timeout=120)
    assert status == 0, output
    assert "nodes 1" in output


@pytest.mark.parametrize(
    ("limit", "named"),
    [({"mem_limit": "256m"}, "only 256 MiB may be used (/sys/fs/cgroup"), ({"pids_limit": 100}, "only 100 processes")],
)
def test_a_limit_of_the_container_is_the_cause_that_is_named(start: Start, limit: dict[str, Any], named: str) -> None:
    status, output = finish(start("--single", "--", "true", **limit))
    assert status == 15, output
    assert named in output
    assert "hint: raise the limit" in output
    assert "ValueError" not in output


@pytest.mark.parametrize("arguments", [("--no-ray", "--", "sleep", "600"), (ANYWHERE, "--", "sleep", "600")])
def test_sigterm_stops_within_ten_seconds(start: Start, arguments: tuple[str, ...]) -> None:
    container = start(*arguments, shm_size="1g")
    wait_for_process(container, "sleep 600")
    begin = time.monotonic()
    container.kill("SIGTERM")
    status, output = finish(container, timeout=30)
    assert time.monotonic() - begin < 10
    assert status == 143, output


def wait_for_process(container: Container, command: str, deadline: float = 60) -> None:
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        listing = container.top(ps_args="-eo pid,args")
        if any(command == row[1] for row in listing["Processes"]):
            return
        time.sleep(0.2)
    pytest.fail(f"`{command}` did not start within {deadline} s:\n{container.logs().decode()}")


def test_explain_answers_without_a_cluster(start: Start) -> None:
    status, output = finish(start("explain", environment={"SLIPWAY_HOSTS": "a,b", "SLIPWAY_NODE_RANK": "1"}))
    assert status == 0, output
    assert "explicit" in output
