"""An engine in the test's own process, in the place of a run's engines."""

from collections.abc import Sequence

from trainer.rollout.engine import RolloutEngine
from trainer.rollout.sampling import Response, SamplingRequest


class OneEngine:
    """Looks like `Engines` to conversations."""

    version = 0
    in_flight = False

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def generate(self, requests: Sequence[SamplingRequest], homes: Sequence[int] | None) -> list[Response]:
        del homes
        return self._engine.generate(requests)
