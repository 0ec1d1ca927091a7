"""Supervised fine-tuning: its settings, its loss, and a whole run on two Ray nodes that is resumed."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from pydantic import ValidationError
from torch.testing import assert_close

from tests.trainer.tensors import normal, random_mask, seeds
from tests.trainer.whole_run import ROOT, Runs
from trainer.algorithms.losses.aggregation import GlobalCount, aggregate
from trainer.algorithms.registry import POLICY_LOSSES
from trainer.config.sections.data import DataConfig
from trainer.data.arithmetic import write_arithmetic
from trainer.data.completions import Completion
from trainer.runs.offline.run import completion_batch
from trainer.runs.offline.sft import SftConfig


def test_workers_take_one_step_per_batch_without_critic_and_reference() -> None:
    config = SftConfig(data=DataConfig(train_batch_size=8)).for_workers()
    assert config.actor.mini_batch_size == 8
    assert not config.needs_critic
    assert not config.needs_reference
    assert sum(config.longest_row) == 1024


@given(seed=seeds)
def test_the_loss_of_the_workers_is_the_mean_cross_entropy_of_all_learned_tokens(seed: int) -> None:
    actor = SftConfig().for_workers().actor
    log_probs, mask = normal(seed, 4, 6), random_mask(seed, 4, 6)
    policy = POLICY_LOSSES[actor.policy_loss].loss(log_probs, log_probs, mask.float(), mask)
    loss = aggregate(policy.loss, mask, actor.loss_aggregation, GlobalCount(int(mask.sum()), 4))
    assert_close(loss, -log_probs[mask].mean())


def test_only_the_learned_tokens_of_a_conversation_are_marked() -> None:
    batch = completion_batch(
        [Completion((1, 2), (3, 4, 5, 6), (True, False, False, True)), Completion((1,), (2, 3), (True, True))]
    )
    assert batch.token_ids.tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 0, 0, 0]]
    assert batch.response_mask.int().tolist() == [[1, 0, 0, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"actor": {"clip_ratio": 0.3}}, "actor.clip_ratio=0.3 has no effect on fine-tuning"),
        ({"actor": {"policy_loss": "gspo"}}, "actor.policy_loss=gspo has no effect on fine-tuning"),
        (
            {"actor": {"backend": "exact"}},
            "actor.backend=exact has no effect on fine-tuning, in which no engine samples",
        ),
        ({"actor": {"mini_batch_size": 8}}, "set data.train_batch_size"),
        ({"trainer": {"critic_warmup": 1}}, "trainer.critic_warmup=1 has no effect on fine-tuning"),
        ({"trainer": {"mode": "one_step_off"}}, "trainer.mode=one_step_off has no effect on fine-tuning"),
        ({"trainer": {"stop_at": 0.5}}, "trainer.stop_at=0.5 has no effect on fine-tuning"),
        ({"data": {"max_response_length": 64}}, "data.max_response_length has no effect.*set sft.max_length"),
    ],
)
def test_a_setting_that_fine_tuning_does_not_read_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        SftConfig.model_validate(settings)


def test_a_run_learns_and_a_resumed_one_ends_with_the_same_weights_to_the_bit(runs: Runs, tmp_path: Path) -> None:
    _, demonstrations, held_out = write_arithmetic(tmp_path, 64, 15, 9, dropped_carries=0.0, seed=0)
    common = {
        "model.path": runs.model,
        "data.train_files": demonstrations,
        "data.validation_files": held_out,
        "data.train_batch_size": 15,  # for two ranks
        "sft.response_key": "extra_info.answer",
        "sft.max_length": 128,
        "actor.learning_rate": 3e-3,
        "actor.weight_decay": 0.01,
        "actor.optimizer.betas": "[0.8,0.95]",
        "actor.schedule.name": "wsd",
        "actor.schedule.warmup_steps": 1,
        "actor.schedule.stable_ratio": 0.4,
        "actor.schedule.zero_indexed": False,
        "trainer.output_dir": runs.directory,
        "trainer.test_freq": 3,
        "trainer.total_steps": 6,
    }
    whole = runs.launch("sft", "sft", common | {"trainer.save_freq": 3})
    whole.succeed()
    first, *_, last = whole.metrics()
    assert last["sft/loss"] < whole.results(1)["sft/loss"]
    assert last["validation/sft_loss"] < first["validation/sft_loss"]
    rates = [whole.results(step)["actor/learning_rate"] for step in range(1, 7)]
    assert rates[:3] == pytest.approx([3e-3] * 3)
    assert rates[3] > rates[4] > rates[5] == 0
    checkpoint = whole.directory / "checkpoints" / "step_000003"
    resumed = runs.launch("sft", "sft-resumed", common | {"trainer.resume": checkpoint})
    resumed.succeed()
    assert [resumed.results(step) for step in (4, 5, 6)] == [whole.results(step) for step in (4, 5, 6)]
    assert weights(resumed.directory / "model") == weights(whole.directory / "model")
    assert weights(whole.directory / "model") != weights(runs.model)
    assert [row["step"] for row in runs.replay(whole, "--step", "3").metrics()] == [0, 1, 2, 3]


def test_verl_s_line_under_torchrun_fine_tunes(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, demonstrations, held_out = write_arithmetic(tmp_path, 64, 15, 9, dropped_carries=0.0, seed=0)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'images' / 'aliases'}:{os.environ['PYTHONPATH']}")
    settings = [
        f"data.train_files={demonstrations}",
        f"data.val_files={held_out}",
        "data.prompt_key=extra_info",
        "data.response_key=extra_info",
        "data.prompt_dict_keys=[question]",
        "+data.response_dict_keys=[answer]",
        "data.max_length=128",
        "data.train_batch_size=16",
        "data.micro_batch_size_per_gpu=4",
        f"model.partial_pretrain={runs.model}",
        f"trainer.default_local_dir={runs.directory}",
        "trainer.experiment_name=torchrun",
        "trainer.total_training_steps=2",
        "trainer.logger=[console]",
    ]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    run = runs.python([*torchrun, "-m", "verl.trainer.fsdp_sft_trainer", *settings], "torchrun")
    run.succeed()
    assert [row["step"] for row in run.metrics()][-1] == 2
    assert weights(run.directory / "model") != weights(runs.model)


def weights(model: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(model.glob("*.safetensors"))]
