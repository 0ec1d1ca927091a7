"""A vLLM engine that drafts tokens beside one that does not, for test_speculation.py:
`speculation_program.py DIRECTORY RANK SIZE`.

With a RANK above 0 the engine applies adapters of that rank. With a SIZE above 1 it spans that many processes. Writes
DIRECTORY/results.json.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.rollout.vllm.settings import engine_environment

os.environ.update(engine_environment(enforce_eager=True), OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1")

import torch

from tests.trainer.rollout.engine_program import END, SpanningEngine, make_model
from tests.trainer.rollout.vllm.in_flight_program import Joined, Weights, disagreement
from trainer.algorithms.truncation import Truncation
from trainer.cluster.place import Team
from trainer.config.tree import Config
from trainer.rollout.engine import open_engine
from trainer.rollout.sampling import SamplingRequest, request_seed

DRAFTED = 5
LONGEST, LENGTH = 40, 48  # tokens of a prompt, and of a response
BEFORE = 7  # steps before the update
SAMPLES = 5000
ALONE = Team()


def requests(vocabulary: int) -> list[SamplingRequest]:
    """Groups of four, greedy and sampled, some truncated; half of the prompts repeat themselves."""
    generator = torch.Generator().manual_seed(1)
    requests = []
    for group in range(24):
        words = tuple(torch.randint(8, vocabulary, (5 + group,), generator=generator).tolist())
        prompt = words[:4] * 6 if group % 2 else words
        truncation = Truncation(top_p=0.8, top_k=20) if group % 3 == 0 else Truncation()
        temperature = (0.0, 0.4, 0.7, 1.0)[group // 2 % 4]
        requests += [SamplingRequest(prompt, temperature, 4 * group + row, truncation=truncation) for row in range(4)]
    return requests


def start(directory: Path, rank: int, size: int, drafted: int) -> tuple[Any, Config]:
    config = Config.model_validate(
        {
            "model": {"path": directory / "model"},
            "data": {"max_prompt_length": LONGEST, "max_response_length": LENGTH},
            "rollout": {"lora": "adapters", "kv_cache_gib": 0.05, "max_num_seqs": 64, "speculative_tokens": drafted},
            "actor": {"lora": {"rank": rank, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"]}},
        }
    )
    where = ("vllm", config, "cpu", [END])
    if size == 1:
        return opened(*where), config
    return SpanningEngine(*where, size=size, opened=opened), config


def opened(name: str, config: Config, device: str, end_tokens: Sequence[int], team: Team = ALONE) -> Any:
    """An engine whose first rank always decides to draft, and all others never."""
    engine: Any = open_engine(name, config, device, end_tokens, team)
    if config.rollout.speculative_tokens:
        engine.speculation.pays = lambda: team.rank == 0
    return engine


def verified() -> dict[str, list[float]]:
    """How often each token is sampled in the first place and, where that one was the drafted one, in the second; and
    how often it should be. Each of many requests has a seed of its own, and all have the same two drafted tokens."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from trainer.rollout.vllm.verification import SequentialVerification

    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(3))
    drafted = [int(row.argmax()) for row in logits[:2]]
    empty = torch.empty(0)
    sampling = SamplingMetadata(
        temperature=torch.ones(SAMPLES),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={row: torch.Generator().manual_seed(request_seed(0, 0, row, 0)) for row in range(SAMPLES)},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=empty,
        presence_penalties=empty,
        repetition_penalties=empty,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    metadata = SpecDecodeMetadata.make_dummy([drafted] * SAMPLES, torch.device("cpu"))
    sampler = Sampler(logprobs_mode="processed_logprobs")
    tokens = SequentialVerification(sampler)(metadata, None, logits.repeat(SAMPLES, 1), sampling).sampled_token_ids
    first, second = tokens[:, 0], tokens[tokens[:, 0] == drafted[0], 1]
    shares = logits.softmax(dim=1)
    return {
        "first": torch.bincount(first, minlength=20).tolist(),
        "first, expected": (len(first) * shares[0]).tolist(),
        "second": torch.bincount(second, minlength=20).tolist(),
        "second, expected": (len(second) * shares[1]).tolist(),
    }


def drafted_before_the_end(engine: Any) -> int:
    """Tokens that were drafted for the last ten tokens of a response of the maximum length."""
    request = SamplingRequest((8, 9, 10, 11) * (LONGEST // 4), 0.0, 0)
    engine.advance({0: request}, 0)
    tokens = 0
    while tokens < LENGTH - 10:
        tokens += len(engine.advance({}, 1)[0].token_ids)
    engine.take_drafts()
    engine.advance({}, LENGTH)
    return int(engine.take_drafts().drafted)


def main(directory: Path, rank: int, size: int) -> None:
    vocabulary = make_model(directory / "model")
    asked = requests(vocabulary)
    results: dict[str, Any] = {}
    for name, drafted in (("plain", 0), ("drafting", DRAFTED)):
        engine, config = start(directory, rank, size, drafted)
        old, new = Weights(config, 0.0), Weights(config, 0.05)
        engine.replace_weights(old.buckets())
        responses = engine.generate(asked)
        results[name] = [response.token_ids for response in responses]
        results[f"ended, {name}"] = [response.ended for response in responses]
        results[f"without log-probs to 1e-4, {name}"] = sum(
            disagreement(old, old, request, list(response.token_ids), list(response.log_probs or ()), 0) > 1e-4
            for request, response in zip(asked, responses, strict=True)
            if request.truncation == Truncation()
        )
        short = [replace(request, max_tokens=3) for request in asked]
        results[f"three tokens, {name}"] = [response.token_ids for response in engine.generate(short)]
    if size == 1:
        drafts = engine.take_drafts()
        results["drafted"], results["accepted"] = drafts.drafted, drafts.accepted
        results["verified"] = verified()
    joined = Joined()
    joined.add(engine.advance(dict(enumerate(asked)), BEFORE))
    first = {row: len(tokens) for row, tokens in joined.tokens.items()}
    engine.replace_weights(old.buckets())
    joined.add(engine.advance({}, 10 * LENGTH))
    results["interrupted"] = [joined.tokens[row] for row in range(len(asked))]
    results["most tokens before an update"] = max(first.values())
    joined = Joined()
    joined.add(engine.advance(dict(enumerate(asked)), BEFORE))
    first = {row: len(tokens) for row, tokens in joined.tokens.items()}
    engine.replace_weights(new.buckets())
    joined.add(engine.advance({}, 10 * LENGTH))
    rows = [row for row in first if len(joined.sizes[row]) > 1 and asked[row].truncation == Truncation()]
    results["updated"] = len(rows)
    results["disagreement after an update"] = max(
        disagreement(old, new, asked[row], joined.tokens[row], joined.log_probs[row], first[row]) for row in rows
    )
    if size == 1:
        results["drafted before the longest length"] = drafted_before_the_end(engine)
    (directory / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
