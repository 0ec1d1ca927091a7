"""Environment variables that vLLM reads when it is imported. Values that the user set take precedence."""

import os

_DEFAULTS = {
    # The engine runs in the process of its Ray actor: one process less to start, to feed and to supervise.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # With `auto`, all engines of a machine are bound to its first core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # vLLM's warnings are about choices that the trainer makes on purpose.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# An eager engine still compiles a helper for log-probs, which delays the first response by 3 s.
_EAGER = {"TORCHDYNAMO_DISABLE": "1"}
# Of an engine whose log-probs the trainer's must equal: vLLM takes operators whose rows depend on nothing but
# themselves, and compiles none, because compiled ones round in other places.
EXACT = {"VLLM_BATCH_INVARIANT": "1", "TORCHDYNAMO_DISABLE": "1"}


def engine_environment(enforce_eager: bool) -> dict[str, str]:
    """The variables to set in the process of an engine."""
    defaults = _DEFAULTS | (_EAGER if enforce_eager else {})
    return {name: os.environ.get(name, value) for name, value in defaults.items()}
