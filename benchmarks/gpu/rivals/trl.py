"""TRL's GRPO on the job of `benchmarks.gpu.common.write_job`, on one GPU, tuned as its guides advise.

    python -m benchmarks.gpu.step --side trl --algorithm grpo --samples 8 …    # starts this program

Settings, from TRL's guides (https://huggingface.co/docs/trl: speeding_up_training, vllm_integration,
reducing_memory_usage, grpo_trainer):

- vLLM in the trainer's process (`vllm_mode=colocate`), without sleep mode, which only saves memory, and with a context
  no longer than the job's;
- no correction for the difference between vLLM and trainer: it costs a pass over all responses;
- flash attention, bfloat16 with float32 master weights, Liger's kernels for the layers, TRL's own chunked head;
- as many rows per micro-batch as `--rival-tokens` allows; activations are recomputed, TRL's default, or kept where the
  GPU has room for them (`--rival-keeps`).

TRL pads every row to the longest of its step, and always asks vLLM for log-probs.

On the CPU (`--cpu`) Transformers samples and the attention is torch's; everything else is the same code.

An offline host with torch 2.11, vLLM 0.26 and Transformers 5.10.4 needs, as wheels: trl 1.16.0 (0.9 MB; it accepts
vLLM 0.22 to 0.31 and Transformers from 4.56.2), liger-kernel 0.8.5 (0.9 MB), accelerate 1.15.0 (0.4 MB), datasets 5.2.0
with dill 0.4.1 and multiprocess 0.70.19 (0.9 MB in all), pandas and xxhash; and flash-attn, or something with its
interface. None of them compiles anything on installation.
"""

import argparse
import json
import os
import runpy
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import synchronize


def rows_per_micro_batch(responses: int, tokens: int, longest: int) -> int:
    """The largest number of rows of the longest length within `tokens` that divides the responses of a step."""
    most = max(1, min(responses, tokens // longest))
    return next(rows for rows in range(most, 0, -1) if responses % rows == 0)


def command(job: Path, options: argparse.Namespace, steps: Path) -> list[str]:
    """The command that runs TRL and writes a row per step to `steps`; `options` are those of `benchmarks.gpu.step`."""
    responses, longest = options.batch * options.samples, options.prompt + options.response
    rows = rows_per_micro_batch(responses, options.rival_tokens, longest)
    settings: dict[str, Any] = {
        "output_dir": str(steps.with_suffix("")),
        "max_steps": options.steps,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "num_generations": options.samples,
        "max_completion_length": options.response,
        "temperature": 1.0,
        "beta": 0.001,
        "shuffle_dataset": False,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": responses // rows,
        "gradient_checkpointing": not options.rival_keeps,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    if options.cpu:
        # Without end tokens, Transformers must be told to go on.
        minimum = {} if options.varies else {"min_new_tokens": options.response}
        settings |= {"use_cpu": True, "bf16": False, "generation_kwargs": minimum}
    else:
        settings |= {
            "bf16": True,
            "model_init_kwargs": {"attn_implementation": "flash_attention_2"},
            "use_liger_kernel": True,
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.3,
            "vllm_max_model_length": longest,
            "vllm_importance_sampling_correction": False,
            "generation_kwargs": {"ignore_eos": not options.varies},
        }
    return [sys.executable, "-m", "benchmarks.gpu.rivals.trl", str(job), str(steps), json.dumps(settings)]


class PhaseClock:
    """Seconds of named phases of a step. A phase within another counts for itself only."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._within = [0.0]
        self._began = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        synchronize()
        begin = time.perf_counter()
        self._within.append(0.0)
        try:
            yield
        finally:
            synchronize()
            taken = time.perf_counter() - begin
            self._seconds[name] += taken - self._within.pop()
            self._within[-1] += taken

    def step(self) -> dict[str, float]:
        """The phases since the last call in the order of a step, the rest as the update, and the whole."""
        synchronize()
        now = time.perf_counter()
        whole, self._began = now - self._began, now
        seconds = {name: self._seconds[name] for name in ("sync_weights", "generate", "reference", "reward")}
        self._seconds.clear()
        self._within = [0.0]
        return {**seconds, "update_actor": whole - sum(seconds.values()), "step": whole}


def train(job: Path, steps: Path, settings: dict[str, Any]) -> None:
    """Runs TRL's trainer with its phases timed."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock = PhaseClock()
    score = runpy.run_path(str(job / "reward.py"))["compute_score"]

    def reward(completions: Any, **_: Any) -> list[float]:
        return [score("random", completion[0]["content"], "0") for completion in completions]

    class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
        """TRL's trainer, whose methods outside the update are timed."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            if self.use_vllm:
                sync = self.vllm_generation.sync_weights

                def timed_sync() -> None:
                    with clock.phase("sync_weights"):
                        sync()

                self.vllm_generation.sync_weights = timed_sync

        def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
            with clock.phase("generate"):
                return super()._generate_single_turn(*arguments, **named)

        def _calculate_rewards(self, *arguments: Any, **named: Any) -> Any:
            with clock.phase("reward"):
                return super()._calculate_rewards(*arguments, **named)

        def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
            if torch.is_grad_enabled():  # a part of the update
                return super()._get_per_token_logps_and_entropies(*arguments, **named)
            with clock.phase("reference"):
                return super()._get_per_token_logps_and_entropies(*arguments, **named)

    class Steps(TrainerCallback):  # type: ignore[misc]
        """Writes a row at the end of each step."""

        def __init__(self) -> None:
            self._tokens = 0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.step()

        def on_step_end(self, _arguments: Any, state: Any, *_: Any, **__: Any) -> None:
            seen = int(state.num_input_tokens_seen)
            row = {"end": time.time(), "seconds": clock.step(), "tokens": seen - self._tokens}
            self._tokens = seen
            with steps.open("a") as file:
                file.write(json.dumps(row) + "\n")

    trainer = TimedTrainer(
        model=str(job / "model"),
        reward_funcs=reward,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_parquet(str(job / "train.parquet")).select_columns(["prompt"]),
        callbacks=[Steps()],
    )
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, help="directory of `write_job`")
    parser.add_argument("steps", type=Path, help="file of rows, one per step")
    parser.add_argument("settings", type=json.loads, help="of TRL's GRPOConfig, as JSON")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    train(options.job, options.steps, options.settings)


if __name__ == "__main__":
    main()
