"""The responses that a vLLM engine samples, to their end or some steps at a time, across changes of its weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.logprobs import LogprobsProcessor

from trainer.errors import WorkerError
from trainer.rollout.accounting.steady_steps import SteadySteps
from trainer.rollout.sampling import Part, Response, SamplingRequest
from trainer.rollout.speculation.drafting import Drafting


class _LogProbs(LogprobsProcessor):  # type: ignore[misc]
    """The log-probs of a response's tokens as plain numbers: vLLM's own record has a few objects for each of them."""

    def __init__(self) -> None:
        super().__init__(
            tokenizer=None,
            logprobs=[],
            prompt_logprobs=None,
            cumulative_logprob=None,
            num_logprobs=None,
            num_prompt_logprobs=None,
        )

    def update_from_output(self, output: EngineCoreOutput) -> None:
        if output.new_logprobs is not None:
            self.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())  # the sampled token's come first


@dataclass
class _InFlight:
    """A request under the caller's number, vLLM's record of it, and how many of its tokens were returned."""

    number: int
    request: SamplingRequest
    state: Any
    returned: int = 0


class ResponsesInFlight:
    """Runs vLLM's own queue a few steps at a time. Between two calls no step is under way.

    Tokens are read from vLLM's records at the end of a call, because an output of each step takes time, too.
    """

    def __init__(
        self,
        llm: LLM,
        prompt: Callable[[SamplingRequest], dict[str, object]],
        sampling: Callable[[SamplingRequest], SamplingParams],
        adapters: LoRARequest | None,
        steady: SteadySteps | None,
        drafting: Drafting | None,
    ) -> None:
        self._llm = llm
        self._prompt = prompt
        self._sampling = sampling
        self._adapters = adapters
        self._steady = steady
        self._drafting = drafting
        self._by_id: dict[str, _InFlight] = {}  # in the order of their start
        self._ids = map(str, count())

    def __len__(self) -> int:
        return len(self._by_id)

    def to_their_end(self, requests: Sequence[SamplingRequest]) -> list[Response]:
        """See `trainer.rollout.engine.RolloutEngine.generate`; nothing else may be in flight."""
        assert not self._by_id, "vLLM would mix these responses with those in flight"
        parts = self.advance(dict(enumerate(requests)))
        return [parts[place] for place in range(len(requests))]

    def advance(self, new: Mapping[int, SamplingRequest], steps: int | None = None) -> dict[int, Part]:
        """See `trainer.rollout.engine.InFlightEngine.advance`; without `steps`, until all have ended."""
        for number, request in new.items():
            self._start(number, request)
        parts: dict[int, Part] = {}
        for _ in count() if steps is None else range(steps):
            if self._drafting is not None and self._drafting.turns():
                self._settle(parts)
                self._drafting.turn()
            if not self._by_id:
                break
            self._step(parts)
        self._settle(parts)
        for one in self._by_id.values():
            if token_ids := one.state.detokenizer.output_token_ids[one.returned :]:
                parts[one.number] = _part(one, token_ids)
                one.returned += len(token_ids)
        return parts

    def restart_without_tokens(self) -> None:
        """Starts those that have no token anew, so that a prompt is read by the weights that answer it."""
        waiting = {name: one for name, one in self._by_id.items() if not one.returned}
        self._abort(list(waiting))
        for one in waiting.values():
            self._start(one.number, one.request)

    def forget(self) -> None:
        """Ends all of them."""
        self._abort(list(self._by_id))

    def _start(self, number: int, request: SamplingRequest) -> None:
        sampling = self._sampling(request)
        sampling.output_kind = RequestOutputKind.FINAL_ONLY
        name = next(self._ids)
        engine = self._llm.llm_engine
        own = engine.add_request(name, self._prompt(request), sampling, lora_request=self._adapters)
        state = engine.output_processor.request_states[own]
        log_probs = None
        if sampling.logprobs is not None:
            state.logprobs_processor = _LogProbs()
            log_probs = state.logprobs_processor.logprobs
        if self._steady is not None:
            self._steady.follow(own, state.detokenizer.output_token_ids, log_probs)
        self._by_id[name] = _InFlight(number, request, state)

    def _abort(self, names: list[str]) -> None:
        self._llm.llm_engine.abort_request(names)
        for name in names:
            del self._by_id[name]

    def _step(self, parts: dict[int, Part]) -> None:
        """One step of vLLM. Adds the last part of each response that it finished."""
        for output in self._llm.llm_engine.step():
            own, last = self._by_id.pop(output.request_id), output.outputs[0]
            parts[own.number] = _part(own, last.token_ids[own.returned :], last.finish_reason)

    def _settle(self, parts: dict[int, Part]) -> None:
        """Takes the tokens of steps that vLLM has begun but not yet returned, as it does with asynchronous scheduling.

        Otherwise they would come with the next call, after an update perhaps.
        """
        begun = self._llm.llm_engine.engine_core.engine_core.batch_queue
        if begun:
            self._llm.sleep(level=0, mode="keep")  # level 0: schedules no further step
            while begun:
                self._step(parts)
            self._llm.wake_up(tags=["scheduling"])
        if self._steady is not None:
            self._steady.write()


def _part(own: _InFlight, token_ids: Sequence[int], reason: str | None = None) -> Part:
    """Tokens that were not returned yet; `reason` is vLLM's if they are the last ones. Raises WorkerError without any.

    There may be more log-probs, because vLLM may have sampled on after a stop string.
    """
    if not token_ids:
        raise WorkerError("vLLM returned a response without tokens")
    log_probs = own.state.logprobs_processor.logprobs
    end = own.returned + len(token_ids)
    return Part(
        tuple(token_ids),
        None if log_probs is None else tuple(log_probs[own.returned : end]),
        reason == "stop",
        cached_tokens=None if own.returned else own.state.num_cached_tokens,
        finished=reason is not None,
    )
