"""vLLM's schedulers with and without steady steps, side by side: `steady_steps_program.py DIRECTORY`, for
test_steady_steps.py. Writes DIRECTORY/found.json.

Requests come, end and are aborted at random; tokens are drawn instead of computed. A cache that is too small makes vLLM
take responses back.
"""

import json
import os
import sys
from collections import deque
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

from trainer.rollout.process_environment import engine_environment

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
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.trainer.rollout.engine_program import END, make_model
from trainer.rollout.accounting import stretch
from trainer.rollout.accounting.steady_steps import LONGEST_WAIT, SteadySteps

BLOCK, BLOCKS = 16, 150
ROUNDS = 1200
AT_ONCE = 12
TOKENS = 96  # computed in a step: most prompts take several
PROMPT, LENGTH = 200, 290


class Play:
    """A scheduler in a play; `steady` puts the shortcut before it. The same seed gives the same play."""

    def __init__(
        self,
        model: Path,
        kind: type[Scheduler],
        second_runner: bool,
        caching: bool,
        steady: bool,
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
        hashed = get_hash_fn_by_name(settings.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashed)
        self.hasher = get_request_block_hasher(BLOCK, hashed) if caching else None
        self.steps = SteadySteps(self.scheduler, longest_wait) if steady else None
        self.under_way: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.depth = 2 if kind is AsyncScheduler else 1
        self.tokens: dict[str, list[int]] = {}
        self.log_probs: dict[str, list[float]] = {}
        self.ended: dict[str, str] = {}
        self.taken_back = 0

    def add(self, name: str, prompt: list[int], most: int, log_probs: bool) -> None:
        stops = [[END], [END, END + 1], None][int(name) % 5 % 3]
        sampling = SamplingParams(max_tokens=most, stop_token_ids=stops, logprobs=0 if log_probs else None)
        request = Request(name, prompt, sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        self.tokens[name], self.log_probs[name] = [], []
        if self.steps is not None:
            self.steps.follow(name, self.tokens[name], self.log_probs[name] if log_probs else None)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def round(self) -> dict[str, Any]:
        """Schedules a step, takes what the oldest step under way found, and returns the step."""
        step = self.scheduler.schedule()
        self.taken_back += len(step.preempted_req_ids or ())
        self.under_way.append((step, self._compute(step)))
        if len(self.under_way) == self.depth:
            self._take(*self.under_way.popleft())
        return plain(step)

    def settle(self) -> None:
        while self.under_way:
            self._take(*self.under_way.popleft())
        if self.steps is not None:
            self.steps.write()

    def _take(self, step: Any, found: ModelRunnerOutput) -> None:
        outputs = self.scheduler.update_from_output(step, found)
        for output in outputs[0].outputs if 0 in outputs else ():
            self._report(output)

    def _report(self, output: EngineCoreOutput) -> None:
        self.tokens[output.request_id].extend(output.new_token_ids)
        if output.new_logprobs is not None:
            self.log_probs[output.request_id].extend(output.new_logprobs.logprobs[:, 0].tolist())
        if output.finish_reason is not None:
            self.ended[output.request_id] = str(output.finish_reason)

    def _compute(self, step: Any) -> ModelRunnerOutput:
        """A token for each request whose tokens so far are all computed, drawn from its name and their number."""
        names = sorted(step.num_scheduled_tokens, reverse=True)
        computed = computed_after(step)
        sampled, scores = [], np.zeros((len(names), 1), np.float32)
        for place, name in enumerate(names):
            request = self.scheduler.requests[name]
            number = computed[name] - request.num_prompt_tokens
            drawn = Random(f"{name} {number}")
            token = END if drawn.random() < (0.0, 0.005, 0.1)[int(name) % 3] else drawn.randrange(20, 60)
            sampled.append([] if request.is_prefill_chunk else [token])
            scores[place] = drawn.random()
        log_probs = LogprobsLists(np.zeros((len(names), 1), np.int32), scores, np.zeros(len(names), np.int32))
        return ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, sampled, log_probs)

    def books(self) -> dict[str, Any]:
        """What vLLM has noted of each request, and its cache."""
        if self.steps is not None:
            self.steps.write()
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
    """Tokens that workers have computed of each request after a step, by what the step tells them."""
    cached = step.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before |= {one.req_id: one.num_computed_tokens for one in step.scheduled_new_reqs}
    return {name: before[name] + count for name, count in step.num_scheduled_tokens.items()}


def plain(step: Any) -> dict[str, Any]:
    """What a step tells vLLM's workers."""
    told = {field.name: getattr(step, field.name) for field in fields(step)}
    cached, new = told.pop("scheduled_cached_reqs"), told.pop("scheduled_new_reqs")
    told |= {f"cached {field.name}": getattr(cached, field.name) for field in fields(cached)}
    told["new"] = [(one.req_id, one.block_ids, one.num_computed_tokens) for one in new]
    told["num_scheduled_tokens"] = list(told["num_scheduled_tokens"].items())
    told.pop("ec_manager_metadata", None)  # of models that see
    return told


def compare(model: Path, kind: type[Scheduler], second_runner: bool, caching: bool, seed: int) -> dict[str, Any]:
    """Plays both to the end. `different` is what first differed, in the order of rounds."""
    random = Random(seed)
    plays = [Play(model, kind, second_runner, caching, steady) for steady in (True, False)]
    count, different = 0, ""
    for number in range(ROUNDS):
        for _ in range(random.choice([0] * 40 + [1, 2, 8])):
            prompt = [random.randrange(4)] * random.randrange(1, PROMPT)  # of four groups
            given = (str(count), prompt, random.randrange(1, LENGTH + 60), random.random() < 0.5)
            count += 1
            for play in plays:
                play.add(*given)
        gone = str(random.randrange(count)) if count and random.random() < 0.01 else None
        settled, paused = random.random() < 0.02, number % 100 > 97
        for play in plays:
            if gone is not None:
                play.abort(gone)
            if paused or number % 100 == 0:
                play.scheduler.set_pause_state(PauseState.PAUSED_ALL if paused else PauseState.UNPAUSED)
            if settled:
                play.settle()
        different = difference(*(play.round() for play in plays))
        if not different and random.random() < 0.2:  # otherwise steps wait to be written
            different = difference(*(play.books() for play in plays))
        if different:
            different = f"round {number}: {different}"
            break
    shortened, steady = plays[0], plays[0].steps
    assert steady is not None
    return {
        "different": different,
        "taken": steady.taken,
        "taken back": shortened.taken_back,
        "ended": list(shortened.ended.values()),
        "aborted": sum(name not in shortened.ended for name in shortened.tokens),
        "tokens": sum(map(len, shortened.tokens.values())),
    }


def entries(model: Path, kind: type[Scheduler], longest_wait: int) -> dict[str, Any]:
    """Plays many short responses, of which few fit at once, until all have ended."""
    play = Play(model, kind, second_runner=True, caching=True, steady=True, longest_wait=longest_wait)
    for number in range(20 * AT_ONCE):
        play.add(str(number), [number % 4] * 20, most=60, log_probs=False)
    rounds = longest = waited = 0
    while len(play.ended) < 20 * AT_ONCE:
        running, waiting = play.scheduler.get_request_counts()
        waited = 0 if play.round()["new"] or not waiting or running == AT_ONCE else waited + 1
        rounds, longest = rounds + 1, max(longest, waited)
    steps = play.steps
    assert steps is not None
    return {"rounds": rounds, "steps of vLLM": rounds - steps.taken, "longest wait": longest, "tokens": play.tokens}


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """The first key whose values differ, with both; empty if none does."""
    keys = [*expected, *(found.keys() - expected.keys())]
    return next(
        (f"{key}: {found.get(key)} / {expected.get(key)}" for key in keys if found.get(key) != expected.get(key)), ""
    )


def main(directory: Path) -> None:
    make_model(directory / "model")
    stretch.WAITING_STEPS = 5
    found = {
        f"{kind.__name__}, runner {1 + second_runner}, prefix caching {caching}": [
            compare(directory / "model", kind, second_runner, caching, seed) for seed in range(3)
        ]
        for kind in (Scheduler, AsyncScheduler)
        for second_runner in (False, True)
        for caching in (False, True)
    }
    found["entries"] = {
        kind.__name__: {wait: entries(directory / "model", kind, wait) for wait in (0, 4, LONGEST_WAIT)}
        for kind in (Scheduler, AsyncScheduler)
    }
    (directory / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
