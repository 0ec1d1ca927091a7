"""Generation in the training loop against vLLM alone, and the limits of both.

    python -m benchmarks.gpu.rollout --shape 0.5B [--engines 4] [--repeats 2] [--profile DIR]

All engines start at once and then generate in turn. `offline` is vLLM's `LLM` with its own defaults, as a rollout
needs it (random sampling, prefix caching); the others are the trainer's adapter, in several engines that share the GPU.
Both run with and without log-probs. With `--mean` responses end by themselves (`benchmarks.gpu.lengths`). Profiles of
the single engine: py-spy stacks, kernels of 64 steps.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import END_TOKEN, SHAPES, Results, arguments, write_job
from benchmarks.gpu.lengths import geometric


def serve(connection: Connection, kind: str, options: argparse.Namespace) -> None:
    """One engine in its own process: answers (prompts, response length, log-probs, profile) with (seconds, tokens)."""
    os.setsid()  # vLLM's own processes end with this one's group
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork could not use CUDA again
    if kind == "offline":
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        generate = offline_engine(options)
    else:
        from trainer.rollout.vllm.settings import engine_environment

        os.environ.update(engine_environment(enforce_eager=options.cpu))
        generate = trainers_engine(options)
    connection.send("ready")
    while True:
        prompts, length, log_probs, profile = connection.recv()
        start = time.perf_counter()
        if profile is None:
            tokens = generate(prompts, length, log_probs)
        else:
            tokens = profiled(generate, prompts, length, log_probs, profile)
        connection.send((time.perf_counter() - start, tokens))


def offline_engine(options: argparse.Namespace) -> Any:
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {"enforce_eager": True} if options.cpu else {"gpu_memory_utilization": 0.2}
    engine = LLM(
        str(options.job / "model"),
        load_format="auto" if options.mean else "dummy",
        skip_tokenizer_init=True,
        dtype="float32" if options.cpu else "bfloat16",
        max_model_len=options.prompt + options.response,
        kv_cache_memory_bytes=int(options.kv_cache_gib * 2**30),
        logprobs_mode="processed_logprobs",
        max_num_seqs=1024,
        disable_log_stats=True,
        enable_prefix_caching=True,
        tensor_parallel_size=options.tensor_parallel,
        **settings,
    )

    def generate(prompts: list[list[int]], length: int, log_probs: bool) -> int:
        sampling = SamplingParams(
            max_tokens=length,
            temperature=1.0,
            ignore_eos=True,
            stop_token_ids=[END_TOKEN] if options.mean else None,
            detokenize=False,
            logprobs=0 if log_probs else None,
        )
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def open_trainers_engine(options: argparse.Namespace, **rollout: object) -> Any:
    """An engine of the trainer, with further settings of `rollout`."""
    from trainer.config.tree import Config
    from trainer.rollout.vllm.engine import VllmEngine

    config = Config.model_validate(
        {
            "model": {"path": options.job / "model", "dtype": "float32" if options.cpu else "bfloat16"},
            "data": {"max_prompt_length": options.prompt, "max_response_length": options.response},
            "rollout": {
                "max_num_seqs": 1024,
                "kv_cache_gib": options.kv_cache_gib,
                "engines_per_gpu": options.engines,
                "ignore_end_tokens": not options.mean,
                "sleep": False,
                **rollout,
            },
        }
    )
    engine = VllmEngine(config, "cpu" if options.cpu else "cuda", [END_TOKEN])
    if options.mean:  # until the actor sends weights, an engine has random ones
        import torch
        from safetensors.torch import load_file

        from trainer.weights.buckets import pack, store

        weights = load_file(options.job / "model" / "model.safetensors")
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])  # under both names, if tied
        engine.replace_weights(map(store, pack(weights.items(), torch.float32 if options.cpu else torch.bfloat16)))
    return engine


def sample(engine: Any, prompts: Sequence[Sequence[int]], length: int, log_probs: bool) -> list[Any]:
    """The responses of the trainer's engine, of `length` tokens at most."""
    from trainer.rollout.sampling import SamplingRequest

    engine._max_response_length = length
    requests = [
        SamplingRequest(tuple(prompt), 1.0, seed=row, log_probs=log_probs) for row, prompt in enumerate(prompts)
    ]
    responses: list[Any] = engine.generate(requests)
    return responses


def trainers_engine(options: argparse.Namespace) -> Any:
    engine = open_trainers_engine(options)

    def generate(prompts: list[list[int]], length: int, log_probs: bool) -> int:
        return sum(len(response.token_ids) for response in sample(engine, prompts, length, log_probs))

    return generate


