"""Milliseconds of one decoding step of vLLM by how its engine runs: in this process or its own, model runner, seeds.

    python3 -m benchmarks.gpu.decoding --shape 1.5B [--only NAME…] [--out FILE]

The difference of two generations of different length, so that prompts and start do not count. Each way is a process of
its own. `kernels` is the share of the wall time of 64 tokens in which the GPU computes.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.common import SHAPES, Results, arguments, qwen2_config

RESPONSES = {"512": (64, 8), "128": (16, 8), "8": (1, 8)}  # prompts and responses to each


@dataclass(frozen=True)
class Way:
    """How vLLM runs. `seeds`: every request has its own, as this trainer's have."""

    variables: dict[str, str] = field(default_factory=dict)
    seeds: bool = True
    log_probs: bool = False
    quantization: str | None = None
    cache: str = "auto"


WAYS = {
    "as the trainer": Way(),
    "without seeds": Way(seeds=False),
    "with log-probs": Way(log_probs=True),
    "FP8 weights": Way(quantization="fp8_per_tensor"),
    "FP8 cache": Way(cache="fp8"),
    "batch-invariant": Way({"VLLM_BATCH_INVARIANT": "1"}),
    "in its own process": Way({"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
    "first model runner": Way({"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "first model runner, without seeds": Way({"VLLM_USE_V2_MODEL_RUNNER": "0"}, seeds=False),
}


def measure(way: Way, model: Path, prompt: int, response: int) -> dict[str, float]:
    """Milliseconds per token by the number of responses, in a process whose environment is set."""
    import torch
    from vllm import LLM, SamplingParams

    on_gpu = torch.cuda.is_available()
    device: dict[str, Any] = {"enforce_eager": True, "enable_chunked_prefill": False, "dtype": "float32"}
    if on_gpu:
        device = {"gpu_memory_utilization": 0.5, "dtype": "bfloat16"}
    engine = LLM(
        str(model),
        load_format="dummy",
        quantization=way.quantization,
        kv_cache_dtype=way.cache,
        skip_tokenizer_init=True,
        max_model_len=prompt + response,
        kv_cache_memory_bytes=30 * 2**30 if on_gpu else 2**29,
        logprobs_mode="processed_logprobs",
        max_num_seqs=1024 if on_gpu else 128,
        disable_log_stats=True,
        **device,
    )
    generator = random.Random(0)

    def seconds(prompts: int, samples: int, length: int) -> float:
        drawn = [[generator.randrange(300, 1000) for _ in range(prompt)] for _ in range(prompts)]
        requests = [{"prompt_token_ids": tokens} for tokens in drawn for _ in range(samples)]
        sampling = [
            SamplingParams(
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                logprobs=0 if way.log_probs else None,
                seed=number if way.seeds else None,
            )
            for number in range(len(requests))
        ]
        began = time.perf_counter()
        engine.generate(requests, sampling, use_tqdm=False)
        return time.perf_counter() - began

    seconds(2, 2, 16)
    milliseconds = {}
    for name, (prompts, samples) in RESPONSES.items():
        short = seconds(prompts, samples, response // 4)
        longer = seconds(prompts, samples, response)
        milliseconds[name] = round(1000 * (longer - short) / (response - response // 4), 2)
    if on_gpu and way.variables.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "1":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
            wall = seconds(*RESPONSES["128"], 64)
        busy = sum(event.self_device_time_total for event in recorded.key_averages()) / 1e6
        milliseconds["kernels"] = round(busy / wall, 2)
    return milliseconds


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=1024)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="NAME")
    parser.add_argument("--timeout", type=float, default=170, help="seconds for each way")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=Path, default=Path("/tmp/slipway-jobs"))
    options = parser.parse_args()
    job = options.jobs / f"{options.shape}-decoding"
    if options.one:
        milliseconds = measure(WAYS[options.one], job / "model", options.prompt, options.response)
        print(json.dumps(milliseconds), flush=True)  # noqa: T201
        return
    qwen2_config(SHAPES[options.shape]).save_pretrained(job / "model")  # weights are random
    results = Results(options.out, "decoding")
    for name in options.only:
        results.add(shape=options.shape, way=name, **in_process(name, options))


def in_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a process of its own measured, or its last line if it failed."""
    sizes = [f"--{key}={getattr(options, key)}" for key in ("shape", "prompt", "response", "jobs")]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.decoding", "--one", name, *sizes],
        env={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            **os.environ,
            **WAYS[name].variables,
        },
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # vLLM's own process ends with this one's group
    )
    try:
        said, _ = process.communicate(timeout=options.timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"error": f"no result in {options.timeout:.0f} s"}
    lines = said.strip().splitlines() or [""]
    return json.loads(lines[-1]) if process.returncode == 0 else {"error": f"exit {process.returncode}: {lines[-1]}"}


if __name__ == "__main__":
    main()
