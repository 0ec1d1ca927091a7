"""What an addition costs: each one is made in a copy of the project, works there, and touches only the named files."""

import json

from tests.house.conftest import Project

SCHEDULER = """
from entrypoints.environments.base import Allocation, Environment
from entrypoints.environments.process_view import ProcessView, Reader


class Acme(Environment):
    name = "acme"
    precedence = 299
    title = "Acme"
    reads = ("ACME_JOB", "ACME_RANK", "ACME_NODES", "ACME_HEAD")
    caveats = ""
    start = "acme-run LAUNCH"
    source = "https://example.org/acme"

    @classmethod
    def detect(cls, view: ProcessView) -> Allocation | None:
        reader = Reader(view.variables)
        job_id = reader.text("ACME_JOB")
        if job_id is None:
            return None
        return Allocation(
            environment=cls.name,
            job_id=job_id,
            node_count=reader.required_number("ACME_NODES", hint="acme-run sets it"),
            node_rank=reader.required_number("ACME_RANK", hint="acme-run sets it"),
            head=reader.required("ACME_HEAD", hint="acme-run sets it"),
            variables=reader.used,
        )
"""
HUB = """
from trainer.experience.hub import HubRow, UnusableEnvironmentError


def closed(name, **arguments):
    raise UnusableEnvironmentError(f"{name} is closed", "open it")


ROW = HubRow(name="arena", package="arena", open=closed)
"""
RECORD = """
source = "https://example.org/acme"
[[case]]
name = "two nodes"
hostname = "n2"
expect = { environment = "acme", node_count = 2, node_rank = 1, head = "n1" }
[case.variables]
ACME_JOB = "7"
ACME_RANK = "1"
ACME_NODES = "2"
ACME_HEAD = "n1"
"""
ESTIMATOR = """
from trainer.algorithms.rows import Advantages, Estimator
from trainer.rows import Parameter


def centered(sampled, center):
    return Advantages(sampled.rewards - center)


ROW = Estimator(
    name="centered",
    estimate=centered,
    compares_groups=True,
    parameters={"center": Parameter(type=float, default=0.5, description="the baseline")},
)
"""
POLICY_LOSS = """
from trainer.algorithms.rows import PolicyLoss, TokenLoss
from trainer.rows import Parameter


def sharp(log_probs, old_log_probs, advantages, mask, sharpness):
    return TokenLoss(-advantages * log_probs * sharpness, mask)


ROW = PolicyLoss(
    name="sharp",
    loss=sharp,
    parameters={"sharpness": Parameter(type=float, default=1.0, description="factor of the loss")},
)
"""
CORRECTION = """
from trainer.algorithms.rows import Correction

ROW = Correction(name="ones", weights=lambda ratio, mask: mask.to(ratio.dtype))
"""
REWARD_RULE = """
from trainer.rows import Parameter, RewardRule


def contains(response, ground_truth, needle):
    return float(needle in response)


ROW = RewardRule(
    name="contains",
    score=contains,
    parameters={"needle": Parameter(type=str | None, description="what to look for")},
)
"""
LOGGER = """
from trainer.records.logger import LoggerRow


class Diary:
    def __init__(self, run_dir, project, settings):
        pass

    def log(self, step, metrics):
        pass

    def close(self, failed):
        pass


ROW = LoggerRow(name="diary", open=Diary)
"""
VARIANT = """
[targets.cpu.variants.tiny]
base = "debian12"
status = "untested"
requirements = ["six==1.17.0"]
"""
TARGET = """
[targets.xpu]
disk_gib = 1
summary = "Intel GPUs"
[targets.xpu.variants.first]
base = "debian12"
status = "untested"
requirements = ["six==1.17.0"]
"""
TARGET_ENVIRONMENT = '[[env]]\nname = "ZE_FLAG"\nvalue = "1"\nreason = "r"\nsource = "https://example.org"\n'
BUILDKIT_ROW = """        Accelerator(
            "xpu",
            vendor="Intel",
            flags=render_node_flags,
            driver_module="xe",
            render_nodes=True,
            resource="gpu.intel.com/xe",
            device_files=("/dev/dri/renderD*",),
        ),
"""
LAUNCH_ROW = """    Accelerator(
        target="xpu",
        vendor="Intel",
        architecture_prefix="xe",
        find=lambda tree: [],
        gpu_devices="dev/dri/renderD*",
        run_flags="--device /dev/dri",
        visible_variables=("ZE_AFFINITY_MASK",),
        tool="xpu-smi",
        driver_path="sys/module/xe",
        driver_version_file="sys/module/xe/version",
        driver_fix="install Intel's driver",
        component="oneapi",
        minimum_drivers=(),
        driver_required=False,
        packages={},
        torch_tag="xpu",
        backend="xccl",
        device="xpu",
    ),
"""


def test_a_scheduler_is_one_file_and_its_record(project: Project) -> None:
    project.write("entrypoints/environments/schedulers/acme.py", SCHEDULER)
    project.write("tests/entrypoints/environments/recorded/acme.toml", RECORD)
    variables = {"ACME_JOB": "7", "ACME_RANK": "1", "ACME_NODES": "2", "ACME_HEAD": "n1"}
    shown = json.loads(project.output("-m", "entrypoints", "explain", "--json", **variables))
    assert (shown["environment"], shown["node_count"], shown["node_rank"], shown["head"]) == ("acme", 2, 1, "n1")
    tests = "tests/entrypoints/environments/test_recorded_environments.py"
    generated = f"{tests}::test_the_page_of_environments_is_current"
    project.output("-m", "pytest", "-q", tests, "--deselect", generated)
    assert project.touched() == {
        "entrypoints/environments/schedulers/acme.py",
        "tests/entrypoints/environments/recorded/acme.toml",
    }


