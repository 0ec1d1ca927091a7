import json
import subprocess
import sys
from pathlib import Path

import pytest

from entrypoints import options
from entrypoints.cli import SUBCOMMANDS
from tests.entrypoints.conftest import REPOSITORY, Start


@pytest.mark.parametrize(
    ("arguments", "variables", "status", "message"),
    [
        ([], {}, 2, "error: no command is given"),
        (["--"], {}, 2, "error: no command is given"),
        (["trian", "x=1"], {}, 2, "error: 'trian' is neither a command of launch nor a program on the PATH"),
        (["explian"], {}, 2, "hint: did you mean `launch explain`?"),
        (["trian", "x=1"], {}, 2, "hint: did you mean `launch train`? the commands are train, explain, hosts, attach"),
        (["no-such-thing"], {}, 2, "`launch -- COMMAND ...` runs a program on the cluster"),
        (["--single", "--hosts", "a,b", "--", "true"], {}, 10, "SLIPWAY_SINGLE is 1, but SLIPWAY_HOSTS is 'a,b'"),
        (["--head", "a", "--", "true"], {}, 10, "SLIPWAY_HEAD is a, so there are other nodes"),
        (["--", "true"], {"ACME_NUM_NODES": "2"}, 10, "ACME_NUM_NODES is '2', so there are other nodes"),
        (["/etc/passwd"], {}, 2, "error: '/etc/passwd' is neither a command of launch nor a program on the PATH"),
        (["--nodes", "2", "echo", "x"], {}, 2, "hint: write `launch OPTIONS -- echo x`"),
        (["--nonsense", "--", "true"], {}, 2, "error: unrecognized arguments: --nonsense"),
        (["--host", "a,b", "--", "true"], {}, 2, "hint: did you mean --hosts?"),
        (["--host=a,b", "train"], {}, 2, "hint: did you mean --hosts?"),
        (["--Dead-Line", "5", "--", "true"], {}, 2, "hint: did you mean --deadline?"),
        (["explain", "--jsn"], {}, 2, "hint: did you mean --json?"),
        (["explain", "--deadline", "5"], {}, 2, "hint: write it before the subcommand: launch --deadline ..."),
        (["--no-ray", "trian", "x=1"], {}, 2, "hint: did you mean `launch OPTIONS train ...`?"),
        (["--nodes", "2", "--", "true"], {}, 10, "SLIPWAY_NODES is 2, but no scheduler, launcher or service is"),
        (["--nodes", "2", "--", "true"], {}, 10, "hint: list the nodes with --hosts or SLIPWAY_HOSTS, the head first"),
        (["--nodes", "two", "--", "true"], {}, 10, "SLIPWAY_NODES is 'two', not a whole number"),
        (["--hosts", "GPU-0,gpu-0", "--", "true"], {}, 10, "gpu-0 is listed twice"),
        (["--hosts", "GPU-0,b", "--hostname", "gpu-0", "--node-rank", "1", "--", "true"], {}, 10, "as node 0"),
        (["--deadline", "soon", "--", "true"], {}, 2, "'soon' is not a number of seconds"),
        (["--", "true"], {"SLIPWAY_DEADLINE": "-3"}, 2, "SLIPWAY_DEADLINE: '-3' is not a number of seconds"),
        (["--", "true"], {"SLIPWAY_CONTROL_PORT": "99999"}, 2, "SLIPWAY_CONTROL_PORT: '99999' is not a port"),
        (["--hosts", "a,b", "--", "true"], {}, 10, "which is not in SLIPWAY_HOSTS=a,b"),
        (["--hosts", "a b", "--node-rank", "0", "--", "true"], {}, 10, "'a b' is not a host name"),
        (["--min-nodes", "0", "--", "true"], {}, 2, "'0' is not a whole number above 0"),
        (["--min-nodes", "2", "--", "true"], {}, 2, "--min-nodes is 2, but single says 1 nodes"),
        (["--hosts", "a,b", "--node-rank", "0", "--", "true"], {}, 11, "error: the nodes share no token"),
        (
            ["--hosts", "a,b", "--node-rank", "0", "--", "true"],
            {"SLIPWAY_TOKEN_FILE": "/nowhere"},
            11,
            "SLIPWAY_TOKEN_FILE=/nowhere cannot be read: No such file or directory",
        ),
        (["--no-ray", "--", "/no/such/place"], {}, 127, "cannot run '/no/such/place': No such file or directory"),
        (["--no-ray", "--", "/etc/passwd"], {}, 127, "cannot run '/etc/passwd': Permission denied"),
    ],
)
def test_errors_have_a_status_and_one_message(
    start: Start, arguments: list[str], variables: dict[str, str], status: int, message: str
) -> None:
    ended = start(*arguments, **variables).wait()
    assert ended.status == status
    assert message in ended.stderr
    assert ended.stderr.count("error: ") == 1
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


