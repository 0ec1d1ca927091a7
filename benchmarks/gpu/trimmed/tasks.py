"""The tasks that `benchmarks.gpu.trimmed` runs in a trimmed installation, one process each: TASK ORDER.json

Each returns facts for its row and raises where something does not work. Torch and the others are imported inside, after
the watch on what they ask for has begun.
"""

import ctypes
import json
import os
import random
import re
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def watch(removed: list[str], folders: list[str], site: str) -> set[str]:
    """Records removed files that are requested all the same in the returned set, even if the caller handles it.

    Sees Python's imports, `open` and ctypes; a library that another one needs is the business of `libraries`.
    """
    asked: set[str] = set()
    paths = set(removed)
    modules = {path.partition(".")[0].replace("/", ".") for path in (*removed, *folders)}

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if event == "import":
            if values[0] in modules:
                asked.add(values[0])
        elif event in ("open", "ctypes.dlopen") and isinstance(values[0], str) and values[0].startswith(site):
            asked.update({os.path.relpath(values[0], site)} & paths)

    sys.addaudithook(hook)
    return asked


def check_origin(sources: list[str], copies: list[str]) -> list[str]:
    """Raises if a module or mapped file comes from the untrimmed packages. Returns CUDA libraries from other places."""
    homes = tuple(f"{source}/" for source in sources)
    modules = [str(getattr(module, "__file__", "") or "") for module in list(sys.modules.values())]
    mapped = set(re.findall(r"(/\S+)$", Path("/proc/self/maps").read_text(), re.MULTILINE))
    reached = [path for path in (*modules, *mapped) if path.startswith(homes)]
    if reached:
        raise RuntimeError(f"not of the trimmed copy: {reached[:5]}")
    for name in ("torch", "vllm", "ray"):
        if name in sys.modules and not str(sys.modules[name].__file__).startswith(tuple(copies)):
            raise RuntimeError(f"{name} is {sys.modules[name].__file__}")
    ours = tuple(str(Path(site).parents[2]) for site in copies)
    kind = re.compile(r"lib(cu|nv|nccl)[^/]*\.so")
    return sorted(path for path in mapped if not path.startswith(ours) and kind.search(path))


def libraries(order: dict[str, Any]) -> dict[str, Any]:
    """Checks that no remaining shared object needs a removed one."""
    program = ROOT / "tests" / "smoke" / "needed_libraries.py"
    main = runpy.run_path(str(program))["main"]
    with redirect_stdout(StringIO()) as output:
        main(*(str(Path(site).parents[1]) for site in order["copies"]))
    needed = json.loads(output.getvalue())
    gone = {Path(path).name for path in order["removed"]}
    broken = {library: objects for library, objects in needed.items() if library in gone}
    if broken:
        raise RuntimeError(f"needed and taken out: {broken}")
    return {"needed_from_elsewhere": len(needed)}


def imports(_order: dict[str, Any]) -> dict[str, Any]:
    seconds, versions = {}, {}
    for name in ("torch", "ray", "vllm", "transformers", "pyarrow", "trainer.config.tree"):
        start = time.perf_counter()
        module = __import__(name)
        seconds[name] = round(time.perf_counter() - start, 1)
        versions[name] = getattr(module, "__version__", "")
    return {"versions": versions, "import_seconds": seconds, "file": sys.modules["vllm"].__file__}


def kernels(order: dict[str, Any]) -> dict[str, Any]:
    """Calls each CUDA library once, and the profiler, which uses CUPTI."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    device = "cpu" if order["cpu"] else "cuda"
    values = torch.randn(64, 64, device=device)
    steps: dict[str, Callable[[], Any]] = {
        "product": lambda: values @ values,
        "convolution": lambda: torch.nn.functional.conv2d(values.view(1, 1, 64, 64), values[:3, :3].view(1, 1, 3, 3)),
        "fourier": lambda: torch.fft.fft(values),
        "singular values": lambda: torch.linalg.svd(values),
        "cholesky": lambda: torch.linalg.cholesky(values @ values.T + 64 * torch.eye(64, device=device)),
        "sparse": lambda: values.relu().to_sparse_csr() @ values,
        "random": lambda: torch.randn(8, device=device),
        "compiled at run time": lambda: torch.gcd(values.long(), values.long() + 6),
    }
    activity = ProfilerActivity.CPU if order["cpu"] else ProfilerActivity.CUDA
    with profile(activities=[activity]) as recorded:
        for name, step in steps.items():
            try:
                step()
            except (ImportError, OSError, RuntimeError) as error:
                raise RuntimeError(f"{name}: {error}") from error
        if not order["cpu"]:
            torch.cuda.synchronize()
    seen = len(recorded.events())
    if not seen:
        raise RuntimeError("torch's profiler saw nothing")
    return {"steps": list(steps), "profiled_events": seen}


def compile(order: dict[str, Any]) -> dict[str, Any]:
    """Compares a graph's forward and backward pass through Inductor (Triton on GPUs) with eager mode."""
    import torch
    from torch import nn

    device = "cpu" if order["cpu"] else "cuda"
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 1)).to(device)
    rows = torch.randn(32, 64, device=device)

    def gradients(call: Callable[[Any], Any]) -> Any:
        module.zero_grad()
        call(rows).square().mean().backward()
        return torch.cat([weight.grad.flatten() for weight in module.parameters() if weight.grad is not None])

    difference = float((gradients(torch.compile(module)) - gradients(module)).abs().max())
    if difference > 1e-3:
        raise RuntimeError(f"compiled and eager gradients differ by {difference}")
    return {"difference": difference}


