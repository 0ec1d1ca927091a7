"""The command line: output streams, exit codes, no traceback."""

import hashlib
import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from tests.buildkit.command import run_buildkit

ROOT = Path(__file__).parents[2]


def buildkit(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_buildkit(
        *arguments, cwd=cwd, environment={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environment}
    )


def test_targets_as_json() -> None:
    done = buildkit("targets", "--json")
    assert done.returncode == 0
    assert {entry["target"] for entry in json.loads(done.stdout)} == {"cpu", "cuda", "rocm"}
    assert all({"target", "variant", "status", "pins"} <= set(entry) for entry in json.loads(done.stdout))


def test_targets_as_a_table() -> None:
    done = buildkit("targets")
    assert "ray[default]==" in done.stdout
    rows = {line.split()[1]: line for line in done.stdout.splitlines() if line.startswith("rocm ")}
    assert [name for name, row in rows.items() if "cannot train" in row] == ["rocm-debian"]


def test_targets_show_how_old_a_lock_is(project: Path) -> None:
    three_days_ago = datetime.now(UTC) - timedelta(days=3)
    path = project / "images" / "locks" / "cpu" / "small.txt"
    path.parent.mkdir(parents=True)
    path.write_text(f"# epoch: {int(three_days_ago.timestamp())}\nsix==1.17.0\n")
    assert "3 days old" in buildkit("targets", "--project", str(project)).stdout
    (entry,) = json.loads(buildkit("targets", "--json", "--project", str(project)).stdout)
    assert (entry["locked"], entry["lock_age_days"]) == (f"{three_days_ago:%Y-%m-%d}", 3)
    path.unlink()
    (entry,) = json.loads(buildkit("targets", "--json", "--project", str(project)).stdout)
    assert entry["locked"] is None


@pytest.mark.parametrize("epoch", ["-1", str(10**12), "9" * 5000])
def test_a_lock_of_no_day_is_refused(project: Path, epoch: str) -> None:
    path = project / "images" / "locks" / "cpu" / "small.txt"
    path.parent.mkdir(parents=True)
    path.write_text(f"# epoch: {epoch}\nsix==1.17.0\n")
    done = buildkit("targets", "--project", str(project))
    assert done.returncode == 6
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[", b'"text"', b'{"auths": {"127.0.0.1:1": {"auth": "!"}}}'])
def test_dockers_malformed_configuration_is_named_without_a_traceback(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    words = ("verify", "--published", "127.0.0.1:1/s:cpu", "--key", "cosign.pub")
    done = buildkit(*words, DOCKER_CONFIG=str(tmp_path))
    assert done.returncode == 11, done.stderr
    assert str(tmp_path / "config.json") in done.stderr
    assert "Traceback" not in done.stderr


def test_pips_malformed_configuration_is_named_without_a_traceback(project: Path, tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("index-url = https://me:secret@one.example\n")
    words = ("lock", "--target", "cpu", "--project", str(project))
    done = buildkit(*words, PIP_CONFIG_FILE=str(tmp_path / "pip.conf"))
    assert done.returncode == 11, done.stderr
    assert f"{tmp_path / 'pip.conf'}, line 1," in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_variant_without_torch_is_no_trainer() -> None:
    variants = json.loads(buildkit("targets", "--json").stdout)
    assert [entry["variant"] for entry in variants if not entry["trains"]] == ["rocm-debian"]


@pytest.mark.parametrize("target", ["cpu", "cuda", "rocm"])
def test_render_prints_the_dockerfile_on_stdout(target: str) -> None:
    done = buildkit("render", "--target", target)
    assert done.returncode == 0
    assert done.stdout.startswith(f"# {target} / ")


def test_render_without_a_lock_names_no_lock(project: Path) -> None:
    done = buildkit("render", "--target", "cpu", "--project", str(project))
    assert done.returncode == 0
    assert "no lock for cpu-small" in done.stderr
    assert "dev.slipway.variant" in done.stdout
    for words in ("dev.slipway.lock", "dev.slipway.pins", hashlib.sha256().hexdigest()):
        assert words not in done.stdout


@pytest.mark.parametrize(
    ("user", "runtime", "words"),
    [
        ("alice", "kubernetes", "--user alice: not numbers"),
        ("alice", "docker", "not numbers"),
        ("1000:", "compose", "not numbers"),
        ("1:2:3", "compose", "not numbers"),
        ("-1", "podman", "not numbers"),
        ("4294967296", "kubernetes", "not numbers"),
        ("", "docker", "not numbers"),
        ("4711:4711", "apptainer", "apptainer runs as the user who starts it"),
        ("4711", "slurm", "slurm runs as the user who starts it"),
    ],
)
def test_a_user_that_the_runtime_cannot_have_is_refused(user: str, runtime: str, words: str) -> None:
    done = buildkit("run", "--target", "cpu", "--print", runtime, f"--user={user}")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_a_user_is_written_as_numbers() -> None:
    written = {
        runtime: buildkit("run", "--target", "cpu", "--print", runtime, "--user", "007").stdout
        for runtime in ("docker", "compose", "kubernetes")
    }
    assert "--user 7:0" in written["docker"]
    assert 'user: "7:0"' in written["compose"]
    assert "runAsUser: 7 " in written["kubernetes"]
    assert "runAsGroup: 0" in written["kubernetes"]


def test_gpus_of_compose_are_those_of_each_node() -> None:
    done = buildkit("run", "--target", "cuda", "--print", "compose", "--nodes", "2", "--gpus", "4")
    services = yaml.safe_load(done.stdout)["services"].values()
    devices = [node["deploy"]["resources"]["reservations"]["devices"][0] for node in services]
    assert [device.get("device_ids") for device in devices] == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["render", "--target", "cuba"], 2, "did you mean `cuda`?"),
        (["render", "--target", "cpu", "--variant", "none"], 2, "vllm0.32"),
        (["render", "--target", "cpu", "--base", "rock"], 2, "bootstrap"),
        (["render"], 2, "--target"),
        (["build", "--target", "cpu", "--engine", "lxc"], 2, "docker, podman"),
        (["test", "--target", "cpu", "--tier", "x"], 2, "smoke, cluster, all"),
        (["nothing"], 2, "No such command"),
    ],
)
def test_bad_usage_is_explained(arguments: list[str], status: int, words: str) -> None:
    done = buildkit(*arguments)
    assert done.returncode == status
    assert words in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_outside_a_checkout_the_installed_project_is_used(tmp_path: Path) -> None:
    assert buildkit("targets", cwd=tmp_path).returncode == 0


def test_wrong_project_is_named(tmp_path: Path) -> None:
    done = buildkit("targets", "--project", str(tmp_path))
    assert done.returncode == 3
    assert str(tmp_path) in done.stderr


def test_a_missing_engine_is_an_error_with_instructions() -> None:
    done = buildkit("build", "--target", "cpu", "--engine", "docker", DOCKER_HOST="unix:///nonexistent/docker.sock")
    assert done.returncode == 4
    assert "ci/engine" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_any_engine_each_attempt_is_named() -> None:
    done = buildkit("build", "--target", "cpu", PATH="/nonexistent")
    assert done.returncode == 4
    assert "docker is not installed" in done.stderr
    assert "podman is not installed" in done.stderr


def test_project_with_a_broken_matrix_exits_3(project: Path) -> None:
    (project / "images" / "matrix.toml").write_text("schema = [")
    done = buildkit("targets", "--project", str(project))
    assert done.returncode == 3
    assert "matrix.toml" in done.stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("buildkit pl", ["plan"]),
        ("buildkit build --target c", ["cpu", "cuda"]),
        ("buildkit build --target cuda --variant vllm0.26", ["vllm0.26-torch2.11-cu130"]),
        ("buildkit build --variant rocm7", ["rocm7.2-wheels"]),
        ("buildkit run --project /no/such --variant x", []),
    ],
)
def test_the_shell_completes_commands_targets_and_variants(line: str, expected: list[str]) -> None:
    variables = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_BUILDKIT_COMPLETE": "complete_bash"}
    assert buildkit(**variables).stdout.split() == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--print", "compose", "-it"), "--interactive: nobody types to a job of --print compose"),
        (("--print", "kubernetes", "-p", "8265"), "--publish: the containers of --print kubernetes"),
        (("--print", "docker", "-p", "8265"), "--publish: the containers of --print docker"),
    ],
)
def test_what_a_printed_job_cannot_do_is_refused(options: tuple[str, ...], words: str) -> None:
    done = buildkit("run", "--target", "cpu", *options, "--", "bash")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_a_program_on_several_nodes_is_told_apart_from_one_on_the_cluster() -> None:
    alone = buildkit("run", "--target", "cpu", "--nodes", "2", "--dry-run", "--", "python", "my.py")
    assert (
        "on each of the 2 nodes, without a cluster; to run it on the cluster, write `-- -- python my.py`"
        in alone.stderr
    )
    cluster = buildkit("run", "--target", "cpu", "--nodes", "2", "--dry-run", "--", "--", "python", "my.py")
    assert cluster.stderr == ""
    assert cluster.stdout.count("--grace 110 -- python my.py\n") == 2


def test_only_the_head_gets_ports_and_the_terminal() -> None:
    done = buildkit("run", "--target", "cpu", "--nodes", "2", "-i", "-p", "80:8000", "--dry-run", "--", "bash")
    head, worker = (line for line in done.stdout.splitlines() if line.startswith("docker create"))
    assert "--publish 80:8000" in head
    assert "--interactive" in head
    assert "--publish" not in worker
    assert "--interactive" not in worker
    assert "docker start --attach --interactive" in done.stdout
