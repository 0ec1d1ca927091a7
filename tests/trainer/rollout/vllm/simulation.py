"""vLLM's schedulers with and without the fast path and drafts, side by side: `simulation.py DIRECTORY`, for
test_fast_path.py and test_speculation.py. Writes DIRECTORY/results.json.

Requests arrive and are aborted at random. Tokens are drawn instead of computed; drafts are verified as in vLLM's second
model runner, which itself needs a GPU. The KV cache is too small for all requests, so vLLM preempts some.
"""

import json
import os
import sys
from collections import deque
from dataclasses import fields
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from trainer.rollout.vllm.settings import engine_environment

os.environ.update(engine_environment(enforce_eager=True), HF_HUB_OFFLINE="1")

import numpy as np
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.trainer.rollout.engine_program import END, make_model
from trainer.rollout.vllm import decode_run
from trainer.rollout.vllm.drafts import StepTimes
from trainer.rollout.vllm.fast_path import LONGEST_WAIT, FastPath
from trainer.rollout.vllm.patches import skip_block_allocation
from trainer.rollout.vllm.speculation import Speculation

BLOCK, BLOCKS = 16, 150
ROUNDS = 900
AT_ONCE = 12
TOKENS = 96  # computed in a step: most prompts take several
PROMPT, LENGTH = 200, 290
DRAFTED = 5


