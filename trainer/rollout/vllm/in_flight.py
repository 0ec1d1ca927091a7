"""The responses in flight in a vLLM engine: sampled to their end or some steps at a time, across weight updates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from trainer.errors import WorkerError
from trainer.rollout.sampling import Part, Response, SamplingRequest, segments_of
from trainer.rollout.vllm.fast_path import FastPath
from trainer.rollout.vllm.patches import plain_log_probs
from trainer.rollout.vllm.routes import RouteRecorder
from trainer.rollout.vllm.speculation import Speculation


@dataclass
class _InFlight:
    """A request under the caller's number, its id in vLLM, the `RequestState` of vLLM's output processor, and how many
    of its tokens were returned. The experts of tokens before `routed` were returned, too."""

    number: int
    request: SamplingRequest
    request_id: str
    state: Any
    returned: int = 0
    routed: int = 0


class ResponsesInFlight:
    """Runs vLLM a few steps at a time. Between two calls no step is under way.

    Tokens are read from vLLM's records at the end of a call, because an output per step takes time.
    """

    def __init__(
        self,
        llm: Any,
        prompt: Callable[[SamplingRequest], dict[str, object]],
        sampling: Callable[[SamplingRequest], Any],
        adapters: Any,
        fast_path: FastPath | None,
        speculation: Speculation | None,
        recorder: RouteRecorder | None = None,
    ) -> None:
        """`prompt` and `sampling` return vLLM's prompt and `SamplingParams`; `adapters` is a `LoRARequest` or None."""
        self._llm = llm
        self._prompt = prompt
        self._sampling = sampling
        self._adapters = adapters
        self._fast_path = fast_path
        self._speculation = speculation
        self._recorder = recorder
        self._by_id: dict[str, _InFlight] = {}  # in the order of their start
        self._ids = map(str, count())

    def to_their_end(self, requests: Sequence[SamplingRequest]) -> list[Response]:
        """See `trainer.rollout.engine.RolloutEngine.generate`. Nothing else may be in flight."""
        assert not self._by_id, "vLLM would mix these responses with those in flight"
        parts = self.advance(dict(enumerate(requests)))
        return [parts[place] for place in range(len(requests))]

    def advance(self, new: Mapping[int, SamplingRequest], steps: int | None = None) -> dict[int, Part]:
        """See `trainer.rollout.engine.InFlightEngine.advance`; without `steps`, until all have ended."""
        for number, request in new.items():
            self._start(number, request)
        parts: dict[int, Part] = {}
        for _ in count() if steps is None else range(steps):
            if self._speculation is not None and self._speculation.should_switch():
                self._settle(parts)
                self._speculation.switch()
            if not self._by_id:
                break
            self._step(parts)
        self._settle(parts)
        for response in self._by_id.values():
            if token_ids := response.state.detokenizer.output_token_ids[response.returned :]:
                parts[response.number] = self._part(response, token_ids)
                response.returned += len(token_ids)
        return parts

    def restart_without_tokens(self) -> None:
        """Restarts requests that have no output yet, so prefill uses the new weights."""
        waiting = {name: response for name, response in self._by_id.items() if not response.returned}
        self._abort(list(waiting))
        for response in waiting.values():
            self._start(response.number, response.request)

    def abort_all(self) -> None:
        """Ends all responses."""
        self._abort(list(self._by_id))

    def _start(self, number: int, request: SamplingRequest) -> None:
        name, engine, sampling = next(self._ids), self._llm.llm_engine, self._sampling(request)
        request_id = engine.add_request(name, self._prompt(request), sampling, lora_request=self._adapters)
        state = engine.output_processor.request_states[request_id]
        log_probs = None
        if sampling.logprobs is not None:
            state.logprobs_processor = plain_log_probs()
            log_probs = state.logprobs_processor.logprobs
        if self._fast_path is not None:
            self._fast_path.track(request_id, state.detokenizer.output_token_ids, log_probs)
        self._by_id[name] = _InFlight(number, request, request_id, state, routed=request.record_from or 0)
        if self._recorder is not None and request.record_from is not None:
            self._recorder.start(request_id)

    def _abort(self, names: list[str]) -> None:
        self._llm.llm_engine.abort_request(names)
        for name in names:
            self._end(self._by_id.pop(name))

    def _step(self, parts: dict[int, Part]) -> None:
        """One step of vLLM. Adds the last part of each response that it finished."""
        for output in self._llm.llm_engine.step():
            response, last = self._by_id.pop(output.request_id), output.outputs[0]
            parts[response.number] = self._part(response, last.token_ids[response.returned :], last.finish_reason)
            self._end(response)

    def _settle(self, parts: dict[int, Part]) -> None:
        """Ends the steps that vLLM has scheduled ahead. Otherwise their tokens would come with the next call, after an
        update perhaps."""
        scheduled = self._llm.llm_engine.engine_core.engine_core.batch_queue
        if scheduled:
            self._llm.sleep(level=0, mode="keep")  # level 0: schedules no further step
            while scheduled:
                self._step(parts)
            self._llm.wake_up(tags=["scheduling"])
        if self._fast_path is not None:
            self._fast_path.flush()

    def _end(self, response: _InFlight) -> None:
        if self._recorder is not None:
            self._recorder.forget(response.request_id)

    def _part(self, response: _InFlight, token_ids: Sequence[int], reason: str | None = None) -> Part:
        """See `_part`, with the experts if they are to be recorded."""
        part = _part(response, token_ids, reason)
        if self._recorder is None or response.request.record_from is None:
            return part
        end = len(response.request.prompt) + response.returned + len(token_ids) - 1
        first, choices = self._recorder.take(response.request_id, response.routed, end)
        response.routed = end
        return replace(part, routes=segments_of(response.request, first, choices))


def _part(response: _InFlight, token_ids: Sequence[int], reason: str | None = None) -> Part:
    """Tokens that were not returned yet; `reason` is vLLM's if they are the last ones. Raises WorkerError without any.

    There may be more log-probs than tokens, because vLLM may have sampled beyond a stop string.
    """
    if not token_ids:
        raise WorkerError("vLLM returned a response without tokens")
    log_probs = response.state.logprobs_processor.logprobs
    end = response.returned + len(token_ids)
    return Part(
        tuple(token_ids),
        None if log_probs is None else tuple(log_probs[response.returned : end]),
        reason == "stop",
        cached_tokens=None if response.returned else response.state.num_cached_tokens,
        finished=reason is not None,
    )
