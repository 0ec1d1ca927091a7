"""The texts of `--print`, each checked with the schema or the shell of the tool that reads it."""

import json
import re
import shlex
import subprocess
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from buildkit.errors import UsageError
from buildkit.host.machine import Machine, read_machine
from buildkit.running.flags import RunRequest, container_flags
from buildkit.running.formats import TEMPLATED, TEXTS, podman_flags
from entrypoints.wire.secret import SHORTEST
from tests.buildkit.command import run_buildkit
from tests.buildkit.hosts import BARE, DGX, MI300X, P5, Host

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "images"
CASES = [("cpu", BARE), ("cuda", DGX), ("cuda", P5), ("cuda", BARE), ("rocm", MI300X), ("rocm", BARE)]
AWKWARD = ('A=two words $HOME $(HOME) $$ "quoted"', "EMPTY=", "B=#no comment: here")


def machine_of(host: Host, root: Path) -> Machine:
    return replace(read_machine(host.write(root)), device_groups=(44, 109), uid=0)


def request(target: str, nodes: int = 1, **changes: Any) -> RunRequest:
    made = RunRequest(
        f"slipway:{target}", target, ("train", "trainer.nnodes=2"), nodes=nodes, name="job",
        volumes=("/scratch/my data:/data:ro", "/scratch/runs:/runs"), environment=AWKWARD, user="1000:1000",
    )  # fmt: skip
    return replace(made, **changes)


def written(shown: str, wanted: RunRequest, machine: Machine) -> str:
    flags = container_flags(wanted, machine)
    if shown in TEXTS:
        return TEXTS[shown](wanted, machine, flags)
    return TEMPLATED[shown](wanted, machine, flags, IMAGES)


def words(text: str) -> list[str]:
    """The words of the command in a text, split by a real shell."""
    command = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def check_compose(text: str) -> dict[str, Any]:
    """Checks a Compose file with check-jsonschema's copy of https://github.com/compose-spec/compose-spec."""
    schema = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    document: dict[str, Any] = yaml.safe_load(text)
    jsonschema.validate(document, json.loads(schema.read_text()))
    return document


def expanded(text: str, variables: dict[str, str]) -> str:
    """A container's argument or value as the kubelet hands it over: `$$` becomes `$`, `$(NAME)` a variable's value.

    https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
    """
    return re.sub(r"\$(?:\$|\((\w+)\))", lambda match: variables.get(match[1], match[0]) if match[1] else "$", text)


def check_kubernetes(text: str) -> dict[str, dict[str, Any]]:
    documents = list(yaml.safe_load_all(text))
    for document in documents:
        kubernetes_validate.validate(document, "1.37", strict=True)
    return {document["kind"]: document for document in documents}


@pytest.mark.parametrize(("target", "host"), CASES)
@pytest.mark.parametrize("shown", TEXTS)
def test_command_lines_are_shell_words_and_never_privileged(
    tmp_path: Path, shown: str, target: str, host: Host
) -> None:
    text = written(shown, request(target), machine_of(host, tmp_path))
    arguments = words(text)
    assert arguments[0] == shown
    assert arguments[-2:] == ["train", "trainer.nnodes=2"]
    assert "--privileged" not in arguments
    assert any("/scratch/my data:/data:ro" in word for word in arguments)
    assert AWKWARD[0] in arguments, "quotes, blanks and dollars arrive as they were given"


def test_docker_line_is_the_list_of_flags(tmp_path: Path) -> None:
    machine = machine_of(MI300X, tmp_path)
    flags = container_flags(request("rocm"), machine)
    expected = [word for flag in flags for word in flag.words]
    assert words(written("docker", request("rocm"), machine)) == [
        "docker", "run", "--rm", *expected, "slipway:rocm", "--grace", "110", "train", "trainer.nnodes=2",
    ]  # fmt: skip


def test_the_users_grace_period_comes_last_and_counts(tmp_path: Path) -> None:
    wanted = request("cpu", command=("--grace", "30", "train", "x=--grace"))
    arguments = words(written("docker", wanted, machine_of(BARE, tmp_path)))
    assert arguments[-7:] == ["slipway:cpu", "--grace", "110", "--grace", "30", "train", "x=--grace"]


def arguments(shown: str, wanted: RunRequest, machine: Machine) -> list[str]:
    """The words after the image in a text of `--print`, or those of the container in a document."""
    text = written(shown, wanted, machine)
    if shown == "compose":
        return list(check_compose(text)["services"]["node0"]["command"])
    if shown == "kubernetes":
        return list(check_kubernetes(text)["Job"]["spec"]["template"]["spec"]["containers"][0]["args"])
    return words(text)[-len(wanted.words()) :]