def drawn(name: str, number: int) -> tuple[int, float]:
    """The token of that number of a response, and a log-prob. Most tokens repeat earlier ones for a while."""
    random = Random(f"{name} {number}")
    if random.random() < (0.0, 0.005, 0.05)[int(name) % 3]:
        return END, random.random()
    repeated = 20 + (int(name) + number // 40 + number % 4) % 30
    return repeated if random.random() < 0.9 else random.randrange(20, 60), random.random()


class Simulation:
    """An engine whose scheduler is vLLM's, with or without `fast` path, block `skips` and `drafts`."""

    def __init__(
        self,
        model: Path,
        kind: type[Scheduler],
        second_runner: bool = True,
        caching: bool = True,
        fast: bool = False,
        skips: bool = False,
        drafts: bool = False,
        longest_wait: int = 0,
    ) -> None:
        settings = EngineArgs(
            model=str(model),
            max_model_len=PROMPT + LENGTH,
            max_num_seqs=AT_ONCE,
            max_num_batched_tokens=TOKENS,
            block_size=BLOCK,
            enable_prefix_caching=caching,
            skip_tokenizer_init=True,
        ).create_engine_config()
        settings.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
        cache = KVCacheConfig(BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = kind(settings, cache, StructuredOutputManager(settings), BLOCK)
        self.scheduler.use_v2_model_runner = second_runner
        hash_function = get_hash_fn_by_name(settings.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(BLOCK, hash_function) if caching else None
        self.allocations = 0
        self._count_allocations()
        if skips:
            skip_block_allocation(self.scheduler.kv_cache_manager)
        self.fast_path = FastPath(self.scheduler, longest_wait) if fast else None
        self.core = SimpleNamespace(scheduler=self.scheduler, batch_queue_size=2 if kind is AsyncScheduler else 1)
        self.speculation = Speculation(self.core, DRAFTED, bool, caching, self.fast_path) if drafts else None
        self.under_way: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.log_probs: dict[str, list[float]] = {}
        self.ended: dict[str, str] = {}
        self.preempted = self.switches = 0

    def _count_allocations(self) -> None:
        cache = self.scheduler.kv_cache_manager
        allocate = cache.allocate_slots

        def counted(*arguments: Any, **named: Any) -> Any:
            self.allocations += 1
            return allocate(*arguments, **named)

        cache.allocate_slots = counted

    def add(self, name: str, prompt: list[int], length: int, log_probs: bool) -> None:
        stops = [[END], [END, END + 1], None][int(name) % 5 % 3]
        sampling = SamplingParams(max_tokens=length, stop_token_ids=stops, logprobs=0 if log_probs else None)
        self.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=self.hasher))
        self.tokens[name], self.log_probs[name] = [], []
        if self.fast_path is not None:
            self.fast_path.track(name, self.tokens[name], self.log_probs[name] if log_probs else None)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def round(self) -> dict[str, Any]:
        """Schedules a step, ends the oldest step under way, and returns what the scheduled one tells the workers."""
        if self.speculation is not None and self.speculation.should_switch():
            self.settle()
            self.speculation.switch()
            self.switches += 1
        step = self.scheduler.schedule()
        self.preempted += len(step.preempted_req_ids or ())
        self.under_way.append((step, self._sample(step)))
        if len(self.under_way) == self.core.batch_queue_size:
            self._end(*self.under_way.popleft())
        return plain(step)

    def settle(self) -> None:
        while self.under_way:
            self._end(*self.under_way.popleft())
        if self.fast_path is not None:
            self.fast_path.flush()

    def finish(self) -> None:
        while self.scheduler.has_unfinished_requests():
            self.round()
        self.settle()

    def _end(self, step: Any, output: ModelRunnerOutput) -> None:
        outputs = self.scheduler.update_from_output(step, output)
        for new in outputs[0].outputs if 0 in outputs else ():
            self.tokens[new.request_id].extend(new.new_token_ids)
            if new.new_logprobs is not None:
                self.log_probs[new.request_id].extend(new.new_logprobs.logprobs[:, 0].tolist())
            if new.finish_reason is not None:
                self.ended[new.request_id] = str(new.finish_reason)

    def _sample(self, step: Any) -> ModelRunnerOutput:
        """A token for each request whose tokens so far are all computed, and one for each draft that it accepts."""
        names, computed = sorted(step.num_scheduled_tokens, reverse=True), computed_after(step)
        rows: list[tuple[int, float]] = []
        sampled, first_rows = [], [0]
        for name in names:
            request, drafts = self.scheduler.requests[name], step.scheduled_spec_decode_tokens.get(name, [])
            first = computed[name] - request.num_prompt_tokens - len(drafts)
            following = [drawn(name, first + place) for place in range(len(drafts) + 1)]
            accepted = 0
            while accepted < len(drafts) and following[accepted][0] == drafts[accepted]:
                accepted += 1
            sampled.append([] if request.is_prefill_chunk else [token for token, _ in following[: accepted + 1]])
            rows += following
            first_rows.append(len(rows))
        count, scores = len(rows), np.array([[score] for _, score in rows], np.float32).reshape(-1, 1)
        log_probs = LogprobsLists(np.zeros((count, 1), np.int32), scores, np.zeros(count, np.int32), first_rows)
        return ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, sampled, log_probs)

    def records(self) -> dict[str, Any]:
        """vLLM's records of each request, and its cache."""
        if self.fast_path is not None:
            self.fast_path.flush()
        (manager,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return {
            name: (
                str(request.status),
                list(request.output_token_ids),
                list(request.all_token_ids),
                request.num_computed_tokens,
                request.num_output_placeholders,
                request.num_in_flight_tokens,
                len(request.block_hashes),
                [block.block_id for block in manager.req_to_blocks.get(name, ())],
                manager.num_cached_block.get(name),
                self.tokens[name],
                self.log_probs[name],
            )
            for name, request in self.scheduler.requests.items()
        } | {
            "running": [request.request_id for request in self.scheduler.running],
            "ended": dict(self.ended),
            "new blocks": len(manager.new_block_ids),
        }


def computed_after(step: Any) -> dict[str, int]:
    """Tokens of each request that workers have computed after a step, by what the step tells them."""
    cached = step.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before |= {request.req_id: request.num_computed_tokens for request in step.scheduled_new_reqs}
    return {name: before[name] + count for name, count in step.num_scheduled_tokens.items()}


def plain(step: Any) -> dict[str, Any]:
    """What a step tells vLLM's workers."""
    told = {field.name: getattr(step, field.name) for field in fields(step)}
    cached, new = told.pop("scheduled_cached_reqs"), told.pop("scheduled_new_reqs")
    told |= {f"cached {field.name}": getattr(cached, field.name) for field in fields(cached)}
    told["new"] = [(request.req_id, request.block_ids, request.num_computed_tokens) for request in new]
    told["num_scheduled_tokens"] = list(told["num_scheduled_tokens"].items())
    told.pop("ec_manager_metadata", None)  # of models with images
    return told


def difference(values: dict[str, Any], expected: dict[str, Any]) -> str:
    """The first key whose values differ, with both; empty if none does."""
    keys = [*expected, *(values.keys() - expected.keys())]
    return next(
        (f"{key}: {values.get(key)} / {expected.get(key)}" for key in keys if values.get(key) != expected.get(key)), ""
    )


def compare_steps(model: Path, kind: type[Scheduler], second_runner: bool, caching: bool, seed: int) -> dict[str, Any]:
    """The fast path, the skipped allocations alone, and vLLM's own steps, until the first difference."""
    random = Random(seed)
    fast, *_ = simulations = [
        Simulation(model, kind, second_runner, caching, fast=fast, skips=skips)
        for fast, skips in ((True, True), (False, True), (False, False))
    ]
    count, different = 0, ""
    for number in range(ROUNDS):
        for _ in range(random.choice([0] * 40 + [1, 2, 8])):
            prompt = [random.randrange(4)] * random.randrange(1, PROMPT)  # of four groups
            request = (str(count), prompt, random.randrange(1, LENGTH + 60), random.random() < 0.5)
            count += 1
            for simulation in simulations:
                simulation.add(*request)
        aborted = str(random.randrange(count)) if count and random.random() < 0.01 else None
        settles, pauses = random.random() < 0.02, number % 100 > 97
        for simulation in simulations:
            if aborted is not None:
                simulation.abort(aborted)
            if pauses or number % 100 == 0:
                simulation.scheduler.set_pause_state(PauseState.PAUSED_ALL if pauses else PauseState.UNPAUSED)
            if settles:
                simulation.settle()
        expected, *others = (simulation.round() for simulation in reversed(simulations))
        different = next(filter(None, (difference(step, expected) for step in others)), "")
        if not different and random.random() < 0.2:  # otherwise tokens stay pending
            expected, *others = (simulation.records() for simulation in reversed(simulations))
            different = next(filter(None, (difference(records, expected) for records in others)), "")
        if different:
            different = f"round {number}: {different}"
            break
    assert fast.fast_path is not None
    return {
        "different": different,
        "fast steps": fast.fast_path.steps,
        "allocations": [simulation.allocations for simulation in simulations],
        "preempted": fast.preempted,
        "ended": list(fast.ended.values()),
        "aborted": sum(name not in fast.ended for name in fast.tokens),
    }


def admissions(model: Path, kind: type[Scheduler], longest_wait: int) -> dict[str, Any]:
    """Many short responses, of which few run at once, until all have ended."""
    simulation = Simulation(model, kind, fast=True, longest_wait=longest_wait)
    for number in range(20 * AT_ONCE):
        simulation.add(str(number), [number % 4] * 20, length=60, log_probs=False)
    rounds = longest = waited = 0
    while len(simulation.ended) < 20 * AT_ONCE:
        running, waiting = simulation.scheduler.get_request_counts()
        waited = 0 if simulation.round()["new"] or not waiting or running == AT_ONCE else waited + 1
        rounds, longest = rounds + 1, max(longest, waited)
    assert simulation.fast_path is not None
    vllm_steps = rounds - simulation.fast_path.steps
    return {"rounds": rounds, "vllm steps": vllm_steps, "longest wait": longest, "tokens": simulation.tokens}


def compare_drafts(model: Path, kind: type[Scheduler], caching: bool, seed: int) -> dict[str, Any]:
    """Drafts that come and go with the fast path, with vLLM's own steps, and no drafts, until all have ended."""
    fast, slow, without = simulations = [
        Simulation(model, kind, caching=caching, fast=fast, drafts=drafts)
        for fast, drafts in ((True, True), (False, True), (False, False))
    ]
    for simulation in (fast, slow):
        assert simulation.speculation is not None
        decisions = Random(seed)
        simulation.speculation.pays = lambda decisions=decisions: decisions.random() < 0.7  # type: ignore[method-assign,misc]
    random, count, different = Random(seed + 1), 0, ""
    for number in range(ROUNDS):
        for _ in range(random.choice([0] * 40 + [1, 2, 8])):
            prompt = [random.randrange(40)] * random.randrange(1, PROMPT)
            request = (str(count), prompt, random.randrange(1, LENGTH), random.random() < 0.5)
            count += 1
            for simulation in simulations:
                simulation.add(*request)
        for simulation in simulations:
            simulation.round()
        if number % 5 == 0:  # otherwise tokens stay pending
            different = different or difference(fast.records(), slow.records())
    for simulation in simulations:
        simulation.finish()
    assert fast.speculation is not None
    assert fast.speculation.drafted_steps is not None
    assert fast.fast_path is not None
    drafts = fast.speculation.take_drafts()
    return {
        "different records": different,
        "different responses": [
            name
            for name, tokens in without.tokens.items()
            if (tokens, without.log_probs[name], without.ended[name])
            != (fast.tokens[name], fast.log_probs[name], fast.ended[name])
        ],
        "responses": len(without.tokens),
        "switches": fast.switches,
        "fast steps": fast.fast_path.steps,
        "drafted steps": fast.speculation.drafted_steps.count,
        "drafted": drafts.drafted,
        "accepted": drafts.accepted,
        "tokens": sum(map(len, without.tokens.values())),
        "preempted": fast.preempted,
        "left in the cache": fast.scheduler.kv_cache_manager.usage,
    }


class AssumedTimes(StepTimes):
    """Costs of a step with drafts that do not depend on the clock: before an engine drafts, and while it does."""

    def __init__(self, before: float, meanwhile: float) -> None:
        super().__init__()
        self._costs = {False: before, True: meanwhile}
        self._drafting = False

    def add(self, drafting: bool, _responses: int, _seconds: float) -> None:
        self._drafting = drafting

    def cost(self, _responses: int) -> float:
        return self._costs[self._drafting]


def decisions(model: Path, times: AssumedTimes) -> dict[str, float]:
    """When an engine drafts in 2,500 steps of twelve responses, with an acceptance length of about 1.5."""
    simulation = Simulation(model, AsyncScheduler, fast=True, drafts=True)
    assert simulation.speculation is not None
    simulation.speculation.backoff.times = times
    drafting_steps = count = 0
    for _ in range(2500):
        while sum(simulation.scheduler.get_request_counts()) < AT_ONCE:
            simulation.add(str(3 * count), [count % 40] * 30, LENGTH, log_probs=False)  # none ends early
            count += 1
        simulation.round()
        drafting_steps += simulation.speculation.is_drafting
    return {"switches": simulation.switches, "share": drafting_steps / 2500}


def main(directory: Path) -> None:
    model = directory / "model"
    make_model(model)
    decode_run.PENDING_STEPS = 5
    results: dict[str, Any] = {
        f"{kind.__name__}, runner {1 + second_runner}, prefix caching {caching}": [
            compare_steps(model, kind, second_runner, caching, seed) for seed in (1, 2)
        ]
        for kind in (Scheduler, AsyncScheduler)
        for second_runner in (False, True)
        for caching in (False, True)
    }
    results["admissions"] = {
        kind.__name__: {wait: admissions(model, kind, wait) for wait in (0, 4, LONGEST_WAIT)}
        for kind in (Scheduler, AsyncScheduler)
    }
    results["drafts"] = {
        f"{kind.__name__}, prefix caching {caching}": [compare_drafts(model, kind, caching, seed) for seed in range(2)]
        for kind, caching in ((AsyncScheduler, False), (AsyncScheduler, True), (Scheduler, True))
    }
    results["decisions"] = {
        "cheap": decisions(model, AssumedTimes(1.1, 1.1)),
        "expensive": decisions(model, AssumedTimes(9.0, 9.0)),
        "more expensive than assumed": decisions(model, AssumedTimes(1.1, 9.0)),
    }
    (directory / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
