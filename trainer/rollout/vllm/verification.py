"""Verification of drafts in vLLM's model runners: tokens are sampled as they would be without drafts.

vLLM's rejection sampling accepts as many drafted tokens on average, and its tokens have the same distribution, but for
equal seeds they differ from those without drafts.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainer.errors import WorkerError
from trainer.rollout.vllm.patches import draft_graphs

NO_TOKEN = -1  # vLLM's mark for a place without a token


class SequentialVerification:
    """Replaces the rejection sampler of vLLM's first model runner, which is the one for CPUs.

    Samples each response's next token from its logits, and continues while the sampled token is the drafted one. Each
    token is drawn by vLLM's sampler from the generator of its request.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __call__(self, metadata: Any, _draft_probs: None, logits: Tensor, sampling: Any) -> Any:
        """vLLM's `SamplerOutput` with tokens of shape (responses, drafted + 1), and log-probs of shape
        (responses * (drafted + 1), k).

        `logits` has a row for each drafted token of a response, and one for the token after them.
        """
        drafted = metadata.num_draft_tokens
        count, width = len(drafted), max(drafted) + 1
        drafts = [part.tolist() for part in metadata.draft_token_ids.split(drafted)]
        first = (metadata.cu_num_sampled_tokens - torch.tensor(drafted, device=logits.device) - 1).long()
        tokens = torch.full((count, width), NO_TOKEN, dtype=torch.int32, device=logits.device)
        log_probs = None
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
        return replace(output, sampled_token_ids=tokens, logprobs_tensors=log_probs)


def _part(sampling: Any, alive: list[int], rows: Tensor) -> Any:
    """The `SamplingMetadata` of these rows. `VllmEngine` sets none of the other fields."""

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


def _placed(into: Any, log_probs: Any, places: Tensor, count: int) -> Any:
    """Adds vLLM's `LogprobsTensors` of some places to those of all `count`."""
    parts = log_probs[:3]  # token ids, log-probs, ranks
    if into is None:
        into = type(log_probs)(*(part.new_zeros((count, *part.shape[1:])) for part in parts))
    for whole, part in zip(into, parts, strict=False):
        whole[places] = part
    return into


class NoDrafts:
    """A proposer without drafts (`method="custom_class"`). The scheduler drafts, but the first model runner verifies
    drafts only if it has a proposer."""

    def __init__(self, _vllm_config: object) -> None:
        pass

    def load_model(self, _model: object) -> None:
        """Loads nothing."""

    def propose(self, sampled: list[list[int]], *_arguments: object, **_others: object) -> list[list[int]]:
        """No draft for any response."""
        return [[] for _ in sampled]


class ParallelVerification:
    """Verifies drafts in vLLM's second model runner, which is the one for GPUs and knows only its own proposers.

    Its sampler draws a token for every row of logits, with noise from the request's seed and the token's position. So
    each token equals the one without drafts, and a response continues while the sampled tokens are the drafted ones.
    """

    def __init__(self, runner: Any, max_drafted: int) -> None:
        """A step drafts at most `max_drafted` tokens of a response."""
        self._runner = runner
        self._states = runner.req_states
        self._states.draft_tokens = torch.zeros(
            (self._states.max_num_reqs, max_drafted), dtype=torch.int64, device=runner.device
        )
        self._plain_graphs = runner.cudagraph_manager
        self._graphs = None
        if self._plain_graphs.graphs and runner.lora_config is None:
            self._graphs = draft_graphs(runner, longest=1 + max_drafted)
        runner.decode_query_len = 1 + max_drafted  # rows of logits for a response
        self._execute, self._sample = runner.execute_model, runner.sample
        runner.execute_model, runner.sample = self.execute_model, self.sample

    def execute_model(self, step: Any, *arguments: Any, **named: Any) -> Any:
        """vLLM's `execute_model`."""
        drafts = step.scheduled_spec_decode_tokens
        if drafts:
            table = self._states.draft_tokens
            places = [self._states.req_id_to_index[request_id] for request_id in drafts]
            padded = [[*draft, *[0] * (table.shape[1] - len(draft))] for draft in drafts.values()]
            table[torch.tensor(places, device=table.device)] = torch.tensor(padded, device=table.device)
        has_graph = drafts and self._graphs is not None and self._graphs.fit(step.num_scheduled_tokens.values())
        self._runner.cudagraph_manager = self._graphs if has_graph else self._plain_graphs
        return self._execute(step, *arguments, **named)

    def sample(self, hidden_states: Tensor, batch: Any, *arguments: Any, **named: Any) -> Any:
        """vLLM's `sample`: the `SamplerOutput`, and for each response the number of sampled and of rejected tokens."""
        output, sampled, rejected = self._sample(hidden_states, batch, *arguments, **named)
        if not batch.num_draft_tokens:
            return output, sampled, rejected
        first = batch.cu_num_logits
        tokens, counts = accepted_tokens(
            output.sampled_token_ids[:, 0],
            batch.input_ids[batch.logits_indices],
            first,
            int(batch.num_draft_tokens_per_req.max()) + 1,
        )
        # A response whose prompt is not computed to its end samples nothing.
        output.sampled_token_ids = tokens
        output.num_sampled = (counts * (sampled > 0)).to(sampled.dtype)
        output.num_rejected = ((first.diff() - counts) * (sampled > 0)).to(rejected.dtype)
        return output, output.num_sampled, output.num_rejected


def accepted_tokens(sampled: Tensor, inputs: Tensor, first: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The tokens of each response in a step, of shape (responses, width), and how many of them count: its acceptance
    length.

    `sampled` has a token for each row of logits, `inputs` the token at the row's position, both of shape (rows,). The
    rows of response i are those from `first[i]` to `first[i + 1]`, at most `width`.
    """
    rows = first[:-1, None] + torch.arange(width, device=first.device)
    tokens = sampled[rows.clamp(max=len(sampled) - 1)]
    following = inputs[(rows + 1).clamp(max=len(inputs) - 1)]
    accepted = (tokens == following) & (rows + 1 < first[1:, None])
    return tokens, accepted.cumprod(dim=1).sum(dim=1) + 1


def verify_drafts(worker: Any, max_drafted: int, device: str) -> None:
    """Lets the model runner of a vLLM worker verify drafts. Raises WorkerError if that is the first one on a GPU."""
    runner = worker.model_runner
    if device != "cuda":
        runner.rejection_sampler = SequentialVerification(runner.sampler)
    elif hasattr(runner, "req_states"):
        ParallelVerification(runner, max_drafted)
    else:
        raise WorkerError(
            "rollout.speculative_tokens: vLLM runs this model with its first model runner, which is slower with drafts",
            hint="leave the setting out",
        )
