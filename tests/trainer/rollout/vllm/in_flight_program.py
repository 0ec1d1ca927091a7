"""A vLLM engine whose weights change under its responses, for test_in_flight.py:
`in_flight_program.py DIRECTORY RANK SIZE`.

With a RANK above 0 the weights that change are adapters of that rank. With a SIZE above 1 the engine spans that many
processes. Writes DIRECTORY/results.json.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.rollout.vllm.settings import engine_environment

os.environ.update(engine_environment(enforce_eager=True), OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1")

import torch
from torch import nn
from transformers import DynamicCache

from tests.trainer.rollout.engine_program import END, LONG, SpanningEngine, make_model
from trainer.config.tree import Config
from trainer.models.lora import adapter_parameters, add_adapters
from trainer.models.pretrained import load_language_model
from trainer.rollout.engine import open_engine
from trainer.rollout.sampling import Part, SamplingRequest
from trainer.weights.buckets import pack, store

AT_ONCE = 4
LENGTH = 24
BEFORE = 7  # steps before the update


class Weights:
    """A policy's weights: as a network, and as the buckets that an engine receives."""

    def __init__(self, config: Config, shift: float) -> None:
        self.network: nn.Module = load_language_model(config.model.directory)
        lora = config.actor.lora
        if lora.rank:
            add_adapters(self.network, lora, seed=0)
        every = self.network.named_parameters(remove_duplicate=False)  # a tied weight under each of its names
        trained = dict(adapter_parameters(self.network) if lora.rank else every)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for weight in {id(weight): weight for weight in trained.values()}.values():
                weight += (shift + 0.1 * bool(lora.rank)) * torch.randn(weight.shape, generator=generator)
        self._trained = trained

    def buckets(self) -> list[Any]:
        return [store(bucket) for bucket in pack(self._trained.items(), torch.float32, bucket_bytes=2**17)]


class Scheduled:
    """Counts the tokens that vLLM schedules in each step."""

    def __init__(self, engine: Any) -> None:
        scheduler = engine.scheduler
        self.steps: list[int] = []
        schedule = scheduler.schedule

        def counted(*arguments: object) -> Any:
            output = schedule(*arguments)
            self.steps.append(output.total_num_scheduled_tokens)
            return output

        scheduler.schedule = counted

    def take(self) -> list[int]:
        taken, self.steps = [count for count in self.steps if count], []
        return taken