def test_options_after_the_separator_are_the_commands(start: Start) -> None:
    ended = start("--no-ray", "--", "echo", "--no-ray", "--", "x").wait()
    assert ended.stdout == "--no-ray -- x\n"


def test_a_program_on_the_path_is_run_as_it_is(start: Start) -> None:
    launched = start("sh", "-c", 'echo "$$ $1"; exit 7', "sh", "--no-ray", RAY_ADDRESS="10.0.0.1:6379", NNODES="2")
    ended = launched.wait()
    assert ended.stdout == f"{launched.pid} --no-ray\n"  # the same process: nothing stands between it and its signals
    assert (ended.status, ended.stderr) == (7, "")


def test_a_program_on_the_path_inherits_no_ignored_signals(start: Start) -> None:
    ended = start("sh", "-c", "kill -PIPE $$; echo survived").wait()
    assert (ended.status, ended.stdout) == (-13, "")


def test_explain_says_what_was_detected(start: Start) -> None:
    ended = start(
        "explain", "--json", SLURM_JOB_ID="5", SLURM_STEP_ID="0", SLURM_STEP_NUM_NODES="2", SLURM_NODEID="1",
        SLURM_STEP_NODELIST="n[1-2]", SLURM_LOCALID="0", NNODES="3", NODE_RANK="1", MASTER_ADDR="n1",
    ).wait()  # fmt: skip
    document = json.loads(ended.stdout)
    assert ended.status == 0
    assert document["environment"] == "slurm"
    assert document["attach"] is None
    assert (document["node_count"], document["node_rank"], document["local_rank"]) == (2, 1, 0)
    assert (document["hosts"], document["head"]) == (["n1", "n2"], "n1")
    assert [other["environment"] for other in document["runners_up"]] == ["torchrun"]
    assert len(document["conflicts"]) == 1
    assert document["warnings"] == []
    assert 20_000 <= document["ports"]["control"] < 21_000 <= document["ports"]["gcs"] < 32_768


def test_explain_prints_text_by_default(start: Start) -> None:
    ended = start("explain", RAY_ADDRESS="10.0.0.1:6379").wait()
    assert ended.stdout.startswith("environment  single")
    assert "attach       10.0.0.1:6379" in ended.stdout


SCRIPT = {"SLURM_JOB_ID": "5", "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--hosts", "a,b", "--node-rank", "0", "explain"], {}, "would fail   the nodes share no token"),
        (["explain"], SCRIPT, "would fail   2 nodes are allocated, but only this process was started; write srun"),
        (
            ["explain"],
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
            "would fail   hydra does not name the head; set SLIPWAY_HEAD on every node, or share a SLIPWAY_JOB_DIR",
        ),
        (["explain", "--", "no-such-thing"], {}, "would fail   cannot run 'no-such-thing': it is not on the PATH"),
        (["--min-nodes", "2", "explain"], {}, "would fail   --min-nodes is 2, but there are 1 nodes"),
    ],
)
def test_explain_says_what_would_fail(
    start: Start, arguments: list[str], variables: dict[str, str], message: str
) -> None:
    ended = start(*arguments, **variables).wait()
    assert ended.status == 0
    assert message in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["explain", "--", "true"], {}),
        (["explain", "--", "train", "x=1"], {}),
        (["--hosts", "a,b", "--node-rank", "0", "explain"], {"SLIPWAY_TOKEN": "a secret of these tests"}),
        (["--hosts", "a,b", "--node-rank", "0", "explain"], {"SLIPWAY_JOB_DIR": "/shared"}),
        (["explain"], {"RAY_ADDRESS": "10.0.0.1:6379", **SCRIPT}),
    ],
)
def test_explain_of_what_works_names_no_failure(start: Start, arguments: list[str], variables: dict[str, str]) -> None:
    assert "would fail" not in start(*arguments, **variables).wait().stdout


