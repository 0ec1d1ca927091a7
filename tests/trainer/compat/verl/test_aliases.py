"""The names of verl in the image: its modules, and the files that its launch lines read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trainer.main_ppo import devices

ROOT = Path(__file__).parents[4]
ALIASES = ROOT / "images" / "aliases"


def run(path: list[Path], *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", ["main_ppo", "main_fastrl"])
def test_verl_s_module_takes_verl_s_settings(module: str) -> None:
    ended = run([ROOT, ALIASES], "-m", f"verl.trainer.{module}", "--ddp_backend=nccl", "trainer.val_onli=True")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: trainer.val_onli: there is no such setting")


@pytest.mark.parametrize(
    ("module", "setting"),
    [
        ("verl.experimental.one_step_off_policy.main_ppo", "trainer.mode=one_step_off"),
        ("verl.experimental.fully_async_policy.fully_async_main", "trainer.mode=asynchronous"),
        ("recipe.partial_rollout.main_ppo", "trainer.mode=asynchronous"),
    ],
)
def test_the_asynchronous_entry_points_have_their_own_defaults(module: str, setting: str) -> None:
    # The greedy baseline needs whole batches, which the asynchronous modes say before anything starts.
    given = ["algorithm.adv_estimator=remax", "rollout.stop=[a]", "trainer.critic_warmup=1"]
    ended = run([ROOT, ALIASES], "-m", module, *given)
    assert ended.returncode == 2
    assert setting in ended.stderr or "critic_warmup" in ended.stderr


@pytest.mark.parametrize("module", ["sft_trainer", "sft_trainer_ray", "fsdp_sft_trainer"])
def test_fine_tuning_takes_verl_s_settings(module: str) -> None:
    ended = run([ROOT, ALIASES], "-m", f"verl.trainer.{module}", "optim.lr=1e-5", "data.max_lenght=8")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: data.max_lenght: there is no such setting")
    assert "data.max_length" in ended.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_torchrun_s_processes_only_the_first_trains(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"TORCHELASTIC_RUN_ID": "1", "RANK": rank, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    ended = run([ROOT, ALIASES], "-m", "verl.trainer.sft_trainer", "optim.lrr=1")
    assert ended.returncode == (2 if rank == "0" else 0)
    assert devices(launched) == ["trainer.nnodes=2", "trainer.n_gpus_per_node=2"]


@pytest.mark.parametrize(("gpus", "expected"), [(0, "trainer.n_gpus_per_node=0"), (1, "trainer.n_gpus_per_node=1")])
def test_one_process_of_torchrun_trains_on_cpu_without_gpus(
    gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert devices({"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})[1] == expected


def test_modules_that_do_something_else_say_what_to_use_instead() -> None:
    ended = run([ROOT, ALIASES], "-m", "verl.trainer.main_eval", "optim.lr=1e-5")
    assert ended.returncode == 2
    assert "without training" in ended.stderr
    assert "hint: " in ended.stderr


def test_an_installed_verl_comes_first(tmp_path: Path) -> None:
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("")
    ended = run([tmp_path, ROOT, ALIASES], "-c", "import verl; print(verl.__file__)")
    assert ended.stdout.startswith(str(tmp_path))


def test_the_copy_in_the_working_directory_hides_no_package(tmp_path: Path) -> None:
    (tmp_path / "verl" / "trainer").mkdir(parents=True)  # holds runtime_env.yaml only
    ended = run([tmp_path, ROOT, ALIASES], "-c", "import verl.trainer.main_ppo as found; print(found.__file__)")
    assert ended.stdout.startswith(str(ALIASES))


def test_the_runtime_environment_installs_nothing() -> None:
    assert set(yaml.safe_load((ALIASES / "verl" / "trainer" / "runtime_env.yaml").read_text())) == {"env_vars"}


def test_gsm8k_is_prepared_from_downloaded_files(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    (tmp_path / "main").mkdir()
    for split in ("train", "test"):
        table = pa.table({"question": ["How many?"], "answer": ["Some.\n#### 3"]})
        pq.write_table(table, tmp_path / "main" / f"{split}-00000-of-00001.parquet")
    script = str(ALIASES / "examples" / "data_preprocess" / "gsm8k.py")
    ended = run([ROOT], script, "--local_dir", str(tmp_path / "out"), "--local_dataset_path", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    for split in ("train", "test"):
        (row,) = pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist()
        assert (row["reward_model"]["ground_truth"], row["extra_info"]["split"]) == ("3", split)
