"""vLLM's executor for one rank of an engine that spans several devices."""

import tempfile
from pathlib import Path

from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from trainer.cluster.place import Team


def shard_executor(team: Team) -> type[ExecutorWithExternalLauncher]:
    """The executor of this rank.

    Every rank runs the whole engine on its part of the model. All receive the same calls in the same order and
    schedule alike, so they only exchange tensors, and each rank has the responses.
    """
    meeting = Path(tempfile.gettempdir(), team.meeting)

    class ShardExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
        def _distributed_args(self) -> tuple[str, int, int]:
            """vLLM's: how the ranks meet, this rank, and the number of its device."""
            return f"file://{meeting}", team.rank, team.rank

    return ShardExecutor