def test_hints_below_pbs_do_not_lead_to_the_next_error(start: Start, tmp_path: Path) -> None:
    script = {"PBS_JOBID": "123.server", "PBS_NODEFILE": str(tmp_path / "nodes"), "SLIPWAY_TOKEN": "a secret of these"}
    ended = start("--", "true", **script).wait()
    assert "which cannot be read here" in ended.stderr
    assert "list the nodes with --hosts" in ended.stderr
    (tmp_path / "nodes").write_text("node01\nnode01\nnode02\n", encoding="ascii")
    ended = start("--hostname", "elsewhere", "--", "true", **script).wait()
    assert (
        "hint: list the nodes, and tell which of them this is: --hosts node[01-02] --node-rank N (0 to 1)"
        in ended.stderr
    )
    hint = ("--hosts", "node[01-02]", "--node-rank", "1", "--hostname", "elsewhere")
    explained = start(*hint, "explain", **script).wait().stdout
    assert "environment  explicit" in explained
    assert "would fail" not in explained


def test_names_of_hosts_have_no_case(start: Start) -> None:
    token = {"SLIPWAY_TOKEN": "a secret of these tests"}
    listed = [
        json.loads(start("--hosts", hosts, "--hostname", "gpu-1", "explain", "--json", **token).wait().stdout)
        for hosts in ("GPU-0,GPU-1", "gpu-0,gpu-1")
    ]
    assert [document["node_rank"] for document in listed] == [1, 1]
    assert listed[0]["job_id"] == listed[1]["job_id"]  # else their control ports differ
    assert listed[0]["head"] == "GPU-0"


def test_explain_says_what_would_make_a_lone_node_several(start: Start) -> None:
    lines = start("explain").wait().stdout.splitlines()
    assert lines[0] == "environment  single  (no scheduler, launcher or service is recognised)"
    assert "several nodes need --hosts on each, or one task per node: srun" in lines[1]


def test_explain_quotes_values_that_would_be_misread(start: Start) -> None:
    fabric = {"SLIPWAY_HOSTS": "vm,b", "SLIPWAY_NODE_RANK": "0", "GLOO_SOCKET_IFNAME": "=eth0"}
    assert "env          GLOO_SOCKET_IFNAME='=eth0': set by you instead of" in start("explain", **fabric).wait().stdout


def test_explain_imports_no_heavy_package() -> None:
    program = "import sys, entrypoints.cli; print({'asyncio', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("module", ["trainer.py", "trainer/__init__.py"])
