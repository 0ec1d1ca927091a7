"""The trainer's vLLM engine with and without the decode fast path: seconds, and whether the tokens are the same.

    python3 -m benchmarks.gpu.accounting --shape 0.5B [--responses 64 256 512 768] [--response 512]

One engine samples the same responses both ways in turn. Without the fast path vLLM accounts for every response in
every step. The better of `--repeats`.
"""

import os
import random
import time
from typing import Any

from benchmarks.gpu.common import SHAPES, Results, write_job
from benchmarks.gpu.rollout import engine_arguments, open_trainers_engine, sample
from trainer.rollout.vllm.settings import engine_environment


def main() -> None:
    parser = engine_arguments(__doc__)
    parser.add_argument("--responses", type=int, nargs="+", default=[64, 256, 512, 768])
    parser.set_defaults(engines=1, prompt=128)
    options = parser.parse_args()
    results = Results(options.out, "accounting")
    options.job = write_job(options.jobs / f"{options.shape}-{options.prompt}", options.shape, options.prompt)
    os.environ.update(engine_environment(enforce_eager=options.cpu))
    engine = open_trainers_engine(options)
    scheduler = engine.scheduler
    hooks = {name: vars(scheduler)[name] for name in ("schedule", "update_from_output")}
    vocabulary, generator = SHAPES[options.shape].vocabulary, random.Random(0)
    for count in options.responses:
        prompts = [tuple(generator.randrange(300, vocabulary) for _ in range(options.prompt)) for _ in range(count)]
        for log_probs in (False, True):
            responses: dict[bool, Any] = {}
            before = engine.fast_path.steps
            seconds: dict[bool, list[float]] = {True: [], False: []}
            sample(engine, prompts, 8, log_probs)  # kernels of this size
            for steady in (True, False) * options.repeats:
                for name, hook in hooks.items():
                    setattr(scheduler, name, hook if steady else getattr(type(scheduler), name).__get__(scheduler))
                start = time.perf_counter()
                responses[steady] = sample(engine, prompts, options.response, log_probs)
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
                same=responses[True] == responses[False],
                steady_steps=engine.fast_path.steps - before,
            )


if __name__ == "__main__":
    main()
