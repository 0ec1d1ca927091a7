"""Speculative decoding in vLLM: drafts from earlier tokens, verified by sampling as if there were none.

vLLM calls a proposer of this kind in its first model runner only.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from trainer.rollout.occupancy import Drafts
from trainer.rollout.speculation.drafts import Drafter, Row

NOTHING = -1  # vLLM's mark for a place without a token


class Verification:
    """Samples a response's next token where vLLM has its logits, and goes on while it is the drafted one.

    Each token is drawn by vLLM's own sampler from the generator of its request, so it is the one that would have been
    sampled without drafts. vLLM's rejection sampler accepts as many drafted tokens on average, and its tokens have the
    same distribution, but they are other ones.
    """

    def __init__(self, sampler: Sampler, names: Callable[[], Sequence[str]]) -> None:
        """`names` returns those of the responses in a step."""
        self._sampler = sampler
        self._names = names
        self.drafted: dict[str, int] = {}  # by the response's name, in the last step that verified any

    def __call__(
        self, metadata: SpecDecodeMetadata, _draft_probs: None, logits: Tensor, sampling: SamplingMetadata
    ) -> SamplerOutput:
        """Tokens of shape (responses, drafted + 1), and their log-probs of shape (responses * (drafted + 1), k).

        `logits` has a row for each drafted token of a response, and one for the token after them.
        """
        drafted = metadata.num_draft_tokens
        self.drafted = dict(zip(self._names(), drafted, strict=False))
        count, width = len(drafted), max(drafted) + 1
        drafts = [part.tolist() for part in metadata.draft_token_ids.split(drafted)]
        first = (metadata.cu_num_sampled_tokens - torch.tensor(drafted, device=logits.device) - 1).long()
        tokens = torch.full((count, width), NOTHING, dtype=torch.int32, device=logits.device)
        log_probs: LogprobsTensors | None = None
        alive = list(range(count))
        for place in range(width):
            rows = torch.tensor(alive, device=logits.device)
            output = self._sampler(logits=logits[first[rows] + place], sampling_metadata=_part(sampling, alive, rows))
            tokens[rows, place] = output.sampled_token_ids[:, 0]
            if output.logprobs_tensors is not None:
                log_probs = _placed(log_probs, output.logprobs_tensors, rows * width + place, count * width)
            sampled = output.sampled_token_ids[:, 0].tolist()
            alive = [
                row for row, token in zip(alive, sampled, strict=True) if drafts[row][place : place + 1] == [token]
            ]
            if not alive:
                break
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=log_probs)


def _part(sampling: SamplingMetadata, alive: list[int], rows: Tensor) -> SamplingMetadata:
    """How these rows are sampled. `VllmEngine` sets none of the fields that are left as they are."""

    def of(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[rows]

    generators = {place: sampling.generators[row] for place, row in enumerate(alive) if row in sampling.generators}
    return replace(
        sampling,
        temperature=of(sampling.temperature),
        top_p=of(sampling.top_p),
        top_k=of(sampling.top_k),
        generators=generators,
    )


def _placed(into: LogprobsTensors | None, found: LogprobsTensors, places: Tensor, count: int) -> LogprobsTensors:
    """Adds the log-probs of some places to those of all `count`."""
    parts = (found.logprob_token_ids, found.logprobs, found.selected_token_ranks)
    if into is None:
        into = LogprobsTensors(*(part.new_zeros((count, *part.shape[1:])) for part in parts))
    for whole, part in zip(into, parts, strict=False):
        whole[places] = part
    return into


class Proposer:
    """vLLM's view of a `Drafter` (`method="custom_class"`)."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._drafter = Drafter(vllm_config.speculative_config.num_speculative_tokens)
        self._counted = Drafts()
        self._runner: Any = None
        self._verification: Verification

    def attach(self, runner: Any) -> None:
        """Takes the place of the rejection sampler in a model runner that vLLM has started."""
        self._runner = runner
        self._verification = Verification(runner.sampler, lambda: runner.input_batch.req_ids)
        runner.rejection_sampler = self._verification

    def load_model(self, _model: object) -> None:
        """vLLM's: nothing, because drafts come from the tokens alone."""

    def take_drafts(self) -> Drafts:
        """What was drafted since the last call."""
        taken, self._counted = self._counted, Drafts()
        return taken

    def propose(self, sampled: list[list[int]], lengths: Any, token_ids: Any, **_others: object) -> list[list[int]]:
        """vLLM's: a draft for each response, after a step that sampled these tokens.

        `token_ids` has shape (responses, tokens), `lengths` says how many of them count. A response whose prompt is not
        read to its end has no sampled token.
        """
        batch, verification = self._runner.input_batch, self._verification
        # vLLM may have verified drafts of responses that ended before it asked for new ones.
        verified, verification.drafted = verification.drafted, {}
        drafted = [verified.get(name, 0) for name in batch.req_ids]
        drafts: list[list[int]] = [[] for _ in sampled]
        speaking = [place for place, new in enumerate(sampled) if new]
        self._counted += Drafts(sum(drafted), sum(len(sampled[place]) - 1 for place in speaking))
        if not speaking or self._drafter.paused(len(speaking)):
            return drafts

        def row(place: int) -> Row:
            def read() -> tuple[list[int], list[int]]:
                prompt = batch.num_prompt_tokens[place]
                return token_ids[place, :prompt].tolist(), token_ids[place, prompt : lengths[place]].tolist()

            return Row(batch.req_ids[place], sampled[place], drafted[place], read)

        for place, draft in zip(speaking, self._drafter.draft([row(place) for place in speaking]), strict=True):
            drafts[place] = draft
        return drafts


def attach(worker: Any) -> Proposer:
    """Completes the proposer of a vLLM worker and returns it. Raises RuntimeError if vLLM runs another one."""
    proposer: Proposer = worker.model_runner.drafter
    proposer.attach(worker.model_runner)
    return proposer
