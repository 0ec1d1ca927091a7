"""Records the experts that tokens choose in vLLM's first model runner, which runs on CPUs.

The record is taken from the model runner and not from vLLM's outputs: only the second model runner has these, and steps
of the fast path never reach them.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trainer.data.batches.routes import Choices, smallest_type
from trainer.errors import WorkerError
from trainer.rollout.vllm.patches import capture_choices, outdated


class RouteRecorder:
    """The choices of the responses that were begun with `start`, until `forget`."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._layers: dict[int, Tensor] = {}  # by layer: the choices of the last step, [tokens, choices]
        # By request: the first token of each step and the choices of its tokens, in the order of the steps.
        self._steps: dict[str, list[tuple[int, Choices]]] = {}
        self._type = smallest_type(runner.model_config.get_num_experts())
        capture_choices(runner.get_model(), self._layers.__setitem__)
        self._execute = runner.execute_model
        runner.execute_model = self._execute_and_record

    def start(self, request: str) -> None:
        self._steps[request] = []

    def forget(self, request: str) -> None:
        self._steps.pop(request, None)

    def take(self, request: str, begin: int, end: int) -> tuple[int, Choices]:
        """The choices of the tokens from `begin` to `end`, and the first of them that has a record.

        What was computed again replaces what it repeats: after a preemption, or after a draft that was refused.
        """
        steps = [(first, choices) for first, choices in self._steps[request] if first + len(choices) > begin]
        begin = max(begin, min((first for first, _ in steps), default=end))
        if begin >= end:
            return end, np.empty((0, 0, 0), self._type)
        taken: npt.NDArray[Any] = np.empty((end - begin, *steps[0][1].shape[1:]), self._type)
        for first, choices in steps:
            start, stop = max(first, begin), min(first + len(choices), end)
            taken[start - begin : max(start, stop) - begin] = choices[start - first : max(start, stop) - first]
        # Later tokens only are asked for from now on.
        self._steps[request] = [step for step in self._steps[request] if step[0] + len(step[1]) > end]
        return begin, taken

    def _execute_and_record(self, scheduled: Any, *arguments: Any, **named: Any) -> Any:
        """vLLM's `GPUModelRunner.execute_model`."""
        self._layers.clear()
        output = self._execute(scheduled, *arguments, **named)
        tokens = scheduled.num_scheduled_tokens
        if not self._layers or not self._steps.keys() & tokens.keys():
            return output
        of_layers = [self._layers[layer] for layer in sorted(self._layers)]
        choices = np.stack([layer.numpy() for layer in of_layers], axis=1).astype(self._type)
        batch, place = self._runner.input_batch, 0
        for request, computed in zip(batch.req_ids, batch.num_computed_tokens_cpu, strict=False):
            count = tokens[request]
            if request in self._steps:
                self._steps[request].append((int(computed), choices[place : place + count]))
            place += count
        return output


def record_routes(worker: Any, device: str) -> RouteRecorder:
    """The recorder of a vLLM worker in this process. Raises WorkerError on GPUs, and for unknown versions of vLLM."""
    on_gpu = "on GPUs the experts that vLLM's tokens choose are not recorded yet" if device == "cuda" else None
    if reason := on_gpu or outdated("experts"):
        raise WorkerError(
            f"actor.router_replay=engine: {reason}",
            hint="set actor.router_replay=recompute, or rollout.engine=transformers",
        )
    return RouteRecorder(worker.model_runner)
