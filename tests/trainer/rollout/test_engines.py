"""All engines of a run as one. The workers are fakes; real ones fail in tests/trainer/runs/recovery/test_repair.py."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.cluster.calls import Task
from trainer.config.tree import Config
from trainer.errors import WorkerError
from trainer.rollout.engines import Engines
from trainer.rollout.sampling import Part, Response, SamplingRequest
from trainer.weights.buckets import SharedPart

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

    def call(self, method: Any, *_: object) -> list[Any]:
        """What an engine says at the start; no weights from an actor."""
        return [{"chosen": ("vllm", "it is a fake"), "notices": ["no fast path"]}.get(method.__name__, ([], 0))]

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


class RecordingGroup(FakeGroup):
    """Records the methods that were called on it."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def attempt(
        self, tasks: Mapping[int, Task[Any, Any]], _timeout: float = 0
    ) -> tuple[dict[int, Any], dict[int, WorkerError]]:
        self.called += [task.method for task in tasks.values()]
        return dict.fromkeys(tasks), {}


class OnSharedGpus(RecordingGroup):
    """Shares all weights at once; `fails` is how often copying fails."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = 0

    def call(self, method: Any, *_: object) -> list[Any]:
        return [SharedPart((), ends=True)] if method.__name__ == "share_weights" else super().call(method)

    def restart(self, _rank: int) -> None:
        self.called.append("restart")

    def attempt(
        self, tasks: Mapping[int, Task[Any, Any]], _timeout: float = 0
    ) -> tuple[dict[int, Any], dict[int, WorkerError]]:
        results = super().attempt(tasks)
        if self.called[-1] == "copy_weights" and self.fails:
            self.fails -= 1
            return {}, {0: WorkerError("gone")}
        return results


def test_fake_engines_on_the_actor_s_gpus_sleep_before_they_copy_weights() -> None:
    group = OnSharedGpus()
    engines = Engines(group, group, Config(), on_shared_gpus=True)  # type: ignore[arg-type]
    engines.start()
    assert group.called == ["sleep", "copy_weights"]
    group.fails = 1
    group.called.clear()
    engines.sync_weights()
    assert group.called == ["sleep", "copy_weights", "restart", "sleep", "copy_weights"]


class OverTheObjectStore(RecordingGroup):
    """Publishes no weights."""

    def call(self, method: Any, *_: object) -> list[Any]:
        self.called.append(method.__name__)
        return super().call(method)


def test_weights_are_gathered_once_while_fake_engines_may_still_sample() -> None:
    group = OverTheObjectStore()
    engines = Engines(group, group, Config(), on_shared_gpus=False)  # type: ignore[arg-type]
    engines.sync_weights()
    assert group.called == ["publish_weights", "replace_weights"]
    group.called.clear()
    engines.gather_weights()
    assert group.called == ["publish_weights"]
    engines.sync_weights()
    engines.sync_weights()
    assert group.called == ["publish_weights", "replace_weights"] * 2


def test_weights_gathered_from_a_lost_actor_do_not_reach_fake_engines() -> None:
    group = OverTheObjectStore()
    engines = Engines(group, group, Config(), on_shared_gpus=False)  # type: ignore[arg-type]
    engines.gather_weights()
    engines.reconnect(version=0)
    assert group.called == ["publish_weights", "publish_weights", "replace_weights"]


def test_fake_engines_on_the_actor_s_gpus_get_nothing_before_they_pause() -> None:
    group = OnSharedGpus()
    engines = Engines(group, group, Config(), on_shared_gpus=True)  # type: ignore[arg-type]
    engines.gather_weights()
    assert group.called == []


class TwoEngines(FakeGroup):
    """Each answers with the first token of the prompt, and records its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[int, list[int]] = {}

    def teams(self) -> list[range]:
        return [range(1), range(1, 2)]

    def attempt(
        self, tasks: Mapping[int, Task[Any, Any]], _timeout: float = 0
    ) -> tuple[dict[int, Any], dict[int, WorkerError]]:
        self.asked = {rank: [request.prompt[0] for request in task.arguments[0]] for rank, task in tasks.items()}
        return {rank: [Response((token,), (-0.5,)) for token in tokens] for rank, tokens in self.asked.items()}, {}


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