@pytest.mark.parametrize("shown", [*TEXTS, *TEMPLATED])
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("python", "my.py", "--grace", "5"), ["python", "my.py", "--grace", "5"]),
        (("bash",), ["bash"]),
        (("train", "x=1"), ["--grace", "110", "train", "x=1"]),
        (("--no-ray", "--", "python", "my.py"), ["--grace", "110", "--no-ray", "--", "python", "my.py"]),
        (("explain",), ["--grace", "110", "explain"]),
    ],
)
def test_a_program_is_run_as_it_is(tmp_path: Path, shown: str, command: tuple[str, ...], expected: list[str]) -> None:
    assert arguments(shown, request("cpu", command=command), machine_of(BARE, tmp_path)) == expected


def test_several_machines_share_one_line_that_reads_hosts_and_token_from_the_environment(tmp_path: Path) -> None:
    text = written("docker", request("cuda", nodes=2), machine_of(DGX, tmp_path))
    arguments = words(text)
    assert "SLIPWAY_TOKEN" in arguments
    assert "SLIPWAY_HOSTS" in arguments
    assert "SLIPWAY_HOSTS=first-host,second-host" in text


@pytest.mark.parametrize("shown", [*TEXTS, "compose"])
def test_the_secret_is_made_once_and_pasted_on_every_machine(tmp_path: Path, shown: str) -> None:
    text = written(shown, request("cpu", nodes=2), machine_of(BARE, tmp_path))
    commands = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#   ")]
    assert commands[0] == "openssl rand -hex 32"
    (export,) = (command for command in commands if command.startswith("export "))
    tokens = [
        subprocess.run(["bash", "-c", f'{export}; printf %s "$SLIPWAY_TOKEN"'], capture_output=True, check=True).stdout
        for _machine in range(2)
    ]
    assert tokens[0] == tokens[1] != b""
    assert len(tokens[0]) < SHORTEST, "launch refuses the placeholder"


def test_podman_takes_gpus_by_cdi(tmp_path: Path) -> None:
    arguments = words(written("podman", request("cuda"), machine_of(DGX, tmp_path)))
    assert "nvidia.com/gpu=all" in arguments
    assert "--gpus" not in arguments
    two_gpus = words(written("podman", request("cuda", gpus=2), machine_of(DGX, tmp_path)))
    assert {"nvidia.com/gpu=0", "nvidia.com/gpu=1"} <= set(two_gpus)


def test_rootless_podman_asks_only_for_the_callers_limits(tmp_path: Path) -> None:
    machine = replace(machine_of(MI300X, tmp_path), uid=1000, gid=1000)
    flags = podman_flags(container_flags(request("rocm"), machine), machine)
    pairs = [(flag.name, flag.value) for flag in flags]
    assert ("userns", "keep-id") in pairs
    assert [value for name, value in pairs if name == "group-add"] == ["keep-groups"]
    assert [value for name, value in pairs if name == "ulimit"] == ["host"]
    assert "user" not in dict(pairs)


def test_rootless_podman_keeps_another_user_that_was_asked_for(tmp_path: Path) -> None:
    machine = replace(machine_of(BARE, tmp_path), uid=1000, gid=1000)
    flags = podman_flags(container_flags(request("cpu", user="4711:4711"), machine), machine)
    assert {flag.name: flag.value for flag in flags}["user"] == "4711:4711"
    assert "userns" not in {flag.name for flag in flags}


def test_the_group_of_gpus_in_another_machine_is_found_there(tmp_path: Path) -> None:
    """The texts for ROCm, written on a host without an AMD GPU."""
    machine = read_machine(BARE.write(tmp_path))
    for shown in ("docker", "podman"):
        text = written(shown, request("rocm"), replace(machine, uid=0))
        assert '--group-add "$(stat -c %g /dev/kfd)"' in text
    assert "--group-add keep-groups" in written("podman", request("rocm"), replace(machine, uid=1000))
    text = written("compose", request("rocm", nodes=2), machine)
    assert text.count("export GPU_GROUP=$(stat -c %g /dev/kfd)") == 1
    for node in check_compose(text)["services"].values():
        assert node["group_add"] == ["${GPU_GROUP:?export GPU_GROUP first}"]
    pod = check_kubernetes(written("kubernetes", request("rocm"), machine))["Job"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == 0, "the owner of the devices needs no group"


def test_the_asked_gpus_are_chosen_where_the_runtime_hands_in_all(tmp_path: Path) -> None:
    for target, host, variable in (("cuda", DGX, "CUDA"), ("rocm", MI300X, "ROCR"), ("rocm", BARE, "ROCR")):
        machine = machine_of(host, tmp_path / target / str(host.amd))
        for shown in ("apptainer", "enroot"):
            assert f"{variable}_VISIBLE_DEVICES=0,1" in words(written(shown, request(target, gpus=2), machine))
            assert f"{variable}_VISIBLE_DEVICES" not in written(shown, request(target), machine)


@pytest.mark.parametrize(
    "changes",
    [{"environment": ("HOME",)}, {"volumes": ("./data:/data",)}, {"volumes": ("/data",)}, {"volumes": ("A:/data",)}],
)
def test_what_a_pod_cannot_have_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"--env HOME: |--volume .*: neither a folder of the nodes nor a claim"):
        written("kubernetes", request("cpu", **changes), machine_of(BARE, tmp_path))