def test_an_algorithm_with_a_setting_of_its_own_is_one_file(project: Project) -> None:
    project.write("trainer/algorithms/advantages/centered.py", ESTIMATOR)
    ours = json.loads(project.settings("algorithm.advantage=centered", "algorithm.center=0.25"))
    assert (ours["algorithm"]["advantage"], ours["algorithm"]["center"]) == ("centered", 0.25)
    theirs = json.loads(project.settings("algorithm.adv_estimator=centered"))
    assert theirs["algorithm"]["advantage"] == "centered"
    sizes = ("rollout.samples_per_prompt=1", "actor.mini_batch_size=64")
    alone = project.run("-m", "trainer", "config", "algorithm.advantage=centered", *sizes)
    assert "algorithm.advantage=centered compares the responses to a prompt" in alone.stderr
    assert project.touched() == {"trainer/algorithms/advantages/centered.py"}


def test_a_policy_loss_with_a_setting_of_its_own_is_one_file(project: Project) -> None:
    project.write("trainer/algorithms/policy_losses/sharp.py", POLICY_LOSS)
    ours = json.loads(project.settings("actor.policy_loss=sharp", "actor.sharpness=2"))
    assert (ours["actor"]["policy_loss"], ours["actor"]["sharpness"]) == ("sharp", 2.0)
    theirs = json.loads(project.settings("actor_rollout_ref.actor.policy_loss.loss_mode=sharp"))
    assert theirs["actor"]["policy_loss"] == "sharp"
    assert project.touched() == {"trainer/algorithms/policy_losses/sharp.py"}


def test_a_correction_is_one_file(project: Project) -> None:
    project.write("trainer/algorithms/corrections/ones.py", CORRECTION)
    assert json.loads(project.settings("algorithm.correction=ones"))["algorithm"]["correction"] == "ones"
    assert project.touched() == {"trainer/algorithms/corrections/ones.py"}


def test_a_reward_rule_with_a_setting_of_its_own_is_one_file(project: Project) -> None:
    project.write("trainer/rewards/rules/contains.py", REWARD_RULE)
    shown = json.loads(project.settings("reward.name=contains", "reward.needle=42"))
    assert (shown["reward"]["name"], shown["reward"]["needle"]) == ("contains", "42")
    assert "reward.needle" in project.run("-m", "trainer", "config", "reward.name=contains").stderr
    assert project.touched() == {"trainer/rewards/rules/contains.py"}


def test_a_logger_is_one_file(project: Project) -> None:
    project.write("trainer/records/loggers/diary.py", LOGGER)
    assert json.loads(project.settings("trainer.loggers=[diary]"))["trainer"]["loggers"] == ["diary"]
    assert project.touched() == {"trainer/records/loggers/diary.py"}


def test_a_rollout_engine_and_a_training_backend_are_one_file_each(project: Project) -> None:
    """Their classes need torch, so only the settings are read here; tests inside the image run the real ones."""
    project.write("trainer/rollout/backends/sglang.py", "")
    project.write("trainer/models/backends/titan.py", "")
    shown = json.loads(project.settings("rollout.engine=sglang", "actor.backend=titan"))
    assert (shown["rollout"]["engine"], shown["actor"]["backend"]) == ("sglang", "titan")
    assert project.touched() == {"trainer/rollout/backends/sglang.py", "trainer/models/backends/titan.py"}


def test_a_hub_of_environments_is_one_file(project: Project) -> None:
    project.write("trainer/experience/hubs/arena.py", HUB)
    shown = json.loads(project.settings("rollout.environment=arena:chess"))
    assert shown["rollout"]["environment"]["hub"] == "arena:chess"
    answer = project.output("-m", "trainer.experience.programs.hub_process", "arena", "chess", "{}")
    assert json.loads(answer) == {"refused": ["chess is closed", "open it"]}
    assert project.touched() == {"trainer/experience/hubs/arena.py"}


def test_an_image_variant_is_one_table(project: Project) -> None:
    project.append("images/matrix.toml", VARIANT)
    listed = json.loads(project.buildkit("targets", "--json"))
    assert ("cpu", "tiny") in {(variant["target"], variant["variant"]) for variant in listed}
    assert "cpu / tiny" in project.buildkit("render", "--target", "cpu", "--variant", "tiny")
    assert project.touched() == {"images/matrix.toml"}


def test_a_target_is_one_table_one_environment_table_and_a_row_on_either_side(project: Project) -> None:
    project.append("images/matrix.toml", TARGET)
    project.write("images/env/xpu.toml", TARGET_ENVIRONMENT)
    project.insert("buildkit/host/accelerators.py", "    )\n}\n", BUILDKIT_ROW)
    project.insert("entrypoints/host/accelerators.py", ")\n", LAUNCH_ROW)
    assert "ENV ZE_FLAG=1" in project.buildkit("render", "--target", "xpu")
    assert "--device" in project.buildkit("run", "--target", "xpu", "--gpus", "1", "--print", "docker", "--", "train")
    code = "from entrypoints.host.accelerators import accelerator_of; print(accelerator_of('xpu').device)"
    assert project.output("-c", code) == "xpu\n"
    assert project.touched() == {
        "images/matrix.toml",
        "images/env/xpu.toml",
        "buildkit/host/accelerators.py",
        "entrypoints/host/accelerators.py",
    }