def profiled(generate: Any, prompts: list[list[int]], length: int, log_probs: bool, directory: Path) -> int:
    """The same, with a kernel trace of 64 tokens per response and then the stacks of a whole generation."""
    import torch

    directory.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        start = time.perf_counter()
        generate(prompts, min(64, length), log_probs)
        wall = time.perf_counter() - start
    events = recorded.key_averages()
    busy = sum(event.self_device_time_total for event in events) / 1e6
    table = events.table(sort_by="self_device_time_total", row_limit=30, max_name_column_width=110)
    (directory / "rollout-kernels.txt").write_text(f"wall {wall:.3f} s, kernels {busy:.3f} s\n{table}")
    if (spy := shutil.which("py-spy")) is None:
        return int(generate(prompts, length, log_probs))
    stacks = [spy, "record", "-p", str(os.getpid()), "-d", "60", "-f", "raw", "-o", str(directory / "stacks.txt")]
    recorder = subprocess.Popen(stacks, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    tokens: int = generate(prompts, length, log_probs)
    recorder.send_signal(signal.SIGINT)
    recorder.wait(timeout=30)
    return tokens


@contextmanager
def running(kinds: list[str], options: argparse.Namespace) -> Iterator[list[Connection]]:
    """An engine of each kind, ready; their processes end with the block. Raises EOFError if one does not start."""
    context = multiprocessing.get_context("spawn")
    processes, connections = [], []
    try:
        for kind in kinds:
            ours, theirs = context.Pipe()
            # Not daemonic: vLLM starts processes of its own.
            processes.append(context.Process(target=serve, args=(theirs, kind, options)))
            processes[-1].start()
            theirs.close()
            connections.append(ours)
        for connection in connections:
            assert connection.recv() == "ready"
        yield connections
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def measure(engines: list[Connection], options: argparse.Namespace, results: Results) -> None:
    generator = random.Random(0)
    vocabulary = SHAPES[options.shape].vocabulary
    prompts = [
        prompt
        for prompt in (
            [generator.randrange(300, vocabulary) for _ in range(options.prompt)] for _ in range(options.prompts)
        )
        for _ in range(options.samples)
    ]
    counts = [count for count in (1, 2, 3, 4, 6, 8) if count <= options.engines]
    variants = [("offline", 1, True), ("offline", 1, False)]
    variants += [("trainer", count, log_probs) for count in counts for log_probs in (True, False)]
    for kind, count, log_probs in variants:
        used = engines[:1] if kind == "offline" else engines[1 : 1 + count]
        shares = [prompts[part::count] for part in range(count)]
        times = []
        for _ in range(options.repeats):
            start = time.perf_counter()
            for connection, share in zip(used, shares, strict=True):
                connection.send((share, options.response, log_probs, None))
            tokens = sum(connection.recv()[1] for connection in used)
            times.append(time.perf_counter() - start)
        results.add(
            shape=options.shape,
            kind=kind,
            engines=count,
            log_probs=log_probs,
            prompts=options.prompts,
            samples=options.samples,
            prompt=options.prompt,
            response=options.response,
            mean=options.mean,
            tokens=tokens,
            seconds=round(min(times), 3),
            all_seconds=[round(value, 3) for value in times],
            tokens_per_second=round(tokens / min(times)),
        )
    if options.profile:
        engines[1].send((prompts, options.response, False, options.profile))
        engines[1].recv()


def engine_arguments(description: str | None) -> argparse.ArgumentParser:
    """What benchmarks of engines have in common."""
    parser = arguments(description)
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--mean", type=float, default=0, help="tokens of a response, if no limit ended it")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--kv-cache-gib", type=float, default=12.0, help="per engine")
    parser.add_argument("--jobs", type=Path, default=Path("/tmp/slipway-jobs"))
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU")
    return parser


def main() -> None:
    parser = engine_arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=1, help="responses to each prompt")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--profile", type=Path)
    parser.set_defaults(tensor_parallel=1)
    options = parser.parse_args()
    results = Results(options.out, "rollout")
    name, means = f"{options.shape}-{options.prompt}-{options.mean}", geometric(options.mean) if options.mean else []
    options.job = write_job(options.jobs / name, options.shape, options.prompt, means=means)
    started = time.perf_counter()
    with running(["offline", *["trainer"] * options.engines], options) as engines:
        results.add(shape=options.shape, engines=len(engines), start_up_seconds=round(time.perf_counter() - started, 1))
        measure(engines, options, results)


if __name__ == "__main__":
    main()
