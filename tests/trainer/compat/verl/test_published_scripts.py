"""Scripts of verl: the commands that they would run, and what these mean here."""

from pathlib import Path

import pytest

from benchmarks.recipe_commands import ScriptEndedError, UnsetVariableError, training_commands
from trainer.errors import ConfigError
from trainer.main_ppo import command_of, preset_of

SCRIPT = """\
#!/bin/bash
set -xeuo pipefail
N=${N:-8}
MODEL=(actor_rollout_ref.model.path="Some/Model" data.max_prompt_length=$((128 * 2)))
if [ "$N" -gt 4 ]; then LOSS=grpo; else LOSS=rloo; fi
rm -rf data
nvidia-smi > /dev/null 2>&1
LAUNCH=(uv run python3)
"${LAUNCH[@]}" -X faulthandler -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=$LOSS `# a comment` \\
    "${MODEL[@]}" \\
    actor_rollout_ref.rollout.n=$N \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 data.train_batch_size=256 \\
    trainer.logger='["console","wandb"]' "$@" 2>&1 | tee "run $N.log"
"""


def test_bash_expands_the_script_and_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (command,) = training_commands(SCRIPT, {"1": "trainer.nnodes=2"}, tmp_path)
    assert command.entry == "verl.trainer.main_ppo"
    assert command.overrides == [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.path=Some/Model",
        "data.max_prompt_length=256",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "data.train_batch_size=256",
        'trainer.logger=["console","wandb"]',
        "trainer.nnodes=2",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert "algorithm.adv_estimator=rloo" in training_commands(SCRIPT, {"N": "2"})[0].overrides


@pytest.mark.parametrize(
    "line",
    [
        "python3 -m verl.trainer.main_ppo a.b=1",
        "srun --ntasks=1 docker exec box python -m verl.trainer.main_ppo a.b=1",
        "srun bash -c 'cd /verl && python3 -m verl.trainer.main_ppo a.b=1'",
        "ray job submit --runtime-env=verl/trainer/runtime_env.yaml -- python3 -m verl.trainer.main_ppo a.b=1",
        'ray job submit --runtime-env-json=\'{\n "PYTHONPATH": "/a"}\' -- python3 -m verl.trainer.main_ppo a.b=1',
        "for try in 1; do python3 -m verl.trainer.main_ppo a.b=1; done",
        "PATH=/bin:/usr/bin; touch made; python3 -m verl.trainer.main_ppo a.b=1 >made",
        "cd $(dirname ${BASH_SOURCE[0]}); exec python3 -m verl.trainer.main_ppo a.b=1",
    ],
)
def test_the_command_is_found_behind_its_launcher(line: str, tmp_path: Path) -> None:
    (command,) = training_commands(line, {}, tmp_path)
    assert command.overrides == ["a.b=1"]
    assert not list(tmp_path.iterdir())


def test_torchrun_s_devices_are_settings() -> None:
    line = "torchrun --standalone --nnodes=1 --nproc_per_node 4 -m verl.trainer.sft_trainer optim.lr=2e-5"
    (command,) = training_commands(line, {})
    assert command.devices == ("trainer.nnodes=1", "trainer.n_gpus_per_node=4")
    assert (command.overrides, command_of(command.entry)) == (["optim.lr=2e-5"], "sft")


def test_a_required_variable_is_named() -> None:
    with pytest.raises(UnsetVariableError, match="requires the variable HOME_OF_DATA"):
        training_commands("python3 -m m data.train_files=${HOME_OF_DATA:?}", {})


def test_a_script_that_refuses_to_start_is_quoted() -> None:
    script = 'set -ex; [ -n "${BASE:-}" ] || { echo "BASE is not set. Set it to a folder."; exit 1; }; python m.py a=1'
    with pytest.raises(ScriptEndedError, match=r"status 1 before it starts any training: BASE is not set\. Set it"):
        training_commands(script, {})
    assert training_commands(script, {"BASE": "here"})


@pytest.mark.parametrize(
    ("entry", "preset"),
    [
        ("verl.trainer.main_ppo", "verl"),
        ("examples/split_placement/main_ppo_split.py", "verl"),
        ("verl.experimental.one_step_off_policy.main_ppo", "verl_one_step_off"),
        ("recipe.dapo.main_dapo", "verl_dapo"),
    ],
)
def test_the_module_of_a_command_chooses_the_defaults(entry: str, preset: str) -> None:
    assert preset_of(entry) == preset


@pytest.mark.parametrize("entry", ["recipe.gvpo.gvpo_main_ppo", "recipe.sppo.main_sppo", "verl.trainer.main_eval"])
def test_a_module_that_trains_something_else_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match=entry):
        preset_of(entry)
