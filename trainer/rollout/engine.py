"""The protocol of rollout engines, and the choice of an engine for this machine."""

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from trainer.cluster.place import Team
from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.rollout.occupancy import Drafts, Load
from trainer.rollout.sampling import Part, Response, SamplingRequest
from trainer.rows import module_names
from trainer.weights.buckets import SentBucket

ALONE = Team()  # an engine in one process


class RolloutEngine(Protocol):
    """Samples from the policy, truncated only if a request says so; no penalties.

    Its weights are random until the first `replace_weights` or `copy_weights`. A run with adapters is the exception:
    the engine loads the frozen weights from the model's directory and receives only the adapters.
    """

    def generate(self, requests: Sequence[SamplingRequest]) -> list[Response]:
        """One response per request, in the same order. The same requests and weights give the same responses."""
        ...

    def replace_weights(self, buckets: Iterable[SentBucket]) -> None:
        """Loads everything that the actor trains. Raises WorkerError if a weight is damaged or missing."""
        ...

    def copy_weights(self, buckets: Iterable[SentBucket], begins: bool = True, ends: bool = True) -> None:
        """Loads the same from buckets in the memory of the engine's GPU. A tied weight comes under one of its names.

        The buckets may come in several calls: the first `begins` an update and the last `ends` it, unless
        `Config.loads_in_parts` forbids that. Releases each bucket before it requests the next, and has copied all when
        it returns. The last call raises WorkerError if a weight is damaged or missing.
        """
        ...

    def sleep(self) -> None:
        """Frees the GPU's memory for other processes until the next weights arrive."""
        ...

    def take_drafts(self) -> Drafts:
        """Its drafted tokens since the last call."""
        ...

    def load(self) -> Load | None:
        """What it decodes at this moment; None if unknown. Another thread calls it while `generate` runs."""
        ...

    def notices(self) -> list[str]:
        """What the log says when the engine starts: a fast path that is off, and why. One line each."""
        ...


class InFlightEngine(RolloutEngine, Protocol):
    """An engine that can take new weights in the middle of its responses.

    A response in flight keeps its cached keys and values across an update. So its later tokens are sampled by the new
    weights, from keys and values of earlier ones. A response without a token starts anew under the new weights. No
    other response reads keys and values of older weights.

    `sleep` forgets the responses in flight, unless `rollout.sleep` is false. `generate` needs an engine without any.
    """

    def advance(self, new: Mapping[int, SamplingRequest], steps: int) -> dict[int, Part]:
        """Starts requests, each under a number of the caller's, and samples for so many steps, fewer if all finish.

        Returns the tokens that the steps added to each response in flight, by number: at most one per step, and one for
        each drafted token. All come from the weights that the engine has now.
        """
        ...


@dataclass(frozen=True)
class EngineRow:
    """One rollout engine. `open` takes the run's settings, the device and the end tokens, and starts the engine.

    `package` must be installed. `rollout.engine=auto` takes the installed engine with the highest `preference`.
    `open_shard` starts one rank of an engine that spans the devices of a team; None if the engine supports one device
    only. `in_flight` means that it is an `InFlightEngine`, `quantizes` that it supports `rollout.quantization`,
    `speculates` that it supports `rollout.speculative_tokens`, `records_routes` that it records the experts that tokens
    choose, `loads_files` that it takes weights as tensors of a model's files, not by Transformers' names.
    """

    open: Callable[[Config, str, Sequence[int]], RolloutEngine]
    package: str
    preference: int
    open_shard: Callable[[Config, str, Sequence[int], Team], RolloutEngine] | None = None
    in_flight: bool = False
    quantizes: bool = False
    speculates: bool = False
    records_routes: bool = False
    loads_files: bool = False


def engine_rows() -> dict[str, EngineRow]:
    """Every engine by the name that `rollout.engine` uses: one module each in `trainer/rollout/backends`."""
    names = module_names("rollout/backends")
    return {name: importlib.import_module(f"trainer.rollout.backends.{name}").ROW for name in names}


def choose_engine(setting: str) -> tuple[str, str]:
    """The name of the engine to use on this machine, and the reason. `setting` is `rollout.engine`.

    Raises ConfigError if its package is not installed.
    """
    rows = engine_rows()
    by_preference = sorted(rows, key=lambda name: rows[name].preference, reverse=True)
    installed = [name for name in by_preference if importlib.util.find_spec(rows[name].package) is not None]
    if setting == "auto":
        better = by_preference[: by_preference.index(installed[0])]
        reason = f"{', '.join(better)} is not installed" if better else f"{installed[0]} is installed"
        return installed[0], reason
    if setting not in installed:
        raise ConfigError(
            f"rollout.engine={setting}: {rows[setting].package} is not installed here",
            hint=f"install it, or set rollout.engine={installed[0]}",
        )
    return setting, f"rollout.engine={setting}"


def check_engine(config: Config) -> None:
    """Raises ConfigError if `rollout` wants what the engine of this machine cannot do."""
    size, (name, reason) = config.rollout.tensor_parallel, choose_engine(config.rollout.engine)
    row = engine_rows()[name]
    if size > 1 and row.open_shard is None:
        raise ConfigError(
            f"rollout.tensor_parallel={size}: an engine of {name} has one device ({reason})",
            hint="set rollout.tensor_parallel=1, or rollout.engine=vllm",
        )
    if config.rollout.quantization is not None and not row.quantizes:
        raise ConfigError(
            f"rollout.quantization={config.rollout.quantization}: an engine of {name} does not quantise ({reason})",
            hint="leave it out, or set rollout.engine=vllm",
        )
    if config.rollout.speculative_tokens and not row.speculates:
        raise ConfigError(
            f"rollout.speculative_tokens={config.rollout.speculative_tokens}: an engine of {name} drafts no tokens "
            f"({reason})",
            hint="leave it out, or set rollout.engine=vllm",
        )
    if config.actor.router_replay == "engine" and not row.records_routes:
        raise ConfigError(
            f"actor.router_replay=engine: an engine of {name} does not record experts ({reason})",
            hint="set actor.router_replay=recompute, or rollout.engine=vllm",
        )


def open_engine(
    name: str, config: Config, device: str, end_token_ids: Sequence[int], team: Team = ALONE
) -> RolloutEngine:
    """Starts the engine of that name in this process: the whole engine, or this rank of it."""
    row = engine_rows()[name]
    if team.size == 1:
        return row.open(config, device, end_token_ids)
    assert row.open_shard is not None
    return row.open_shard(config, device, end_token_ids, team)
