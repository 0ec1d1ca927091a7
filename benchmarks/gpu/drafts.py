"""The trainer's vLLM engine with and without drafted tokens: milliseconds per token of random and repetitive answers.

    python3 -m benchmarks.gpu.drafts --shape 1.5B [--responses 128 32 8] [--drafts 8] [--out FILE]

One engine samples the same responses in turn without drafts, with drafts where it finds that they pay, and with drafts
in every step. `cost` is how many steps without drafts take as long as one with them, `same` the share of the tokens
before the first that differs. Repetitive answers repeat a token about fifty times, then another one.
"""

import math
import os
import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.common import SHAPES, Results, write_job
from benchmarks.gpu.rollout import engine_arguments, open_trainers_engine, sample
from trainer.rollout.vllm.settings import engine_environment

MODES = ("without", "by itself", "always")


def repeat_tokens(worker: Any) -> None:
    """Makes a model with tied, random weights of a vLLM worker sample its last token again with a probability of 0.98.

    Its layers add next to nothing to an embedding, whose product with itself is far above that with others.
    """
    model = worker.model_runner.get_model().model
    vocabulary, width = model.embed_tokens.weight.shape
    variance = model.embed_tokens.weight.float().var().item()
    logit = width * variance / math.sqrt(variance + model.norm.variance_epsilon)  # a normalised embedding times itself
    model.norm.weight.data.fill_((math.log(vocabulary) + 4) / logit)


def same_share(responses: list[Any], expected: list[Any]) -> float:
    """Of the tokens of all responses, the share before the first that differs."""
    same = total = 0
    for response, other in zip(responses, expected, strict=True):
        pairs = list(zip(response.token_ids, other.token_ids, strict=True))
        same += next((place for place, (token, wanted) in enumerate(pairs) if token != wanted), len(pairs))
        total += len(pairs)
    return same / total


def main() -> None:
    parser = engine_arguments(__doc__)
    parser.add_argument("--responses", type=int, nargs="+", default=[128, 32, 8])
    parser.add_argument("--drafts", type=int, default=8, help="rollout.speculative_tokens")
    parser.set_defaults(engines=1, kv_cache_gib=30.0)
    options = parser.parse_args()
    results = Results(options.out, "drafts")
    options.job = write_job(options.jobs / f"{options.shape}-{options.prompt}", options.shape, options.prompt)
    os.environ.update(engine_environment(enforce_eager=options.cpu))
    engine = open_trainers_engine(options, speculative_tokens=options.drafts)
    speculation = engine.speculation
    decides: dict[str, Callable[[], bool]] = {
        "without": lambda: False,
        "by itself": speculation.pays,
        "always": lambda: True,
    }
    vocabulary, generator = SHAPES[options.shape].vocabulary, random.Random(0)
    for answers in ("random", "repetitive"):
        if answers == "repetitive":
            engine._engine.collective_rpc(repeat_tokens)
        for count in options.responses:
            groups = [
                [generator.randrange(300, vocabulary) for _ in range(options.prompt)]
                for _ in range(math.ceil(count / 8))
            ]
            prompts = [groups[row // 8] for row in range(count)]
            seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
            responses: dict[str, list[Any]] = {}
            counted: dict[str, Any] = {}
            for mode in ("always", "without", *MODES * options.repeats):  # the first two times are for new kernels
                speculation.pays = decides[mode]
                if speculation.is_drafting != (mode == "always"):  # as if it had run for long
                    speculation.switch()
                speculation.take_drafts()
                start = time.perf_counter()
                responses[mode] = sample(engine, prompts, options.response, log_probs=False)
                seconds[mode].append(time.perf_counter() - start)
                counted[mode] = speculation.take_drafts()
            tokens = count * options.response
            for mode in MODES:
                results.add(
                    shape=options.shape,
                    answers=answers,
                    responses=count,
                    prompt=options.prompt,
                    response=options.response,
                    drafts=mode,
                    milliseconds=round(1000 * min(seconds[mode]) / options.response, 3),
                    all_seconds=[round(value, 3) for value in seconds[mode]],
                    ratio=round(min(seconds["without"]) / min(seconds[mode]), 3),
                    drafted=round(counted[mode].accepted / tokens, 3),
                    accepted=round(counted[mode].accepted / max(counted[mode].drafted, 1), 3),
                    cost=round(speculation.backoff.times.cost(count), 2),
                    same=round(same_share(responses[mode], responses["without"]), 3),
                )


if __name__ == "__main__":
    main()
