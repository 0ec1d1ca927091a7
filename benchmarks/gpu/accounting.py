"""The trainer's vLLM engine with and without its steady steps: seconds, and whether the tokens are the same.

    python3 -m benchmarks.gpu.accounting --shape 0.5B [--responses 64 256 512] [--response 512]

One engine samples the same responses both ways in turn. Without steady steps vLLM accounts for every response in every
step. The better of `--repeats`.
"""

import os
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import SHAPES, Results, arguments, write_job


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--responses", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--kv-cache-gib", type=float, default=12.0)
    parser.add_argument("--jobs", type=Path, default=Path("/tmp/slipway-jobs"))
    parser.add_argument("--cpu", action="store_true", help="on a CPU")
    parser.set_defaults(engines=1)
    options = parser.parse_args()
    results = Results(options.out, "accounting")
    options.job = write_job(options.jobs / f"{options.shape}-{options.prompt}", options.shape, options.prompt)
    from trainer.rollout.process_environment import engine_environment

    os.environ.update(engine_environment(enforce_eager=options.cpu))
    from benchmarks.gpu.rollout import open_trainers_engine

    engine = open_trainers_engine(options)
    scheduler = engine._scheduler()
    hooks = {name: vars(scheduler)[name] for name in ("schedule", "update_from_output")}
    vocabulary, generator = SHAPES[options.shape].vocabulary, random.Random(0)
    for count in options.responses:
        prompts = [tuple(generator.randrange(300, vocabulary) for _ in range(options.prompt)) for _ in range(count)]
        for log_probs in (False, True):
            found: dict[bool, Any] = {}
            before = engine._in_flight._steady.taken
            seconds: dict[bool, list[float]] = {True: [], False: []}
            sample(engine, prompts, 8, log_probs)  # kernels of this size
            for steady in (True, False) * options.repeats:
                for name, hook in hooks.items():
                    setattr(scheduler, name, hook if steady else getattr(type(scheduler), name).__get__(scheduler))
                start = time.perf_counter()
                found[steady] = sample(engine, prompts, options.response, log_probs)
                seconds[steady].append(time.perf_counter() - start)
            results.add(
                shape=options.shape,
                responses=count,
                prompt=options.prompt,
                response=options.response,
                log_probs=log_probs,
                steady_seconds=round(min(seconds[True]), 3),
                whole_seconds=round(min(seconds[False]), 3),
                all_seconds=[[round(value, 3) for value in seconds[steady]] for steady in (True, False)],
                same=found[True] == found[False],
                steady_steps=engine._in_flight._steady.taken - before,
            )


def sample(engine: Any, prompts: list[tuple[int, ...]], length: int, log_probs: bool) -> list[Any]:
    """Token ids and log-probs of a response to each prompt."""
    from trainer.rollout.sampling import SamplingRequest

    engine._max_response_length = length
    asked = [SamplingRequest(prompt, 1.0, seed=row, log_probs=log_probs) for row, prompt in enumerate(prompts)]
    return [(response.token_ids, response.log_probs) for response in engine.generate(asked)]


if __name__ == "__main__":
    main()