def attention(order: dict[str, Any]) -> dict[str, Any]:
    """Compares vLLM's FlashAttention for this chip and torch's variable-length attention with plain attention."""
    if order["cpu"]:
        return {"skipped": "both need a GPU"}
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    from trainer.models.attention import _variable_length

    heads, width, length = 4, 64, 128
    query, key, value = (
        torch.randn(2 * length, heads, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    offsets = torch.tensor([0, length, 2 * length], device="cuda", dtype=torch.int32)

    def rows(packed: Any) -> Any:
        return packed.float().view(2, length, heads, width).transpose(1, 2)

    wanted = scaled_dot_product_attention(rows(query), rows(key), rows(value), is_causal=True)
    wanted = wanted.transpose(1, 2).reshape(2 * length, heads, width)
    version = get_flash_attn_version()
    with torch.no_grad():
        served = flash_attn_varlen_func(
            query, key, value, length, offsets, length, cu_seqlens_k=offsets, causal=True, fa_version=version
        )
    trained = _variable_length(query, key, value, offsets, length, None, None)
    trained.float().square().sum().backward()
    if query.grad is None or not query.grad.isfinite().all():
        raise RuntimeError("torch's attention of variable length gave no gradients")
    differences = {"vllm": float((served - wanted).abs().max()), "torch": float((trained - wanted).abs().max())}
    if max(differences.values()) > 0.05:
        raise RuntimeError(f"attention differs from plain attention: {differences}")
    return {"flash_attention": version, "differences": differences}


def collectives(order: dict[str, Any]) -> dict[str, Any]:
    """The version that the wheel's library reports, and an all-reduce through torch on one rank."""
    import torch
    import torch.distributed as dist

    facts: dict[str, Any] = {}
    if not order["cpu"]:
        places = [Path(site, "nvidia", "nccl", "lib", "libnccl.so.2") for site in order["copies"]]
        path = next(place for place in places if place.is_file())
        version = ctypes.c_int()
        if ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(version)) != 0:
            raise RuntimeError(f"{path}: ncclGetVersion failed")
        facts = {"nccl": version.value, "of_torch": ".".join(map(str, torch.cuda.nccl.version()))}
    backend, device = ("gloo", "cpu") if order["cpu"] else ("nccl", "cuda")
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    value = torch.ones(4, device=device)
    dist.all_reduce(value)
    assert float(value.sum()) == 4
    dist.destroy_process_group()
    return facts


def ray(order: dict[str, Any]) -> dict[str, Any]:
    """One node, one task that uses the device."""
    import ray as cluster

    cluster.init(
        num_cpus=2,
        num_gpus=0 if order["cpu"] else 1,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )

    @cluster.remote(num_cpus=1, num_gpus=0 if order["cpu"] else 1)
    def double(value: float) -> tuple[float, str]:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        return float((torch.full((2,), value, device=device) * 2).sum()), str(torch.__file__)

    total, file = cluster.get(double.remote(3.0), timeout=50)
    cluster.shutdown()
    assert total == 12
    if not file.startswith(tuple(order["copies"])):
        raise RuntimeError(f"a worker's torch is {file}")
    return {"worker_file": file}


def generation(order: dict[str, Any]) -> dict[str, Any]:
    """Runs vLLM inside this process, like the trainer, with CUDA graphs."""
    from trainer.rollout.vllm.settings import engine_environment

    os.environ.update(engine_environment(enforce_eager=order["cpu"]) | {"VLLM_LOGGING_LEVEL": "INFO"})
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {"gpu_memory_utilization": 0.1}
    if order["cpu"]:
        settings = {"enforce_eager": True}
    start = time.perf_counter()
    engine = LLM(
        str(Path(order["job"], "model")),
        skip_tokenizer_init=True,
        dtype="float32" if order["cpu"] else "bfloat16",
        max_model_len=128,
        max_num_seqs=16,
        kv_cache_memory_bytes=2**28,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        enable_prefix_caching=False,
        **settings,
    )
    ready = time.perf_counter()
    draw = random.Random(0)
    prompts: list[Any] = [{"prompt_token_ids": [draw.randrange(300, 1024) for _ in range(32)]} for _ in range(16)]
    sampling = SamplingParams(max_tokens=32, temperature=1.0, seed=1, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    if tokens != 16 * 32:
        raise RuntimeError(f"{tokens} tokens came, not {16 * 32}")
    config = engine.llm_engine.vllm_config
    return {
        "tokens": tokens,
        "start_up_seconds": round(ready - start, 1),
        "generate_seconds": round(time.perf_counter() - ready, 2),
        "eager": bool(config.model_config.enforce_eager),
        "cuda_graphs": str(config.compilation_config.cudagraph_mode),
    }


def main(task: str, path: str) -> None:
    order = json.loads(Path(path).read_text())
    asked = watch(order["removed"], order["folders"], order["copies"][-1])
    facts = {
        "imports": imports,
        "kernels": kernels,
        "compile": compile,
        "attention": attention,
        "generation": generation,
    }
    facts |= {"libraries": libraries, "collectives": collectives, "ray": ray}
    answer: dict[str, Any] = {}
    try:
        answer = facts[task](order)
        answer["from_the_host"] = check_origin(order["sources"], order["copies"])
    finally:
        answer["asked_for_what_is_gone"] = sorted(asked)
        Path(order["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
