"""Prompts, what an engine sampled for them, and the packed lines of that."""

import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.common import END_TOKEN
from benchmarks.gpu.exactness.operators import Bounds


@dataclass(frozen=True)
class Work:
    """Prompts, and the number of tokens to sample for each."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]
    temperature: float = 1.0


@dataclass(frozen=True)
class Line:
    """Rows packed into one line of tokens; a row lacks its last token, which predicts nothing."""

    ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    bounds: Bounds
    predicting: Tensor  # [response tokens], places in the line
    targets: Tensor  # [response tokens]


@dataclass(frozen=True)
class Sampled:
    prompts: list[list[int]]
    responses: list[list[int]]
    log_probs: Tensor  # [response tokens] float32, of the engine
    temperature: float = 1.0

    def line(self, device: str, begin: int = 0, end: int | None = None) -> Line:
        ids: list[int] = []
        positions: list[int] = []
        predicting: list[int] = []
        targets: list[int] = []
        lengths: list[int] = []
        for prompt, response in zip(self.prompts[begin:end], self.responses[begin:end], strict=True):
            base, tokens = len(ids), prompt + response[:-1]
            ids += tokens
            positions += range(len(tokens))
            predicting += range(base + len(prompt) - 1, base + len(tokens))
            targets += response
            lengths.append(len(tokens))
        tensors = [torch.tensor(part, device=device) for part in (ids, positions, predicting, targets)]
        return Line(tensors[0], tensors[1], Bounds.of(lengths, device), tensors[2], tensors[3])

    def lines(self, device: str, tokens: int) -> list[Line]:
        """Lines of at most about so many tokens."""
        begins, total = [0], 0
        for row, (prompt, response) in enumerate(zip(self.prompts, self.responses, strict=True)):
            length = len(prompt) + len(response)
            if total and total + length > tokens:
                begins.append(row)
                total = 0
            total += length
        return [self.line(device, *pair) for pair in zip(begins, [*begins[1:], len(self.prompts)], strict=True)]


def drawn_tokens(draw: random.Random, vocabulary: int, length: int) -> list[int]:
    return [draw.randrange(END_TOKEN + 1, vocabulary) for _ in range(length)]


def workloads(vocabulary: int, small: bool) -> list[Work]:
    """Few rows of very different lengths, more rows than vLLM's norm sums in one way, and a temperature."""
    draw = random.Random(1)

    def prompts(count: int, low: int, high: int) -> list[list[int]]:
        return [drawn_tokens(draw, vocabulary, draw.randint(low, high)) for _ in range(count)]

    spread = prompts(4 if small else 32, 20, 200)
    wide = [prompt for prompt in prompts(2 if small else 64, 64, 128) for _ in range(2 if small else 8)]
    tempered = prompts(2 if small else 16, 20, 200)
    return [
        Work("spread", spread, [draw.randint(3, 20) if small else draw.randint(100, 600) for _ in spread]),
        Work("wide", wide, [draw.randint(8, 16 if small else 256) for _ in wide]),
        Work("tempered", tempered, [16 if small else 128 for _ in tempered], 0.7),
    ]


def sample(engine: Any, work: Work) -> tuple[Sampled, float]:
    """What the engine samples, with a seed per request, and the seconds it took."""
    from vllm import SamplingParams

    requests = [{"prompt_token_ids": prompt} for prompt in work.prompts]
    sampling = [
        SamplingParams(
            temperature=work.temperature,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            seed=number,
        )
        for number, length in enumerate(work.lengths)
    ]
    began = time.perf_counter()
    outputs = engine.generate(requests, sampling, use_tqdm=False)
    taken = time.perf_counter() - began
    responses: list[list[int]] = []
    found: list[float] = []
    for output in outputs:
        ids = list(output.outputs[0].token_ids)
        responses.append(ids)
        found += [entry[token].logprob for token, entry in zip(ids, output.outputs[0].logprobs, strict=True)]
    return Sampled(work.prompts, responses, torch.tensor(found, dtype=torch.float64).float(), work.temperature), taken
