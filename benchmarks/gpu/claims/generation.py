"""vLLM as the trainer runs it, beside Transformers' `generate`: the same model, prompts, sampling and end tokens.

The baseline is what its documentation shows: the model in bfloat16 with torch's attention and a cache of keys and
values, all prompts in one batch, which lasts as long as its longest response. Neither side returns log-probs.
"""

import argparse
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import END_TOKEN, SHAPES, alone, synchronize, timed, write_job

END_TOKENS = 300


def measure(options: argparse.Namespace) -> dict[str, Any]:
    prompts, prompt, response = (64, 64, 256) if options.cpu else (128, 256, 512)
    ends = 8 if options.cpu else END_TOKENS
    place = options.jobs / f"{options.shape}-{prompt}-{ends}"
    model = write_job(place, options.shape, prompt, end_tokens=ends) / "model"
    generator, vocabulary = random.Random(0), SHAPES[options.shape].vocabulary
    tokens = [[generator.randrange(END_TOKEN + 1, vocabulary) for _ in range(prompt)] for _ in range(prompts)]
    job = (model, tokens, response, options)
    return {
        "job": f"{prompts} prompts of {prompt} tokens, responses of up to {response}, lengths vary",
        "baseline": alone(transformers, *job),
        "ours": alone(engine, *job),
    }


def transformers(model: Path, prompts: list[list[int]], response: int, options: argparse.Namespace) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    device, dtype = ("cpu", torch.float32) if options.cpu else ("cuda", torch.bfloat16)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
    tokens = torch.tensor(prompts, device=device)
    ends = torch.tensor(network.generation_config.eos_token_id, device=device)

    def generate() -> int:
        with torch.inference_mode():
            rows = network.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=response,
            )[:, tokens.shape[1] :]
        ended = torch.isin(rows, ends).int()
        return int((ended.cumsum(dim=1) - ended == 0).sum())  # up to the first end token, and that

    return _fastest(generate, options.repeats)


def engine(model: Path, prompts: list[list[int]], response: int, options: argparse.Namespace) -> dict[str, float]:
    from trainer.rollout.process_environment import engine_environment

    os.environ.update(engine_environment(enforce_eager=options.cpu))
    from trainer.config.tree import Config
    from trainer.rollout.backends.vllm import VllmEngine
    from trainer.rollout.end_tokens import end_token_ids
    from trainer.rollout.sampling import SamplingRequest

    config = Config.model_validate(
        {
            "model": {"path": model, "dtype": "float32" if options.cpu else "bfloat16"},
            "data": {"max_prompt_length": len(prompts[0]), "max_response_length": response},
            "rollout": {
                "max_num_seqs": len(prompts),
                "kv_cache_gib": 0.2 if options.cpu else 12.0,
                "sleep": False,
            },
        }
    )
    vllm = VllmEngine(config, "cpu" if options.cpu else "cuda", end_token_ids(model))
    rounds = iter(range(options.repeats + 1))

    def generate() -> int:
        seed = next(rounds) * len(prompts)  # other responses each time, as on the other side
        requests = [
            SamplingRequest(tuple(prompt), 1.0, seed=seed + row, log_probs=False) for row, prompt in enumerate(prompts)
        ]
        return sum(len(response.token_ids) for response in vllm.generate(requests))

    return _fastest(generate, options.repeats)


def _fastest(generate: Callable[[], int], repeats: int) -> dict[str, float]:
    """Tokens per second of the fastest repeat, after one to warm up."""
    generate()
    synchronize()
    tries = []
    for _ in range(repeats):
        counts: list[int] = []
        seconds = timed(lambda counts=counts: counts.append(generate()))  # type: ignore[misc]
        tries.append((counts[0] / seconds, seconds, counts[0]))
    rate, seconds, count = max(tries)
    return {"tokens_per_second": round(rate), "seconds": round(seconds, 3), "tokens": count}
