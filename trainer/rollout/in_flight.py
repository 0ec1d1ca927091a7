"""The responses that a vLLM engine samples step by step, and keeps while its weights change."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from trainer.errors import WorkerError
from trainer.rollout.sampling import Part, Response, SamplingRequest


@dataclass
class _InFlight:
    """A request under the caller's number; `started`: it has a token."""

    number: int
    request: SamplingRequest
    started: bool = False


class ResponsesInFlight:
    """Runs vLLM's own queue a few steps at a time. Between two calls no step is under way."""

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
        outputs: dict[int, list[CompletionOutput]] = defaultdict(list)
        for _ in range(steps):
            if not self._by_id:
                break
            self._step(outputs)
        self._settle(outputs)
        return {number: _part(own) for number, own in outputs.items()}

    def restart_without_tokens(self) -> None:
        """Starts those that have no token anew, so that a prompt is read by the weights that answer it."""
        waiting = {name: one for name, one in self._by_id.items() if not one.started}
        self._abort(list(waiting))
        for one in waiting.values():
            self._start(one.number, one.request)

    def forget(self) -> None:
        """Ends all of them."""
        self._abort(list(self._by_id))

    def _start(self, number: int, request: SamplingRequest) -> None:
        sampling = self._sampling(request)
        sampling.output_kind = RequestOutputKind.DELTA
        name = next(self._ids)
        self._by_id[name] = _InFlight(number, request)
        self._llm.llm_engine.add_request(name, self._prompt(request), sampling, lora_request=self._adapters)

    def _abort(self, names: list[str]) -> None:
        self._llm.llm_engine.abort_request(names)
        for name in names:
            del self._by_id[name]

    def _step(self, outputs: dict[int, list[CompletionOutput]]) -> None:
        for output in self._llm.llm_engine.step():
            own = self._by_id[output.request_id]
            own.started = True
            outputs[own.number] += output.outputs
            if output.finished:
                del self._by_id[output.request_id]

    def _settle(self, outputs: dict[int, list[CompletionOutput]]) -> None:
        """Takes the tokens of steps that vLLM has begun but not yet returned, as it does with asynchronous scheduling.

        Otherwise they would come with the next call, after an update perhaps.
        """
        begun = self._llm.llm_engine.engine_core.engine_core.batch_queue
        if begun:
            self._llm.sleep(level=0, mode="keep")  # level 0: schedules no further step
            while begun:
                self._step(outputs)
            self._llm.wake_up(tags=["scheduling"])


def response_of(outputs: Sequence[CompletionOutput], cached_tokens: int | None = None) -> Response:
    """The tokens of vLLM's outputs, one after the other. Raises WorkerError if there are none."""
    token_ids = tuple(chain.from_iterable(output.token_ids for output in outputs))
    if not token_ids:
        raise WorkerError("vLLM returned a response without tokens")
    ended = outputs[-1].finish_reason == "stop"
    if outputs[-1].logprobs is None:
        return Response(token_ids, None, ended, cached_tokens=cached_tokens)
    log_probs = chain.from_iterable(map(_log_probs, outputs))
    return Response(token_ids, tuple(log_probs), ended, cached_tokens=cached_tokens)


def _log_probs(output: CompletionOutput) -> list[float]:
    assert output.logprobs is not None
    entries = output.logprobs[: len(output.token_ids)]  # vLLM may have sampled on after a stop string
    return [entry[token].logprob for entry, token in zip(entries, output.token_ids, strict=True)]


def _part(outputs: Sequence[CompletionOutput]) -> Part:
    response = response_of(outputs)
    finished = outputs[-1].finish_reason is not None
    return Part(response.token_ids, response.log_probs, response.ended, finished=finished)