def test_a_module_that_hides_the_trainer_is_named(tmp_path: Path, module: str) -> None:
    """Python, and Ray's workers after it, import from the current directory first."""
    file = tmp_path / module
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    launch = [sys.executable, "-m", "entrypoints", "--no-ray", "train", "x=1"]
    ended = subprocess.run(launch, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert f"error: {file} hides the module `trainer`" in ended.stderr


@pytest.mark.parametrize("module", ["json", "random", "typer"])
def test_a_module_of_the_user_does_not_hide_pythons(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text("raise SystemExit('a module of the user')")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    launch = [sys.executable, "-P", "-m", "entrypoints", "--no-ray", "train", "x=1"]
    ended = subprocess.run(launch, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert "a module of the user" not in ended.stderr
    assert "error: x: there is no such setting" in ended.stderr


def test_explain_can_take_another_nodes_view(start: Start) -> None:
    ended = start("--hosts", "gpu-[0-3]", "explain", "--json", "--hostname", "gpu-2", "--", "echo", "--json").wait()
    document = json.loads(ended.stdout)
    assert (document["node_rank"], document["node_count"], document["head"]) == (2, 4, "gpu-0")
    assert document["command"] == ["echo", "--json"]


def test_a_batch_script_without_srun_is_a_warning_of_explain_and_an_error_of_launch(start: Start) -> None:
    script = {"SLURM_JOB_ID": "5", "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    explained = start("explain", **script).wait()
    assert explained.status == 0
    assert "write srun --nodes=2 --ntasks-per-node=1 launch ..." in explained.stdout
    ended = start("--", "true", **script).wait()
    assert ended.status == 10
    assert "hint: write srun --nodes=2 --ntasks-per-node=1 launch ..." in ended.stderr


def test_hosts_prints_one_host_per_line(start: Start) -> None:
    assert start("hosts", "n[1-2],login").wait().stdout == "n1\nn2\nlogin\n"
    assert start("hosts", "--compress", "n1", "n2", "login").wait().stdout == "n[1-2],login\n"


def test_too_many_hosts_are_refused(start: Start) -> None:
    ended = start("hosts", "a[1-999999999]").wait()
    assert (ended.status, ended.stdout) == (2, "")
    assert "error: 'a[1-999999999]' is not a host list: more than 65536 hosts" in ended.stderr


def test_a_service_whose_replicas_do_not_appear_is_an_error_at_the_deadline(start: Start) -> None:
    ended = start("--deadline", "0.2", "--", "true", SLIPWAY_SERVICE="ppo.invalid", SLIPWAY_NODES="2").wait()
    assert ended.status == 10
    assert "ppo.invalid has 0 addresses so far, not 2, after 0.2 s" in ended.stderr


def test_the_version_is_the_images_or_else_the_distributions(start: Start, tmp_path: Path) -> None:
    metadata = tmp_path / "slipway_rl-9.8.7.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: slipway-rl\nVersion: 9.8.7\n", encoding="ascii")
    manifest = Path("/etc/slipway/image.json")
    expected = json.loads(manifest.read_text(encoding="utf-8"))["version"] if manifest.exists() else "9.8.7"
    ended = start("--version", PYTHONPATH=f"{tmp_path}:{REPOSITORY}").wait()
    assert (ended.status, ended.stdout) == (0, f"launch {expected}\n")


def test_help_lists_every_subcommand_and_variable(start: Start) -> None:
    text = start("--help").wait().stdout
    variables = {value for name, value in vars(options).items() if name.isupper()}
    not_in_options = {"SLIPWAY_REPORT_DIR", "SLIPWAY_JOB_DIR"}
    assert [name for name in SUBCOMMANDS if f"launch [options] {name} ..." not in text] == []
    assert [name for name in variables - not_in_options if name not in text] == []


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_help_of_its_own(start: Start, name: str) -> None:
    text = start(name, "--help").wait().stdout
    assert f"usage: launch {name} " in text
    assert SUBCOMMANDS[name].purpose in text.replace("\n", " ")


@pytest.mark.parametrize("option", ["--hosts", "--hostfile", "--nodes", "--node-rank", "--head", "--hostname"])
def test_an_empty_option_is_refused(start: Start, option: str) -> None:
    ended = start(option, "", "explain").wait()  # an unset HOSTS in `--hosts "$HOSTS"` would make each node a job
    assert ended.status == 2
    assert f"argument {option}: the value is empty" in ended.stderr


def test_a_token_file_that_others_can_read_is_refused(start: Start, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("open sesame", encoding="ascii")
    token.chmod(0o644)
    ended = start("--hosts", "a,b", "--node-rank", "0", "--", "true", SLIPWAY_TOKEN_FILE=str(token)).wait()
    assert ended.status == 11
    assert "can be read by others (mode 644)" in ended.stderr
    assert f"hint: chmod 600 {token}" in ended.stderr


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--resources", "SLOT=2", "is not a JSON object of amounts"),
        ("--resources", '{"SLOT": "two"}', "is not a JSON object of amounts"),
        ("--resources", '{"GPU": 2}', "GPU has an option of its own: --num-gpus"),
        ("--labels", "rack", "'rack' is not KEY=VALUE"),
    ],
)
def test_malformed_resources_and_labels_are_refused(start: Start, option: str, value: str, reason: str) -> None:
    ended = start(option, value, "--", "true").wait()
    assert ended.status == 2
    assert reason in ended.stderr
