"""The trainer's vLLM engine with more responses than it takes at once: seconds if they enter at once or some at a time.

    python3 -m benchmarks.gpu.entries --shape 0.5B [--at-once 1024] [--responses 3072] [--mean 500] [--response 1536]

Lengths fall geometrically. One engine samples the same responses in turn, where those that wait enter as soon as there
is a place, and where they wait for others as they do by default.
"""

import os
import random
import time

from benchmarks.gpu.common import END_TOKEN, SHAPES, Results, write_job
from benchmarks.gpu.rollout import engine_arguments, open_trainers_engine, sample
from trainer.rollout.process_environment import engine_environment


def main() -> None:
    parser = engine_arguments(__doc__)
    parser.add_argument("--at-once", type=int, default=1024, help="rollout.max_num_seqs")
    parser.add_argument("--responses", type=int, default=3072)
    parser.add_argument("--mean", type=int, default=500, help="tokens of a response")
    parser.set_defaults(engines=1, prompt=128, response=1536, kv_cache_gib=16.0)
    options = parser.parse_args()
    results = Results(options.out, "entries")
    options.job = write_job(options.jobs / f"{options.shape}-{options.prompt}", options.shape, options.prompt)
    os.environ.update(engine_environment(enforce_eager=options.cpu))
    vocabulary, generator = SHAPES[options.shape].vocabulary, random.Random(0)
    ends = range(END_TOKEN, END_TOKEN + max(1, vocabulary // options.mean))
    engine = open_trainers_engine(options, ends, max_num_seqs=options.at_once, ignore_end_tokens=False)
    scheduler, steady = engine._scheduler(), engine._in_flight._steady
    prompts = [
        [generator.randrange(ends.stop, vocabulary) for _ in range(options.prompt)] for _ in range(options.responses)
    ]
    sample(engine, prompts[: options.at_once], 8, log_probs=True)  # kernels of this size
    waits = (steady.longest_wait, 0)
    for wait in waits * options.repeats:
        steady.longest_wait = wait
        first, taken, start = scheduler.current_step, steady.taken, time.perf_counter()
        responses = sample(engine, prompts, options.response, log_probs=True)
        seconds = time.perf_counter() - start
        tokens = sum(len(response.token_ids) for response in responses)
        results.add(
            shape=options.shape,
            at_once=options.at_once,
            responses=options.responses,
            prompt=options.prompt,
            response=options.response,
            mean=round(tokens / options.responses),
            longest_wait=wait,
            seconds=round(seconds, 3),
            tokens_per_second=round(tokens / seconds),
            steps=scheduler.current_step - first,
            steady_steps=steady.taken - taken,
        )


if __name__ == "__main__":
    main()
