"""Drafts in vLLM's second model runner, on GPUs.

It knows drafts from its own proposers only. Its sampler draws a token for every row of logits, with noise that follows
from the seed of the request and the place of the token. So each token is the one that would have been sampled without
drafts, and a response goes on for as long as they were the drafted ones.
"""

from typing import Any

import torch
from torch import Tensor

from trainer.errors import WorkerError


def accepted_tokens(sampled: Tensor, inputs: Tensor, first: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The tokens that a step gives to each response, of shape (responses, width), and how many of these count.

    `sampled` has a token for each row of logits, `inputs` the token at whose place the row is, both of shape (rows,).
    The rows of response i are those from `first[i]` to `first[i + 1]`, at most `width`.
    """
    rows = first[:-1, None] + torch.arange(width, device=first.device)
    tokens = sampled[rows.clamp(max=len(sampled) - 1)]
    following = inputs[(rows + 1).clamp(max=len(inputs) - 1)]
    accepted = (tokens == following) & (rows + 1 < first[1:, None])
    return tokens, accepted.cumprod(dim=1).sum(dim=1) + 1


class Verification:
    """Gives the drafts that vLLM's scheduler names to a model runner, and takes from each step what was accepted."""

    def __init__(self, runner: Any, most: int) -> None:
        """`most` drafted tokens for a response in a step."""
        self._states = runner.req_states
        self._states.draft_tokens = torch.zeros(
            (self._states.max_num_reqs, most), dtype=torch.int64, device=runner.device
        )
        runner.decode_query_len = 1 + most  # rows of logits for a response
        self._execute, self._sample = runner.execute_model, runner.sample
        runner.execute_model, runner.sample = self.execute_model, self.sample

    def execute_model(self, step: Any, *arguments: Any, **others: Any) -> Any:
        """As vLLM's."""
        if drafts := step.scheduled_spec_decode_tokens:
            table = self._states.draft_tokens
            places = [self._states.req_id_to_index[name] for name in drafts]
            padded = [[*draft, *[0] * (table.shape[1] - len(draft))] for draft in drafts.values()]
            table[torch.tensor(places, device=table.device)] = torch.tensor(padded, device=table.device)
        return self._execute(step, *arguments, **others)

    def sample(self, hidden_states: Tensor, batch: Any, *arguments: Any, **others: Any) -> Any:
        """As vLLM's: what was sampled, how many tokens of each response, and how many drafted ones were not."""
        output, sampled, rejected = self._sample(hidden_states, batch, *arguments, **others)
        if not batch.num_draft_tokens:
            return output, sampled, rejected
        first = batch.cu_num_logits
        tokens, counts = accepted_tokens(
            output.sampled_token_ids[:, 0],
            batch.input_ids[batch.logits_indices],
            first,
            int(batch.num_draft_tokens_per_req.max()) + 1,
        )
        # A response whose prompt is not read to its end samples nothing.
        output.sampled_token_ids = tokens
        output.num_sampled = (counts * (sampled > 0)).to(sampled.dtype)
        output.num_rejected = ((first.diff() - counts) * (sampled > 0)).to(rejected.dtype)
        return output, output.num_sampled, output.num_rejected


def attach(worker: Any, most: int) -> None:
    """Lets the model runner of a vLLM worker verify drafts. Raises WorkerError if it is the first one."""
    runner = worker.model_runner
    if not hasattr(runner, "req_states"):
        raise WorkerError(
            "rollout.speculative_tokens: vLLM runs this model with its first model runner, which is slower with drafts",
            hint="leave the setting out",
        )
    Verification(runner, most)
