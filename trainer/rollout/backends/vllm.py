"""vLLM as the rollout engine.

vLLM reads `trainer.rollout.process_environment` when it is imported, so it is imported when an engine starts.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trainer.cluster.place import Team
from trainer.config.tree import Config
from trainer.errors import WorkerError
from trainer.rollout.engine import EngineRow
from trainer.rollout.occupancy import Drafts, Load
from trainer.rollout.sampling import Part, Response, SamplingRequest
from trainer.rollout.vllm_settings import (
    device_settings,
    draft_settings,
    exact_settings,
    graph_settings,
    weight_settings,
)
from trainer.weights.buckets import SentBucket

if TYPE_CHECKING:
    from vllm import SamplingParams

    from trainer.rollout.accounting.steady_steps import SteadySteps
    from trainer.rollout.speculation.drafting import Drafting


ALONE = Team()
Found = TypeVar("Found", bound=Response)


@contextmanager
def _start_explained() -> Iterator[None]:
    """Turns what vLLM raises for lack of memory, and for settings that it refuses, into a WorkerError."""
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, ValueError) as error:
        raise WorkerError(
            f"vLLM does not start: {error}",
            hint="if memory is short: the settings are rollout.kv_cache_gib, gpu_memory_utilization, max_num_seqs and "
            "engines_per_gpu; `trainer plan` shows what fits",
        ) from error


def register_model_class(directory: Path) -> None:
    """Gives vLLM the class of the model. It would otherwise start a process that imports all of vLLM to look at it.

    That process keeps CUDA out of this one, which matters only if the engine core is to have a process of its own.
    """
    from vllm import ModelRegistry, envs

    if envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return
    for architecture in json.loads((directory / "config.json").read_text()).get("architectures") or ():
        known = ModelRegistry.models.get(architecture)
        if known is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())


class VllmEngine:
    """A vLLM engine in this process, or this process's rank of an engine that spans several; see `InFlightEngine`.

    With `rollout.lora=adapters`, vLLM applies them beside the frozen weights, as the actor does. It refuses to sample
    before the first adapters arrive.
    """

    def __init__(self, config: Config, device: str, end_token_ids: Sequence[int], team: Team = ALONE) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        from trainer.rollout.accounting.last_blocks import shorten_accounting
        from trainer.rollout.accounting.steady_steps import steady_steps
        from trainer.rollout.exact import share_operators
        from trainer.rollout.in_flight import ResponsesInFlight
        from trainer.rollout.weight_loader import ADAPTERS

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
        with _start_explained():
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
                worker_extension_cls="trainer.rollout.weight_loader.WeightLoader",
                skip_tokenizer_init=not config.rollout.stop,  # only stop strings need text
                disable_log_stats=True,
                **weight_settings(config, device),
                **device_settings(config, device),
                **graph_settings(config, device),
                **_shard_settings(team),
                **draft_settings(config.rollout.speculative_tokens, device),
                **exact_settings(config),
            )
        steady = None
        if scheduler := self._scheduler():
            shorten_accounting(scheduler)
            steady = steady_steps(scheduler, reports_text=bool(config.rollout.stop))
        self._drafting = self._start_drafting(config.rollout.speculative_tokens, device, team, steady)
        self._in_flight = ResponsesInFlight(
            self._engine, self._prompt, self._sampling, self._adapters, steady, self._drafting
        )

    def generate(self, requests: Sequence[SamplingRequest]) -> list[Response]:
        """See `RolloutEngine.generate`."""
        return [self._known(response) for response in self._in_flight.to_their_end(requests)]

    def advance(self, new: Mapping[int, SamplingRequest], steps: int) -> dict[int, Part]:
        """See `InFlightEngine.advance`."""
        parts = self._in_flight.advance(new, steps)
        return {number: self._known(part) for number, part in parts.items()}

    def _known(self, response: Found) -> Found:
        """The response; without a prefix cache, vLLM's count of cached tokens means nothing."""
        return response if self._rollout.prefix_caching else replace(response, cached_tokens=None)

    def _prompt(self, request: SamplingRequest) -> dict[str, object]:
        """vLLM shares cached keys and values only between prompts with the same salt, so never across an update."""
        return {"prompt_token_ids": list(request.prompt), "cache_salt": str(self._updates)}

    def _sampling(self, request: SamplingRequest) -> "SamplingParams":
        from vllm import SamplingParams

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
        )

    def replace_weights(self, buckets: Iterable[SentBucket]) -> None:
        """See `RolloutEngine.replace_weights`."""
        self._wake("weights")
        self._take("replace_weights", buckets)
        self._end_update()

    def copy_weights(self, buckets: Iterable[SentBucket], begins: bool = True, ends: bool = True) -> None:
        """See `RolloutEngine.copy_weights`."""
        if begins:
            self._wake("weights")
        self._take("copy_weights", buckets, begins, ends)
        if ends:
            self._end_update()

    def _take(self, method: str, buckets: Iterable[SentBucket], *when: bool) -> None:
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
            self._in_flight.forget()
        if self._sleeps and not self._asleep:
            # Level 2 discards the weights, which the next update replaces. Level 1 keeps frozen weights in CPU memory.
            self._engine.sleep(level=1 if self._lora else 2)
            self._asleep = {"weights", "kv_cache"}

    def _start_drafting(self, most: int, device: str, team: Team, steady: "SteadySteps | None") -> "Drafting | None":
        if not most:
            return None
        from trainer.rollout.speculation.drafting import Drafting

        if device == "cuda":
            from trainer.rollout.speculation import second_runner

            self._engine.collective_rpc(second_runner.attach, args=(most,))
        else:
            from trainer.rollout.speculation import first_runner

            self._engine.collective_rpc(first_runner.attach)
        return Drafting(self._core(), most, agreed_on(team), filled=device == "cuda", steady=steady)

    def take_drafts(self) -> Drafts:
        """See `RolloutEngine.take_drafts`."""
        return Drafts() if self._drafting is None else self._drafting.take_drafts()

    def load(self) -> Load | None:
        """See `RolloutEngine.load`. None if vLLM's engine core has a process of its own."""
        scheduler = self._scheduler()
        if scheduler is None:
            return None
        running = list(scheduler.running)  # the scheduler changes the list meanwhile
        # Of the last few tokens of a response the scheduler may not have been told yet.
        return Load(len(running), sum(request.num_tokens for request in running), scheduler.kv_cache_manager.usage)

    def _scheduler(self) -> Any:
        """vLLM's scheduler, or None if the engine core has a process of its own."""
        core = self._core()
        return None if core is None else core.scheduler

    def _core(self) -> Any:
        return getattr(self._engine.llm_engine.engine_core, "engine_core", None)

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            self._engine.wake_up(tags=[tag])
            self._asleep.remove(tag)


def agreed_on(team: Team) -> Callable[[bool], bool]:
    """What the first rank of an engine wants, for all of its ranks, which ask for it at the same step."""
    if team.size == 1:
        return bool
    from vllm.distributed import get_tp_group

    return lambda wanted: bool(get_tp_group().broadcast_object(wanted))


def _shard_settings(team: Team) -> dict[str, object]:
    """Arguments of one rank of an engine that spans several devices."""
    if team.size == 1:
        return {}
    from trainer.rollout.shards import shard_executor

    return {"tensor_parallel_size": team.size, "distributed_executor_backend": shard_executor(team)}


ROW = EngineRow(
    VllmEngine, package="vllm", preference=1, open_shard=VllmEngine, in_flight=True, quantizes=True, speculates=True
)