def test_podman_on_selinux_may_use_the_devices(tmp_path: Path) -> None:
    machine = machine_of(Host(amd=1, selinux=True), tmp_path)
    flags = podman_flags(container_flags(request("rocm"), machine), machine)
    assert "label=disable" in {flag.value for flag in flags}


@pytest.mark.parametrize(("target", "flag"), [("cuda", "--nv"), ("rocm", "--rocm"), ("cpu", None)])
def test_apptainer_selects_the_gpu_vendor(tmp_path: Path, target: str, flag: str | None) -> None:
    arguments = words(written("apptainer", request(target), machine_of(BARE, tmp_path)))
    assert {"--nv", "--rocm"} & set(arguments) == ({flag} if flag else set())
    assert f"slipway_{target}.sif" in arguments


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize(("target", "host"), CASES)
def test_compose_passes_its_schema(tmp_path: Path, target: str, host: Host, nodes: int) -> None:
    machine = machine_of(host, tmp_path)
    document = check_compose(written("compose", request(target, nodes), machine))
    assert list(document["services"]) == [f"node{rank}" for rank in range(nodes)]
    node = document["services"]["node0"]
    assert node["command"] == ["--grace", "110", "train", "trainer.nnodes=2"]
    assert node["environment"][0] == AWKWARD[0].replace("$", "$$"), "compose would read $HOME as its own variable"
    assert node["volumes"][0] == "/scratch/my data:/data:ro"
    assert "privileged" not in node
    assert (node.get("network_mode") == "host") == (nodes == 1)
    assert any("SLIPWAY_HOSTS=node0" in entry for entry in node["environment"]) == (nodes > 1)


