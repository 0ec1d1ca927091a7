"""A rollout engine, or one rank of it: samples responses with the weights that it received last."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import ray
import torch
from ray import ObjectRef

from trainer.cluster.garbage import collect_garbage
from trainer.cluster.place import RankPlace, Team
from trainer.config.tree import Config
from trainer.data.batches.routes import Routes
from trainer.rollout.end_tokens import end_token_ids
from trainer.rollout.engine import InFlightEngine, choose_engine, open_engine
from trainer.rollout.occupancy import Occupancy, sampling_load
from trainer.rollout.sampling import Part, Response, SamplingRequest
from trainer.training.ranks.process_group import connect_store, name_interface
from trainer.weights.buckets import BucketLayout, SharedPart, StoredBucket
from trainer.weights.channel import WeightChannel

ResponseType = TypeVar("ResponseType", bound=Response)


class RolloutWorker:
    """An engine in this process, or this process's rank of an engine that spans the devices of its team."""

    def __init__(self, config: Config, place: RankPlace, team: Team) -> None:
        self._config = config
        self._place = place
        self._team = team
        # A process sees the GPUs of its team, in the order of the ranks.
        self._device = torch.device(place.device, team.rank) if place.device == "cuda" else torch.device("cpu")
        self._channel: WeightChannel | None = None
        self._chosen = choose_engine(config.rollout.engine)
        self._engine = open_engine(self._chosen[0], config, place.device, end_token_ids(config.model.directory), team)
        self._occupancy = Occupancy()
        self._begun: dict[int, SamplingRequest] = {}  # in flight, without a token yet
        collect_garbage()  # now, and not while it samples

    def chosen(self) -> tuple[str, str]:
        """The engine's name, and the reason for the choice."""
        return self._chosen

    def notices(self) -> list[str]:
        """See `RolloutEngine.notices`."""
        return self._engine.notices()

    def generate(self, requests: Sequence[SamplingRequest]) -> list[Response]:
        """One response per request, in their order; nothing from ranks other than the first."""
        if self._team.rank > 0:
            self._engine.generate(requests)
            return []
        with sampling_load(self._engine.load) as loads:
            responses = [_stored(response) for response in self._engine.generate(requests)]
        self._occupancy += Occupancy.of(loads, requests, responses)
        return responses

    def take_occupancy(self) -> Occupancy:
        """How full the engine was since the last call; nothing from ranks other than the first."""
        taken, self._occupancy = self._occupancy, Occupancy()
        if self._team.rank > 0:
            return taken
        drafts = self._engine.take_drafts()
        return taken + Occupancy(drafted_tokens=drafts.drafted, accepted_tokens=drafts.accepted)

    def advance(self, new: Mapping[int, SamplingRequest], steps: int) -> dict[int, Part]:
        """See `InFlightEngine.advance`; nothing from ranks other than the first."""
        engine = cast(InFlightEngine, self._engine)
        if self._team.rank > 0:
            engine.advance(new, steps)
            return {}
        with sampling_load(engine.load) as loads:
            parts = {number: _stored(part) for number, part in engine.advance(new, steps).items()}
        self._begun |= new
        first = parts.keys() & self._begun.keys()
        requests = [self._begun.pop(number) for number in first]
        self._occupancy += Occupancy.of(loads, requests, [parts[number] for number in first])
        return parts

    def replace_weights(self, buckets: Sequence[ObjectRef]) -> None:
        """Loads the buckets from Ray's object store; later responses are sampled with these weights."""
        arrived: list[StoredBucket] = ray.get(list(buckets))
        if self._place.device == "cuda":
            self._engine.copy_weights(bucket.on(self._device) for bucket in arrived)
        else:
            self._engine.replace_weights(arrived)

    def join_channel(self, address: str, port: int, rank: int, size: int) -> None:
        """Joins the process group that the actor broadcasts weights in."""
        if self._channel is not None:
            self._channel.close()
        timeout = self._config.trainer.worker_timeout / 2  # shorter than the caller's time limit
        name_interface(self._place.address)
        store = connect_store(address, port, size, timeout)
        self._channel = WeightChannel(store, rank, size, self._device, timeout)

    def receive_weights(self, layouts: Sequence[BucketLayout]) -> None:
        """Receives the buckets that the actor broadcasts; later responses are sampled with these weights."""
        assert self._channel is not None
        take = self._engine.copy_weights if self._place.device == "cuda" else self._engine.replace_weights
        take(self._channel.receive(layouts))

    def copy_weights(self, part: SharedPart, begins: bool) -> None:
        """Copies weights that the actor shares on the same GPU, after the part that `ends` all of an update. `begins`
        marks its first part; responses are sampled with its weights once it ended."""
        self._engine.copy_weights(part.buckets, begins, part.ends)
        torch.cuda.ipc_collect()

    def sleep(self) -> None:
        """Frees the GPU's memory until the next weights arrive."""
        self._engine.sleep()


def _stored(response: ResponseType) -> ResponseType:
    """The response with its experts in the object store, from which the actor's ranks fetch them."""
    if not response.routes:
        return response
    return replace(response, routes=Routes([response.routes]).stored(ray.put).segments[0])