class InFlight(TwoEngines):
    """Each adds a token per call to every response that it holds, until three are there."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[dict[int, list[int]]] = []
        self.held: dict[int, dict[int, int]] = {0: {}, 1: {}}
        self.restarted: list[int] = []
        self.broken: set[int] = set()

    def restart(self, rank: int) -> None:
        self.restarted.append(rank)
        self.held[rank] = {}

    def attempt(
        self, tasks: Mapping[int, Task[Any, Any]], _timeout: float = 0
    ) -> tuple[dict[int, Any], dict[int, WorkerError]]:
        if next(iter(tasks.values())).method != "advance":
            return dict.fromkeys(tasks), {}
        self.started.append({rank: [*task.arguments[0]] for rank, task in tasks.items()})
        failures = {rank: WorkerError("gone") for rank in tasks if rank in self.broken}
        self.broken = set()
        answers = {rank: self._parts(rank, task.arguments[0]) for rank, task in tasks.items() if rank not in failures}
        return answers, failures

    def _parts(self, rank: int, new: Mapping[int, SamplingRequest]) -> dict[int, Part]:
        held = self.held[rank]
        held |= dict.fromkeys(new, 0)
        for number in held:
            held[number] += 1
        parts = {number: Part((7,), (-0.5,), False, finished=count == 3) for number, count in held.items()}
        self.held[rank] = {number: count for number, count in held.items() if count < 3}
        return parts


def in_flight(mode: str = "asynchronous", **rollout: Any) -> tuple[Engines, InFlight]:
    config = Config.model_validate(
        {
            "trainer": {"mode": mode},
            "algorithm": {"correction": "tis"},
            "rollout": rollout,
            "data": {"max_response_length": 100},
        }
    )
    group = InFlight()
    engines = Engines(group, group, config, on_shared_gpus=False)  # type: ignore[arg-type]
    engines.start()
    return engines, group


def group_of(prompt: int, *numbers: int) -> dict[int, SamplingRequest]:
    return {number: SamplingRequest((prompt,), 1.0, seed=number) for number in numbers}


def test_a_group_goes_to_the_fake_engine_with_the_fewest_responses_and_stays_there() -> None:
    engines, group = in_flight()
    assert engines.in_flight
    assert engines.advance(group_of(1, 10, 11, 12) | group_of(2, 20), 1).keys() == {10, 11, 12, 20}
    engines.advance(group_of(3, 30, 31), 1)
    assert engines.advance({40: SamplingRequest((4,), 1.0)}, 1, homes={40: 5})[12].finished
    assert group.started == [{0: [10, 11, 12], 1: [20]}, {0: [], 1: [30, 31]}, {0: [], 1: [40]}]
    assert engines.under_way == {30, 31, 40}
    engines.advance({}, 1)
    assert group.started[-1] == {1: []}  # nothing for an engine without responses
    assert engines.under_way == {40}


def test_a_fake_engine_that_is_replaced_or_sleeps_holds_no_response_any_more() -> None:
    engines, group = in_flight()
    engines.advance(group_of(1, 10) | group_of(2, 20), 1)
    group.broken = {1}
    assert engines.advance({}, 1).keys() == {10}
    assert (group.restarted, engines.under_way, engines.take_repairs()) == ([1], {10}, 1)
    engines.advance(group_of(2, 20), 1)
    engines.sync_weights()
    assert engines.under_way == {20}
    engines.sleep()
    assert engines.under_way == set()


def test_fake_engines_that_keep_their_memory_keep_their_responses() -> None:
    engines, _ = in_flight(sleep=False)
    engines.advance(group_of(1, 10), 1)
    engines.sleep()
    assert engines.under_way == {10}


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({}, "continue under new weights and keep their KV cache"),
        ({"segment_length": 100}, "finish under the weights that they began with"),
    ],
)
def test_a_run_says_how_its_responses_take_new_weights(
    caplog: pytest.LogCaptureFixture, rollout: dict[str, Any], message: str
) -> None:
    caplog.set_level("INFO")
    engines, _ = in_flight(**rollout)
    assert message in caplog.text
    assert engines.in_flight == (not rollout)


def test_a_run_logs_what_its_engines_lack(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    in_flight()
    assert "no fast path" in caplog.messages


@pytest.mark.parametrize("mode", ["synchronous", "one_step_off"])
def test_conversations_of_other_runs_may_stay_in_flight_between_segments(mode: str) -> None:
    engines, _ = in_flight(mode, segment_length=100)
    assert engines.in_flight
