"""Time of forward and backward passes by shared operators beside the trainer's today, and errors of their gradients.

The trainer's passes with gradients also compute the entropy.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.common import SHAPES, Results
from benchmarks.gpu.exactness import gradients, operators
from benchmarks.gpu.exactness.comparing import milliseconds, reported
from benchmarks.gpu.exactness.forward import FORMULAS, Operators, head_width, rope_base, shared
from benchmarks.gpu.exactness.sampling import Sampled, drawn_tokens
from trainer.data.batches.batch import Batch
from trainer.models.networks import PolicyNetwork
from trainer.models.packing import PackedRows

Forward = Callable[[], Tensor]
TODAY = "trainer today"
TILES = "shared operators, tiles"
CUBLAS = "shared operators, cuBLAS without split-K"


class Steps:
    def __init__(self, shape: str, model: Path, device: str, results: Results) -> None:
        self._shape, self._directory, self._device, self._results = shape, model, device, results
        self._small = device == "cpu"
        # As the trainer does. Few products are in float32, but Transformers' angles are.
        torch.set_float32_matmul_precision("high")
        self._model = self._loaded(torch.float32 if self._small else torch.bfloat16)
        self._network = PolicyNetwork(self._model, 1.0)
        self._draw = random.Random(4)
        self._ways: dict[str, Operators] = {TILES: FORMULAS}
        if not self._small:
            self._ways = {TILES: shared(operators.tiled_product), CUBLAS: shared(operators.torch_product)}

    def take(self) -> None:
        with reported(self._results, "gradients"):
            self._errors(self._drawn(2 if self._small else 4))
        many = self._drawn(2 if self._small else 32)
        for layer in self._network.decoder.layers if not self._small else []:
            layer.compile(dynamic=True)
        if not self._small:
            for name, formula in gradients.FORMULAS.items():
                gradients.GRADIENTS[name] = torch.compile(formula, dynamic=True)
        for name in (TODAY, *self._ways):
            with reported(self._results, name):
                self._time(name, many)

    def _errors(self, few: Sampled) -> None:
        """Of gradients in bfloat16 against those in float32: the norm of the difference by the norm, per parameter."""
        weights = torch.randn(len(few.log_probs), device=self._device)

        def found(forward: Forward, model: Any) -> dict[str, Tensor]:
            model.zero_grad(set_to_none=True)
            (forward() * weights).sum().backward()
            of = {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}
            model.zero_grad(set_to_none=True)
            return of

        with torch.compiler.set_stance("force_eager"):
            wide = self._loaded(torch.float32)
            expected = found(self._today(few, PolicyNetwork(wide, 1.0)), wide)
            del wide
            for name in (TODAY, *self._ways):
                with reported(self._results, f"gradients of {name}"):
                    actual = found(self._forward(name, few), self._model)
                    each = {key: float((actual[key] - value).norm() / value.norm()) for key, value in expected.items()}
                    worst = max(each, key=lambda key: each[key])
                    median = sorted(each.values())[len(each) // 2]
                    self._results.add(way=name, gradient_error={"median": median, "worst": each[worst], "of": worst})
                    if self._small and each[worst] > 1e-4:
                        raise AssertionError(f"the gradient of {worst} is wrong by {each[worst]}")

    def _time(self, name: str, sampled: Sampled) -> None:
        weights = torch.randn(len(sampled.log_probs), device=self._device)
        forward = self._forward(name, sampled)

        def both() -> None:
            self._model.zero_grad(set_to_none=True)
            (forward() * weights).sum().backward()

        both()  # compiles
        with torch.no_grad():
            forward_only = milliseconds(forward, 5)
        if not self._small:
            torch.cuda.reset_peak_memory_stats()
        with_backward = milliseconds(both, 5)
        self._results.add(
            way=name,
            tokens=sum(map(len, sampled.prompts + sampled.responses)),
            forward_ms=forward_only,
            forward_backward_ms=with_backward,
            peak_gib=0.0 if self._small else round(torch.cuda.max_memory_allocated() / 2**30, 1),
        )
        self._model.zero_grad(set_to_none=True)

    def _forward(self, name: str, sampled: Sampled) -> Forward:
        if not self._small:
            operators.split_k(allowed=name != CUBLAS)
        return self._today(sampled, self._network) if name == TODAY else self._exact(self._ways[name], sampled)

    def _today(self, sampled: Sampled, network: Any) -> Forward:
        batch = Batch.from_responses(sampled.prompts, sampled.responses, None)
        rows, mask = PackedRows.of(batch, multiple=256).to(torch.device(self._device)), batch.response_mask
        return lambda: network(rows)[0][mask.to(self._device)]

    def _exact(self, chosen: Operators, sampled: Sampled) -> Forward:
        config, line = self._model.config, sampled.line(self._device)
        arguments = (head_width(config), rope_base(config), self._device, self._model.dtype)
        cache = operators.rope_cache(1024, *arguments)
        return lambda: gradients.trained_log_probs(self._model, chosen, line, cache)

    def _drawn(self, rows: int) -> Sampled:
        vocabulary, lengths = SHAPES[self._shape].vocabulary, (8, 8) if self._small else (128, 384)
        prompts, responses = ([drawn_tokens(self._draw, vocabulary, n) for _ in range(rows)] for n in lengths)
        return Sampled(prompts, responses, torch.zeros(rows * lengths[1]))

    def _loaded(self, dtype: torch.dtype) -> Any:
        from transformers import AutoModelForCausalLM

        found = AutoModelForCausalLM.from_pretrained(self._directory, dtype=dtype, local_files_only=True)
        return found.to(self._device).eval()
