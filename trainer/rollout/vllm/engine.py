"""vLLM as a rollout engine. Import it after `settings.engine_environment` is set: vLLM reads that when imported."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import get_tp_group
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from trainer.cluster.place import Team
from trainer.config.tree import Config
from trainer.errors import WorkerError
from trainer.rollout.engine import ALONE
from trainer.rollout.occupancy import Drafts, Load
from trainer.rollout.sampling import Part, Response, SamplingRequest
from trainer.rollout.vllm.fast_path import FastPath, unsupported
from trainer.rollout.vllm.in_flight import ResponsesInFlight
from trainer.rollout.vllm.patches import (
    ADAPTERS,
    register_model_class,
    shard_executor,
    share_operators,
    skip_block_allocation,
    version,
)
from trainer.rollout.vllm.routes import RouteRecorder, record_routes
from trainer.rollout.vllm.settings import (
    MULTIPROCESSING,
    device_settings,
    draft_settings,
    exact_settings,
    expert_settings,
    graph_settings,
    weight_settings,
)
from trainer.rollout.vllm.speculation import Speculation
from trainer.rollout.vllm.verification import verify_drafts
from trainer.weights.buckets import SentBucket

ResponseType = TypeVar("ResponseType", bound=Response)


@contextmanager
def _start_errors() -> Iterator[None]:
    """Turns vLLM's errors for lack of memory, and for settings that it refuses, into a WorkerError."""
    try:
        yield
    except (torch.OutOfMemoryError, ValueError) as error:
        raise WorkerError(
            f"vLLM does not start: {error}",
            hint="if memory is short: the settings are rollout.kv_cache_gib, gpu_memory_utilization, max_num_seqs and "
            "engines_per_gpu; `trainer plan` shows what fits",
        ) from error


