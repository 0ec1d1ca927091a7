"""Drafts in vLLM's first model runner, which is the one for CPUs: verified by sampling as if there were none."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

NOTHING = -1  # vLLM's mark for a place without a token


class Verification:
    """Samples a response's next token where vLLM has its logits, and goes on while it is the drafted one.

    Each token is drawn by vLLM's own sampler from the generator of its request, so it is the one that would have been
    sampled without drafts. vLLM's rejection sampler accepts as many drafted tokens on average, and its tokens have the
    same distribution, but they are other ones.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __call__(
        self, metadata: SpecDecodeMetadata, _draft_probs: None, logits: Tensor, sampling: SamplingMetadata
    ) -> SamplerOutput:
        """Tokens of shape (responses, drafted + 1), and their log-probs of shape (responses * (drafted + 1), k).

        `logits` has a row for each drafted token of a response, and one for the token after them.
        """
        drafted = metadata.num_draft_tokens
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


class Silent:
    """A proposer without drafts (`method="custom_class"`): the scheduler has them, but the runner asks for one before
    it verifies any."""

    def __init__(self, _vllm_config: VllmConfig) -> None:
        pass

    def load_model(self, _model: object) -> None:
        """vLLM's: nothing."""

    def propose(self, sampled: list[list[int]], *_arguments: object, **_others: object) -> list[list[int]]:
        """vLLM's: no draft for any response."""
        return [[] for _ in sampled]


def attach(worker: Any) -> None:
    """Takes the place of the rejection sampler in the model runner of a vLLM worker."""
    runner = worker.model_runner
    runner.rejection_sampler = Verification(runner.sampler)
