"""Drafts in vLLM's second model runner, on GPUs.

It knows drafts from its own proposers only. Its sampler draws a token for every row of logits, with noise that follows
from the seed of the request and the place of the token. So each token is the one that would have been sampled without
drafts, and a response goes on for as long as they were the drafted ones.
"""

from collections.abc import Collection
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from trainer.errors import WorkerError
from trainer.rollout.speculation.acceptance import accepted_tokens

# Tokens of a step with drafts for which there are CUDA graphs.
SIZES = (*range(16, 96, 16), *range(96, 256, 32), *range(256, 512, 64), *range(512, 1025, 128))


class Graphs(ModelCudaGraphManager):  # type: ignore[misc]
    """CUDA graphs of whole steps in which each response has one token to `longest` tokens.

    vLLM's own graphs of whole steps are for one token each. All other steps launch the attention of each layer one by
    one, which takes longer than the kernels of few responses.
    """

    def __init__(self, runner: Any, longest: int) -> None:
        plain = runner.cudagraph_manager
        self._longest = longest
        self._steps: list[BatchExecutionDescriptor] = []  # that have a graph, the smallest first
        super().__init__(plain.vllm_config, plain.device, CUDAGraphMode.FULL, decode_query_len=longest)
        self.capture(
            runner.model,
            runner.model_state,
            runner.input_buffers,
            runner.intermediate_tensors,
            runner.block_tables,
            runner.attn_groups,
            runner.kv_cache_config,
        )

    def _init_candidates(self) -> None:
        """vLLM's: notes which graphs to capture, the largest first."""
        most = self.compilation_config.max_cudagraph_capture_size
        known = {field.name for field in fields(BatchExecutionDescriptor)}
        limit = {"max_query_len": self._longest} if "max_query_len" in known else {}
        for size in SIZES:
            # The dummy responses of a capture have a token each, and the last of them the others: `longest`.
            responses = size - self._longest + 1
            if 2 * self._longest <= size <= most and responses <= self.max_num_reqs:
                self._steps.append(BatchExecutionDescriptor(CUDAGraphMode.FULL, size, responses, **limit))
        self._capture_descs[CUDAGraphMode.FULL] = self._steps[::-1]

    def fit(self, tokens: Collection[int]) -> bool:
        """Whether a step with so many tokens of each response has a graph. One response must have as many as the
        graphs were captured for."""
        return max(tokens) == self._longest and self._smallest(len(tokens), sum(tokens)) is not None

    def dispatch(self, num_reqs: int, num_tokens: int, *_arguments: Any, **_others: Any) -> BatchExecutionDescriptor:
        """vLLM's: the graph for a step that has one."""
        return self._smallest(num_reqs, num_tokens)

    def _smallest(self, responses: int, tokens: int) -> BatchExecutionDescriptor | None:
        needed = max(tokens, responses + self._longest - 1)
        return next((step for step in self._steps if step.num_tokens >= needed), None)


class Verification:
    """Gives the drafts that vLLM's scheduler names to a model runner, and takes from each step what was accepted."""

    def __init__(self, runner: Any, most: int) -> None:
        """`most` drafted tokens for a response in a step."""
        self._runner = runner
        self._states = runner.req_states
        self._states.draft_tokens = torch.zeros(
            (self._states.max_num_reqs, most), dtype=torch.int64, device=runner.device
        )
        self._plain = runner.cudagraph_manager
        self._graphs = None
        if self._plain.graphs and runner.lora_config is None:
            self._graphs = Graphs(runner, longest=1 + most)
        runner.decode_query_len = 1 + most  # rows of logits for a response
        self._execute, self._sample = runner.execute_model, runner.sample
        runner.execute_model, runner.sample = self.execute_model, self.sample

    def execute_model(self, step: Any, *arguments: Any, **others: Any) -> Any:
        """As vLLM's."""
        drafts = step.scheduled_spec_decode_tokens
        if drafts:
            table = self._states.draft_tokens
            places = [self._states.req_id_to_index[name] for name in drafts]
            padded = [[*draft, *[0] * (table.shape[1] - len(draft))] for draft in drafts.values()]
            table[torch.tensor(places, device=table.device)] = torch.tensor(padded, device=table.device)
        fit = drafts and self._graphs is not None and self._graphs.fit(step.num_scheduled_tokens.values())
        self._runner.cudagraph_manager = self._graphs if fit else self._plain
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