class VllmEngine:
    """A vLLM engine in this process, or this process's rank of an engine that spans several; see `InFlightEngine`.

    With `rollout.lora=adapters`, vLLM applies them beside the frozen weights, as the actor does. It refuses to sample
    before the first adapters arrive.
    """

    def __init__(self, config: Config, device: str, end_token_ids: Sequence[int], team: Team = ALONE) -> None:
        if os.environ.get(MULTIPROCESSING) != "0":
            raise WorkerError(
                f"{MULTIPROCESSING} is not 0: the trainer reads the records of vLLM's engine core in this process",
                hint=f"do not set {MULTIPROCESSING}",
            )
        self._rollout = config.rollout
        self._max_response_length = config.data.max_response_length
        self._end_token_ids = list(end_token_ids)
        self._sleeps = config.rollout.sleep and device == "cuda"
        self._asleep: set[str] = set()
        self._updates = 0
        self._lora = config.actor.lora if config.engines_apply_adapters else None
        # vLLM finds the adapters by their number. It must never read the path, so the path does not exist.
        self._adapters = LoRARequest("actor", ADAPTERS, "/adapters/come/from/the/actor") if self._lora else None
        register_model_class(config.model.directory)
        if config.is_exact:
            share_operators()
        with _start_errors():
            self._engine = LLM(
                model=str(config.model.directory),
                trust_remote_code=False,
                dtype=config.model.dtype_on(device),
                seed=config.trainer.seed,
                max_model_len=config.data.max_prompt_length + config.data.max_response_length,
                max_num_seqs=config.rollout.max_num_seqs,
                enforce_eager=config.rollout.eager_on(device),
                enable_sleep_mode=self._sleeps,
                enable_prefix_caching=config.rollout.prefix_caching,
                # Log-probs of the distribution that was sampled from, after the temperature and any truncation.
                logprobs_mode="processed_logprobs",
                worker_extension_cls="trainer.rollout.vllm.weights.WeightLoader",
                skip_tokenizer_init=not config.rollout.stop,  # only stop strings need text
                disable_log_stats=True,
                **weight_settings(config, device),
                **device_settings(config, device),
                **expert_settings(config, device),
                **graph_settings(config, device),
                **_team_settings(team),
                **draft_settings(config.rollout.speculative_tokens, device),
                **exact_settings(config),
            )
        core: Any = self._engine.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        skip_block_allocation(self.scheduler.kv_cache_manager)
        self._slow_because = unsupported(self.scheduler, reports_text=bool(config.rollout.stop))
        self.fast_path = None if self._slow_because else FastPath(self.scheduler)
        self.speculation: Speculation | None = None
        if drafted := config.rollout.speculative_tokens:
            self._engine.collective_rpc(verify_drafts, args=(drafted, device))
            self.speculation = Speculation(core, drafted, _agree(team), device == "cuda", self.fast_path)
        recorder: RouteRecorder | None = None
        if config.actor.router_replay == "engine":
            (recorder,) = self._engine.collective_rpc(record_routes, args=(device,))
        self._in_flight = ResponsesInFlight(
            self._engine, self._prompt, self._sampling, self._adapters, self.fast_path, self.speculation, recorder
        )

    def notices(self) -> list[str]:
        """See `RolloutEngine.notices`."""
        if not self._slow_because:
            return []
        return [f"vLLM {version()} runs without the decode fast path: {self._slow_because}"]

    def generate(self, requests: Sequence[SamplingRequest]) -> list[Response]:
        """See `RolloutEngine.generate`."""
        return [self._counted(response) for response in self._in_flight.to_their_end(requests)]

    def advance(self, new: Mapping[int, SamplingRequest], steps: int) -> dict[int, Part]:
        """See `InFlightEngine.advance`."""
        parts = self._in_flight.advance(new, steps)
        return {number: self._counted(part) for number, part in parts.items()}

    def _counted(self, response: ResponseType) -> ResponseType:
        """The response, without vLLM's count of cached tokens if there is no prefix cache."""
        return response if self._rollout.prefix_caching else replace(response, cached_tokens=None)

    def _prompt(self, request: SamplingRequest) -> dict[str, object]:
        """vLLM shares cached keys and values only between prompts with the same salt, so never across an update."""
        return {"prompt_token_ids": list(request.prompt), "cache_salt": str(self._updates)}

    def _sampling(self, request: SamplingRequest) -> SamplingParams:
        return SamplingParams(
            temperature=request.temperature,
            top_p=request.truncation.top_p,
            top_k=request.truncation.top_k or 0,
            min_p=request.truncation.min_p,
            seed=request.seed if request.temperature > 0 else None,
            max_tokens=request.max_tokens or self._max_response_length,
            stop_token_ids=None if self._rollout.ignore_end_tokens else self._end_token_ids,
            ignore_eos=self._rollout.ignore_end_tokens,
            # 0: the sampled token only. It costs one pass over the vocabulary and one object per token.
            logprobs=0 if request.log_probs else None,
            stop=self._rollout.stop,
            detokenize=bool(self._rollout.stop),
            include_stop_str_in_output=True,
            skip_special_tokens=False,  # a stop string may be a special token
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def replace_weights(self, buckets: Iterable[SentBucket]) -> None:
        """See `RolloutEngine.replace_weights`."""
        self._wake("weights")
        self._load("replace_weights", buckets)
        self._end_update()

    def copy_weights(self, buckets: Iterable[SentBucket], begins: bool = True, ends: bool = True) -> None:
        """See `RolloutEngine.copy_weights`."""
        if begins:
            self._wake("weights")
        self._load("copy_weights", buckets, begins, ends)
        if ends:
            self._end_update()

    def _load(self, method: str, buckets: Iterable[SentBucket], *when: bool) -> None:
        if self._lora:
            self._engine.collective_rpc("replace_adapters", args=(buckets, self._lora.alpha / self._lora.rank))
        else:
            self._engine.collective_rpc(method, args=(buckets, *when))

    def _end_update(self) -> None:
        self._wake("kv_cache")
        self._updates += 1
        self._in_flight.restart_without_tokens()

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        if self._rollout.sleep:
            self._in_flight.abort_all()
        if self._sleeps and not self._asleep:
            # Level 2 discards the weights, which the next update replaces. Level 1 keeps frozen weights in CPU memory.
            self._engine.sleep(level=1 if self._lora else 2)
            self._asleep = {"weights", "kv_cache"}

    def take_drafts(self) -> Drafts:
        """See `RolloutEngine.take_drafts`."""
        return Drafts() if self.speculation is None else self.speculation.take_drafts()

    def load(self) -> Load:
        """See `RolloutEngine.load`."""
        running = list(self.scheduler.running)  # the scheduler changes the list meanwhile
        # vLLM's records may lack the last few tokens of a response.
        tokens = sum(request.num_tokens for request in running)
        return Load(len(running), tokens, self.scheduler.kv_cache_manager.usage)

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            self._engine.wake_up(tags=[tag])
            self._asleep.remove(tag)


def _agree(team: Team) -> Callable[[bool], bool]:
    """Broadcasts a decision of an engine's first rank to all of its ranks, which call it at the same step."""
    if team.size == 1:
        return bool
    return lambda decision: bool(get_tp_group().broadcast_object(decision))


def _team_settings(team: Team) -> dict[str, object]:
    """Arguments of one rank of an engine that spans several devices."""
    if team.size == 1:
        return {}
    return {"tensor_parallel_size": team.size, "distributed_executor_backend": shard_executor(team)}
