"""All engines of a run as one. The workers are fakes; real ones fail in tests/trainer/runs/test_repair.py."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.cluster.calls import Task
from trainer.config.tree import Config
from trainer.errors import WorkerError
from trainer.rollout.engines import Engines
from trainer.rollout.sampling import Response, SamplingRequest

REQUEST = SamplingRequest((5,), 1.0, seed=0)
RESPONSE = Response((7,), (-0.5,), ended=True)


class FakeGroup:
    """One worker whose calls to `generate` follow `script`: True succeeds, False fails."""

    timeout = 60.0

    def __init__(self) -> None:
        slot = SimpleNamespace(device="cpu", rank=0)
        self.workers = [SimpleNamespace(spec=SimpleNamespace(slot=slot))]
        self.script: list[bool] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        return 1

    def teams(self) -> list[range]:
        return [range(1)]

    def call(self, _method: object) -> list[Any]:
        return [([], 0)]

    def restart(self, _rank: int) -> None: ...

    def attempt(
        self, tasks: Mapping[int, Task[Any, Any]], _timeout: float = 0
    ) -> tuple[dict[int, Any], dict[int, WorkerError]]:
        if tasks[0].method != "generate":
            return dict.fromkeys(tasks), {}
        self.meanwhile()
        return ({0: [RESPONSE]}, {}) if self.script.pop(0) else ({}, {0: WorkerError("gone")})


def test_repairs_that_are_reported_while_fake_engines_sample_do_not_count_as_repairs_in_a_row() -> None:
    group = FakeGroup()
    config = Config.model_validate({"rollout": {"max_repairs": 1}})
    engines = Engines(group, group, config, on_shared_gpus=False)  # type: ignore[arg-type]
    group.script = [False, True]
    assert engines.generate([REQUEST]) == [RESPONSE]
    reported: list[int] = []
    group.meanwhile = lambda: reported.append(engines.take_repairs())
    group.script = [True]
    engines.generate([REQUEST])
    assert reported == [1]
    group.script = [False, True]
    engines.generate([REQUEST])  # the first repair in a row, so allowed
    assert sum(reported) + engines.take_repairs() == 2
    group.script = [False, False]
    with pytest.raises(WorkerError, match="engines failed 2 times in a row, at last: gone"):
        engines.generate([REQUEST])


class TwoEngines(FakeGroup):
    """Each answers with the first token of the prompt, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[int, list[int]] = {}

    def teams(self) -> list[range]:
        return [range(1), range(1, 2)]

    def attempt(
        self, tasks: Mapping[int, Task[Any, Any]], _timeout: float = 0
    ) -> tuple[dict[int, Any], dict[int, WorkerError]]:
        self.asked = {rank: [request.prompt[0] for request in task.arguments[0]] for rank, task in tasks.items()}
        return {rank: [Response((token,), (-0.5,)) for token in own] for rank, own in self.asked.items()}, {}


def test_conversations_stay_with_the_fake_engine_that_has_their_start() -> None:
    group = TwoEngines()
    engines = Engines(group, group, Config(), on_shared_gpus=False)  # type: ignore[arg-type]
    requests = [SamplingRequest((token,), 1.0) for token in (10, 11, 12, 13)]

    def answered(homes: list[int] | None) -> list[int]:
        return [response.token_ids[0] for response in engines.generate(requests, homes)]

    assert answered(None) == [10, 11, 12, 13]
    assert group.asked == {0: [10, 11], 1: [12, 13]}
    assert answered([7, 4, 5, 7]) == [10, 11, 12, 13]
    assert group.asked == {0: [11], 1: [10, 12, 13]}
