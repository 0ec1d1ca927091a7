"""The responses that a vLLM engine samples step by step, and keeps while its weights change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from trainer.errors import WorkerError
from trainer.rollout.sampling import Part, Response, SamplingRequest


@dataclass
class _InFlight:
    """A request under the caller's number, vLLM's record of it, and how many of its tokens were returned."""

    number: int
    request: SamplingRequest
    state: Any
    returned: int = 0


class ResponsesInFlight:
    """Runs vLLM's own queue a few steps at a time. Between two calls no step is under way.

    Tokens are read from vLLM's records at the end of a call: an output per response and step, as vLLM makes for those
    who stream, would take longer than the step itself.
    """

    def __init__(
        self,
        llm: LLM,
        prompt: Callable[[SamplingRequest], dict[str, object]],
        sampling: Callable[[SamplingRequest], SamplingParams],
        adapters: LoRARequest | None,
    ) -> None:
        self._llm = llm
        self._prompt = prompt
        self._sampling = sampling
        self._adapters = adapters
        self._by_id: dict[str, _InFlight] = {}  # in the order of their start
        self._ids = map(str, count())

    def __len__(self) -> int:
        return len(self._by_id)

    def advance(self, new: Mapping[int, SamplingRequest], steps: int) -> dict[int, Part]:
        """See `trainer.rollout.engine.InFlightEngine.advance`."""
        for number, request in new.items():
            self._start(number, request)
        parts: dict[int, Part] = {}
        for _ in range(steps):
            if not self._by_id:
                break
            self._step(parts)
        self._settle(parts)
        for one in self._by_id.values():
            if token_ids := one.state.detokenizer.output_token_ids[one.returned :]:
                parts[one.number] = _part(one, token_ids, one.state.logprobs_processor.logprobs)
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
        self._by_id[name] = _InFlight(number, request, engine.output_processor.request_states[own])

    def _abort(self, names: list[str]) -> None:
        self._llm.llm_engine.abort_request(names)
        for name in names:
            del self._by_id[name]

    def _step(self, parts: dict[int, Part]) -> None:
        """One step of vLLM. Adds the last part of each response that it finished."""
        for output in self._llm.llm_engine.step():
            own, last = self._by_id.pop(output.request_id), output.outputs[0]
            parts[own.number] = _part(own, last.token_ids[own.returned :], last.logprobs, last.finish_reason)

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


def response_of(output: CompletionOutput, cached_tokens: int | None = None) -> Response:
    """vLLM's output as a response. Raises WorkerError if it has no token."""
    if not output.token_ids:
        raise WorkerError("vLLM returned a response without tokens")
    token_ids = tuple(output.token_ids)
    log_probs = _log_probs(token_ids, output.logprobs)
    return Response(token_ids, log_probs, output.finish_reason == "stop", cached_tokens=cached_tokens)


def _log_probs(token_ids: Sequence[int], entries: Sequence[Mapping[int, Any]] | None) -> tuple[float, ...] | None:
    """The log-prob of each token. vLLM may have sampled on after a stop string, so there may be more entries."""
    if entries is None:
        return None
    own = entries[: len(token_ids)]
    return tuple(entry[token].logprob for entry, token in zip(own, token_ids, strict=True))


def _part(
    own: _InFlight, token_ids: Sequence[int], entries: Sequence[Mapping[int, Any]] | None, reason: str | None = None
) -> Part:
    """Tokens that were not returned yet, with their entries among those of the whole response."""
    new = None if entries is None else entries[own.returned : own.returned + len(token_ids)]
    log_probs = _log_probs(token_ids, new)
    return Part(tuple(token_ids), log_probs, reason == "stop", finished=reason is not None)
