"""vLLM as the rollout engine. Its module is imported when an engine starts, because vLLM reads the environment then."""

from collections.abc import Sequence

from trainer.cluster.place import Team
from trainer.config.tree import Config
from trainer.rollout.engine import ALONE, EngineRow, RolloutEngine


def open_engine(config: Config, device: str, end_token_ids: Sequence[int], team: Team = ALONE) -> RolloutEngine:
    """A vLLM engine in this process, or this process's rank of an engine that spans several."""
    from trainer.rollout.vllm.engine import VllmEngine

    return VllmEngine(config, device, end_token_ids, team)


ROW = EngineRow(
    open_engine,
    package="vllm",
    preference=1,
    open_shard=open_engine,
    in_flight=True,
    quantizes=True,
    speculates=True,
    records_routes=True,
    loads_files=True,
)
