"""Engines that fail: real ones on their own Ray cluster, with an actor that has the weights."""

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.trainer.ray_node import ray_node
from trainer.cluster.nodes import find_nodes, reserve_slots
from trainer.cluster.workers import WorkerGroup
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.errors import WorkerError
from trainer.roles.factories import make_actor, make_rollout
from trainer.rollout.engines import Engines, EngineWorker
from trainer.rollout.sampling import Response, SamplingRequest
from trainer.runs.interfaces import ActorRole
from trainer.runs.workers import connect_ranks, start_engines, start_group

Groups = tuple[WorkerGroup[EngineWorker], WorkerGroup[ActorRole], Config]

REQUESTS = [SamplingRequest((5, 6, 7 + row), 1.0, seed=row) for row in range(8)]


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Groups]:
    """Two engines and an actor, whose weights are the model's."""
    directory = tmp_path_factory.mktemp("repair")
    config = Config.model_validate(
        {
            "model": {"path": model},
            "rollout": {"engine": "transformers", "timeout": 10, "max_repairs": 1},
            "actor": {"learning_rate": 1e-2},
        }
    )
    with ray_node():
        slots = reserve_slots(find_nodes(1, 0) * 2, 0, timeout=60)
        placement = {"rollout": slots, "actor": slots[:1]}
        rollout = start_engines(make_rollout, config, placement["rollout"])
        actor = start_group("actor", make_actor, config, placement)
        connect_ranks([actor], directory, run_steps=1, timeout=120)
        yield rollout, actor, config


def engine_process() -> psutil.Process:
    """The youngest engine among this process's children, which may include zombies of earlier tests."""
    living = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    engines = [child for child in living if " ".join(child.cmdline()).startswith("ray::RolloutWorker")]
    return max(engines, key=psutil.Process.create_time)


def test_a_replaced_engine_gets_the_broadcast_weights_even_if_the_actor_has_learned_since(
    groups: Groups,
) -> None:
    rollout, actor, config = groups
    by_broadcast = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"weight_transfer": "broadcast"})}
    )
    engines = Engines(rollout, actor, by_broadcast, on_shared_gpus=False)
    engines.start()
    responses = engines.generate(REQUESTS)
    actor.call(ActorRole.update, batch(responses), [len(REQUESTS)])
    engine_process().kill()
    assert engines.generate(REQUESTS) == responses
    assert engines.take_repairs() == 1
    engines.sync_weights()  # to both again, in a process group that is formed anew
    assert engines.take_repairs() == 0
    learned = engines.generate(REQUESTS)
    assert all(earlier.token_ids != later.token_ids for earlier, later in zip(learned, responses, strict=True))
    actor.call(ActorRole.update, batch(learned), [len(REQUESTS)])
    engine_process().kill()
    engines.sync_weights()  # which a peer of the broadcast does not hear
    assert engines.take_repairs() == 1
    after = engines.generate(REQUESTS)
    assert all(earlier.token_ids != later.token_ids for earlier, later in zip(after, learned, strict=True))


def batch(responses: Sequence[Response]) -> Batch:
    """A batch that makes its responses likelier."""
    sampled = Batch.from_responses(
        [request.prompt for request in REQUESTS],
        [response.token_ids for response in responses],
        [response.log_probs for response in responses if response.log_probs],
    )
    assert sampled.rollout_log_probs is not None
    return sampled.with_(old_log_probs=sampled.rollout_log_probs, advantages=sampled.response_mask.float())


def test_hanging_or_dead_engines_are_replaced_up_to_the_limit(groups: Groups, caplog: pytest.LogCaptureFixture) -> None:
    rollout, actor, config = groups
    engines = Engines(rollout, actor, config, on_shared_gpus=False)
    engines.start()
    responses = engines.generate(REQUESTS)
    assert engines.take_repairs() == 0

    engine_process().send_signal(signal.SIGSTOP)
    assert engines.generate(REQUESTS) == responses
    assert engines.take_repairs() == 1
    assert "no answer to generate within 10 s" in caplog.text
    assert engines.generate(REQUESTS) == responses  # nothing to repair: the count in a row is 0 again

    engine_process().kill()
    engines.sync_weights()
    assert engines.take_repairs() == 1
    engine_process().kill()
    with pytest.raises(WorkerError, match=r"engines failed 2 times in a row, at last: rollout rank . on .* died"):
        engines.generate(REQUESTS)
