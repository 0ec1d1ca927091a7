"""The environment of vLLM, which reads it when it is imported; what the user set comes first."""

import os

_DEFAULTS = {
    # The engine lives in the process of its Ray actor: one process less to start, to feed and to lose.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # `auto` binds every engine of a machine to the same first core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Its warnings are about choices made here on purpose.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# Eager engines still compile a helper of their log-probs, which costs the first response 3 s.
_EAGER = {"TORCHDYNAMO_DISABLE": "1"}


def engine_environment(enforce_eager: bool) -> dict[str, str]:
    """The variables to set in an engine's process."""
    defaults = _DEFAULTS | (_EAGER if enforce_eager else {})
    return {name: os.environ.get(name, value) for name, value in defaults.items()}