def test_compose_nodes_share_the_gpus(tmp_path: Path) -> None:
    document = check_compose(written("compose", request("cuda", 2), machine_of(DGX, tmp_path)))
    devices = [
        node["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for node in document["services"].values()
    ]
    assert devices == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize(("target", "host"), CASES)
def test_kubernetes_passes_its_schema(tmp_path: Path, target: str, host: Host, nodes: int) -> None:
    machine = machine_of(host, tmp_path)
    objects = check_kubernetes(written("kubernetes", request(target, nodes), machine))
    job, service = objects["Job"]["spec"], objects["Service"]
    pod = job["template"]["spec"]
    node = pod["containers"][0]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", nodes, nodes)
    assert service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    environment = {entry["name"]: entry for entry in node["env"]}
    assert environment["SLIPWAY_HOSTS"]["value"].split(",") == [f"job-{rank}.job" for rank in range(nodes)]
    assert expanded(environment["A"]["value"], {"HOME": "/root"}) == AWKWARD[0].partition("=")[2]
    assert environment["SLIPWAY_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "job"
    shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")["emptyDir"]
    assert shm["medium"] == "Memory"
    assert int(shm["sizeLimit"]) > 2**30
    assert "privileged" not in node["securityContext"]
    assert node["securityContext"]["allowPrivilegeEscalation"] is False
    assert node["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert pod["automountServiceAccountToken"] is False
    profile = "Unconfined" if target == "rocm" else "RuntimeDefault"
    assert pod["securityContext"]["seccompProfile"]["type"] == profile


@pytest.mark.parametrize(
    ("target", "host", "limits"),
    [
        ("cpu", DGX, {}),
        ("cuda", DGX, {"nvidia.com/gpu": 8, "rdma/rdma_shared_device_a": 1}),
        ("cuda", P5, {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 32}),
        ("rocm", MI300X, {"amd.com/gpu": 8, "rdma/rdma_shared_device_a": 1}),
        ("rocm", BARE, {"amd.com/gpu": 8}),
    ],
)
def test_kubernetes_asks_for_gpus_and_adapters(tmp_path: Path, target: str, host: Host, limits: dict[str, int]) -> None:
    objects = check_kubernetes(written("kubernetes", request(target), machine_of(host, tmp_path)))
    assert objects["Job"]["spec"]["template"]["spec"]["containers"][0].get("resources", {}).get("limits", {}) == limits


def test_kubernetes_takes_claims_by_name(tmp_path: Path) -> None:
    wanted = request("cpu", volumes=("datasets:/data:ro",))
    objects = check_kubernetes(written("kubernetes", wanted, machine_of(BARE, tmp_path)))
    pod = objects["Job"]["spec"]["template"]["spec"]
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "datasets", "readOnly": True}
    assert pod["containers"][0]["volumeMounts"][1]["readOnly"] is True


def test_the_kubelet_puts_no_variable_into_the_arguments(tmp_path: Path) -> None:
    wanted = request("cpu", command=("bash", "-c", "echo $(SLIPWAY_TOKEN) $$HOME"))
    objects = check_kubernetes(written("kubernetes", wanted, machine_of(BARE, tmp_path)))
    args = objects["Job"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert expanded(args[-1], {"SLIPWAY_TOKEN": "secret"}) == "echo $(SLIPWAY_TOKEN) $$HOME"


def security(objects: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The security contexts of the pod and of its container."""
    pod = objects["Job"]["spec"]["template"]["spec"]
    return pod["securityContext"], pod["containers"][0]["securityContext"]["capabilities"]


@pytest.mark.parametrize(("target", "host"), CASES)
def test_kubernetes_gives_capabilities_only_to_root(tmp_path: Path, target: str, host: Host) -> None:
    """A process of another user has none of the capabilities that `add` lists."""
    pod, capabilities = security(check_kubernetes(written("kubernetes", request(target), machine_of(host, tmp_path))))
    assert pod["runAsUser"] == (0 if "add" in capabilities else 1000)
    assert pod.get("runAsGroup") == (None if "add" in capabilities else 1000)


def test_root_in_kubernetes_may_use_the_folders_of_others(tmp_path: Path) -> None:
    """Root without CAP_DAC_OVERRIDE may neither write into a folder of uid 1000 nor read a private one."""
    for volumes, expected in (("/scratch/runs:/runs",), ["IPC_LOCK", "DAC_OVERRIDE"]), ((), ["IPC_LOCK"]):
        text = written("kubernetes", request("cuda", volumes=volumes), machine_of(DGX, tmp_path))
        assert security(check_kubernetes(text))[1]["add"] == expected


@pytest.mark.parametrize(
    ("volumes", "group"),
    [(("runs:/runs", "datasets:/data:ro"), 1000), (("datasets:/data:ro",), None), (("/scratch/runs:/runs",), None)],
)
def test_kubernetes_lets_the_user_write_into_a_claim(
    tmp_path: Path, volumes: tuple[str, ...], group: int | None
) -> None:
    objects = check_kubernetes(written("kubernetes", request("cpu", volumes=volumes), machine_of(BARE, tmp_path)))
    pod, _ = security(objects)
    assert pod["runAsGroup"] == 1000
    assert pod.get("fsGroup") == group


@pytest.mark.parametrize("shown", TEMPLATED)
@pytest.mark.parametrize("name", ["Upper", "a_b", "-a", "a-", "7b-ppo", "a" * 53])
def test_a_name_that_compose_or_kubernetes_refuses_is_refused_first(tmp_path: Path, shown: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"--name {name}: .* {shown}"):
        written(shown, request("cpu", name=name), machine_of(BARE, tmp_path))


def test_no_text_contains_a_secret(tmp_path: Path) -> None:
    wanted = request("cpu", nodes=2)
    for shown in (*TEXTS, *TEMPLATED):
        assert wanted.token not in written(shown, wanted, machine_of(BARE, tmp_path))


@pytest.mark.parametrize("shown", ["docker", "kubernetes", "slurm"])
def test_print_needs_no_engine_and_no_gpu(shown: str) -> None:
    done = run_buildkit("run", "--target", "cuda", "--nodes", "2", "--print", shown)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("target", ["cpu", "cuda", "rocm"])
def test_json_lists_flag_value_and_reason(target: str) -> None:
    document = json.loads(run_buildkit("run", "--target", target, "--json").stdout)
    assert document["flags"]
    assert all(set(flag) == {"flag", "value", "reason"} and flag["reason"] for flag in document["flags"])
    assert "docker run --rm" in document["text"]


def test_explain_shows_the_reasons_and_runs_nothing() -> None:
    done = run_buildkit("run", "--target", "rocm", "--explain")
    assert done.returncode == 0
    assert re.search(r"--device\s+/dev/kfd\s+ROCm", done.stdout)


def test_dry_run_prints_the_commands_of_every_node() -> None:
    done = run_buildkit("run", "--target", "cpu", "--nodes", "2", "--dry-run", "--name", "job", "--", "explain")
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines] == [
        ["docker", word] for word in ("network", "create", "create", "start", "start")
    ]
    assert "SLIPWAY_TOKEN" in lines[1], "by name: the secret itself is on no command line"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--print", "ansible"], "docker, podman"),
        (["--fabric", "token-ring", "--explain"], "infiniband"),
        (["--memory", "much", "--explain"], "512g"),
        ([], "-- train"),
    ],
)
def test_bad_usage_is_explained(arguments: list[str], words: str) -> None:
    done = run_buildkit("run", "--target", "cpu", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""