class Joined:
    """The parts of responses, one after the other."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.log_probs: dict[int, list[float]] = defaultdict(list)
        self.sizes: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, bool] = {}

    def add(self, parts: Mapping[int, Part]) -> None:
        for number, part in parts.items():
            self.tokens[number] += part.token_ids
            self.log_probs[number] += part.log_probs or ()
            self.sizes[number].append(len(part.token_ids))
            self.finished[number] = part.finished


def requests(vocabulary: int, count: int, temperature: float) -> list[SamplingRequest]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 40, (count,), generator=generator).tolist()
    prompts = [tuple(torch.randint(8, vocabulary, (length,), generator=generator).tolist()) for length in lengths]
    return [SamplingRequest(prompt, temperature, seed=100 + row) for row, prompt in enumerate(prompts)]


def interrupted(engine: Any, asked: list[SamplingRequest], after: Weights) -> Joined:
    """Responses under whose first tokens the weights become those of `after`."""
    joined = Joined()
    joined.add(engine.advance(dict(enumerate(asked)), BEFORE))
    engine.replace_weights(after.buckets())
    joined.add(engine.advance({}, 10 * LENGTH))
    return joined


@torch.inference_mode()
def disagreement(
    before: Weights, after: Weights, request: SamplingRequest, tokens: list[int], log_probs: list[float], first: int
) -> float:
    """The largest difference between an engine's log-probs and the networks', if `after` computes everything from the
    token behind the first ones on, with the keys and values that `before` has computed."""
    whole = torch.tensor([[*request.prompt, *tokens[:-1]]])
    known = len(request.prompt) + first - 1 if first else 0
    logits, cache = [], DynamicCache()
    for weights, part in ((before, whole[:, :known]), (after, whole[:, known:])):
        if part.shape[1]:
            logits.append(weights.network(part, past_key_values=cache, use_cache=True).logits)
    sampling = torch.cat(logits, dim=1)[0, len(request.prompt) - 1 :]
    expected = (sampling / (request.temperature or 1.0)).log_softmax(dim=1).gather(1, torch.tensor(tokens).unsqueeze(1))
    return float((expected.squeeze(1) - torch.tensor(log_probs)).abs().max())


def main(directory: Path, rank: int, size: int) -> None:
    vocabulary = make_model(directory / "model")
    config = Config.model_validate(
        {
            "model": {"path": directory / "model"},
            "data": {"max_prompt_length": LONG, "max_response_length": LENGTH},
            "rollout": {"lora": "adapters", "kv_cache_gib": 0.1, "max_num_seqs": AT_ONCE},
            "actor": {"lora": {"rank": rank}},
        }
    )
    where = ("vllm", config, "cpu", [END])
    engine: Any = SpanningEngine(*where, size=size) if size > 1 else open_engine(*where)
    old, new = Weights(config, 0.0), Weights(config, 0.03)
    results: dict[str, Any] = {}

    engine.replace_weights(old.buckets())
    for name, temperature in (("greedy", 0.0), ("sampled", 0.7)):
        asked = requests(vocabulary, 2 * AT_ONCE, temperature)  # half of them have to wait
        engine.replace_weights(old.buckets())
        whole = [response.token_ids for response in engine.generate(asked)]
        same, other = interrupted(engine, asked, old), interrupted(engine, asked, new)
        results[name] = {
            "whole": whole,
            "same": [same.tokens[row] for row in range(len(asked))],
            "other": [other.tokens[row] for row in range(len(asked))],
            "sizes": [other.sizes[row] for row in range(len(asked))],
            "finished": [other.finished[row] for row in range(len(asked))],
            "disagreement": [
                disagreement(old, new, request, other.tokens[row], other.log_probs[row], _first(other, row))
                for row, request in enumerate(asked)
            ],
            "disagreement with new keys": [
                disagreement(new, new, request, other.tokens[row], other.log_probs[row], 0)
                for row, request in enumerate(asked)
            ],
        }
    if size == 1:
        results["scheduled"] = scheduled(engine, requests(vocabulary, AT_ONCE - 1, 0.0), old, new)
        results["asleep"] = slept(engine, requests(vocabulary, 3, 0.0), new)
    (directory / "results.json").write_text(json.dumps(results))


def _first(joined: Joined, row: int) -> int:
    """The tokens of a response before the update: none if it waited."""
    return joined.sizes[row][0] if len(joined.sizes[row]) > 1 else 0 if row >= AT_ONCE else len(joined.tokens[row])


def scheduled(engine: Any, asked: list[SamplingRequest], old: Weights, new: Weights) -> dict[str, Any]:
    """The tokens that vLLM computes before and after an update, and for a prompt that older weights have cached."""
    prompt = tuple(9 + place % 50 for place in range(LONG))
    asked = [SamplingRequest(prompt, 0.0, max_tokens=3), *asked]
    engine.replace_weights(old.buckets())
    counts = Scheduled(engine)
    results: dict[str, Any] = {"prompts": sum(len(request.prompt) for request in asked)}
    engine.advance(dict(enumerate(asked)), 5)
    results["before"] = counts.take()
    engine.replace_weights(new.buckets())
    joined = Joined()
    joined.add(engine.advance({}, 5))
    results["after"] = counts.take()
    results["under way"] = len(joined.tokens)
    joined = Joined()
    joined.add(engine.advance({99: asked[0]}, LENGTH))
    results["the same prompt"] = max(counts.take())
    results["disagreement"] = disagreement(new, new, asked[0], joined.tokens[99], joined.log_probs[99], 0)
    engine.advance({99: asked[0]}, LENGTH)
    results["the same prompt again"] = max(counts.take())
    return results


def slept(engine: Any, asked: list[SamplingRequest], new: Weights) -> dict[str, Any]:
    """Responses that begin before an engine sleeps, and are asked for again with their tokens when it has weights."""
    engine.advance(dict(enumerate(asked)), 4)
    engine.sleep()
    engine.replace_weights(new.buckets())
    nothing = engine.advance({}, 4)
    joined = Joined()
    joined.add(engine.advance(dict(enumerate(asked)), LENGTH))
    return {
        "in flight": len(nothing),
        "tokens": [joined.tokens[row] for row in range(3)],
        "whole": [response.token_ids for response in engine.generate(asked)],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
