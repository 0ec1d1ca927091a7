"""Sections, keys and reasons that several files of this folder share.

A key that ends in `.*` stands for any key of a mapping that verl leaves open.
"""

from typing import get_args

from trainer.algorithms.losses.aggregation import Aggregation

ACTOR, ROLLOUT, REF, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref", "model"))

AGGREGATIONS: dict[str, str] = {mode: mode for mode in get_args(Aggregation)}

LOG_PROB_KEYS = (
    *("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu"),
    *("log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
)
ENTROPY_KEYS = ("entropy_from_logits_with_chunking", "entropy_checkpointing")
CHECKPOINT_KEYS = ("contents", "save_contents", "load_contents", "async_save", "mbridge_config", "mbridge_config.*")
PROFILER_KEYS = ("tool", "all_ranks", "ranks", "discrete", "save_path", "tool_config", "tool_config.*")

DYNAMIC = "ppo_max_token_len_per_gpu makes micro-batches dynamic"
PACKED = "rows are always packed without padding"
KERNELS = "log-probs are always computed in chunks, and layers are compiled on GPUs"
CHECKPOINT = "a checkpoint always holds everything that an exact continuation needs"
TRACES = "trainer.profiler writes traces"
SAMPLES = "`trainer samples RUN` shows the responses of every step"
