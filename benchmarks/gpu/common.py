"""Model shapes, random models and prompts, and the file of results."""

import argparse
import errno
import json
import multiprocessing
import random
import socket
import string
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.gpu.lengths import give_lengths
from trainer.models.context_parallel import RankGroup
from trainer.planning.model_size import ModelSize

Result = TypeVar("Result")
VOCABULARY = 151_936
END_TOKEN = 258
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2 model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    tied: bool
    vocabulary: int = VOCABULARY

    @property
    def config(self) -> Any:
        """The configuration in Transformers."""
        from transformers import Qwen2Config

        return Qwen2Config(**self._settings, use_sliding_window=False)

    @property
    def _settings(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 32768,
            "bos_token_id": 256,
            "eos_token_id": END_TOKEN,
            "pad_token_id": 256,
        }

    @property
    def size(self) -> ModelSize:
        """The sizes that determine what a pass computes."""
        width = self.hidden // self.heads
        return ModelSize(
            0,
            self.layers,
            self.hidden,
            self.intermediate,
            self.heads * width,
            self.key_value_heads * width,
            self.key_value_heads,
            self.vocabulary,
        )


@dataclass(frozen=True, kw_only=True)
class MixtureShape(Shape):
    """Sizes of a Qwen3-MoE model, whose layers have `experts` of the intermediate size; a router chooses some."""

    experts: int
    chosen: int = 8
    width: int = 128  # of a head

    @property
    def config(self) -> Any:
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(
            **self._settings,
            head_dim=self.width,
            moe_intermediate_size=self.intermediate,
            num_experts=self.experts,
            num_experts_per_tok=self.chosen,
            norm_topk_prob=True,
        )

    @property
    def size(self) -> ModelSize:
        size = ModelSize.of_mixture(random_model(self, "meta", torch.float32))
        assert size is not None
        return size


class OneOfSeveral(RankGroup):
    """The first of several members, in a process that has none beside it. `sent` counts bytes."""

    def __init__(self, members: int) -> None:
        super().__init__(dist.group.WORLD)
        self.members = members
        self.sent = 0

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return self.members


SHAPES = {
    "0.5B": Shape(896, 4864, 24, 14, 2, tied=True),
    "1.5B": Shape(1536, 8960, 28, 12, 2, tied=True),
    "7B": Shape(3584, 18944, 28, 28, 4, tied=False),
    "14B": Shape(5120, 13824, 48, 40, 8, tied=False),
    "tiny": Shape(64, 128, 2, 2, 1, tied=True, vocabulary=1024),
    # 3.1 billion parameters, 0.7 of them active; Qwen3-30B-A3B.
    "moe-3B": MixtureShape(1024, 512, 28, 16, 4, tied=True, experts=64),
    "moe-30B": MixtureShape(2048, 768, 48, 32, 4, tied=False, experts=128),
    "moe-tiny": MixtureShape(64, 32, 2, 2, 1, tied=True, vocabulary=1024, experts=128, chosen=2, width=32),
}


def random_model(shape: Shape, device: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(shape.config).to(dtype)


def save_model(shape: Shape, directory: Path, means: Sequence[float] = ()) -> None:
    """Call it in a separate process, because its GPU memory would be measured too. See `lengths` for `means`."""
    model = random_model(shape, "cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)
    if means:
        give_lengths(model, means, END_TOKEN)
    model.save_pretrained(directory)


def write_job(
    directory: Path,
    name: str,
    prompt_tokens: int,
    prompts: int = 2048,
    means: Sequence[float] = (),
) -> Path:
    """Writes model, tokenizer, prompts and a reward function for both trainers, whole or not at all: jobs that run side
    by side may share a directory. Returns `directory`.

    With `means` (see `benchmarks.gpu.lengths`) responses end by themselves.
    """
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
            written = Path(temporary) / directory.name
            _write_job(written, name, prompt_tokens, prompts, means)
            try:
                written.rename(directory)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                # Another job was first.
    return directory


def _write_job(directory: Path, name: str, prompt_tokens: int, prompts: int, means: Sequence[float]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    shape = SHAPES[name]
    directory.mkdir()
    # As many tokens as the model has: verl masks ids that the tokenizer lacks.
    tokens = sorted(ByteLevel.alphabet()) + SPECIAL_TOKENS
    tokens += [f"<filler{number}>" for number in range(len(tokens), shape.vocabulary)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    alone(save_model, shape, directory / "model", means)
    tokenizer.save_pretrained(directory / "model")
    empty = tokenizer.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True, tokenize=False)
    wrapper = len(tokenizer(empty, add_special_tokens=False)["input_ids"])
    generator = random.Random(0)

    def row(number: int) -> dict[str, Any]:
        content = "".join(generator.choices(string.ascii_letters, k=prompt_tokens - wrapper))
        return {
            "data_source": "random",
            "prompt": [{"role": "user", "content": content}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": number, "split": "train"},
        }

    pq.write_table(pa.Table.from_pylist([row(number) for number in range(prompts)]), directory / "train.parquet")
    pq.write_table(pa.Table.from_pylist([row(number) for number in range(4)]), directory / "validation.parquet")
    (directory / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return float(len(solution_str) % 2)\n"
    )


class Results:
    """The rows of one script, appended to a file as they are measured, so that an interrupted run keeps its rows."""

    def __init__(self, path: Path, benchmark: str) -> None:
        self._path = path
        self._benchmark = benchmark
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, **row: Any) -> None:
        line = {"benchmark": self._benchmark, "date": f"{datetime.now(UTC):%Y-%m-%d}", **host(), **row}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(row), flush=True)  # noqa: T201


def host() -> dict[str, str]:
    """Describes the machine without a CUDA context in this process, which would take GPU memory.

    `machine` is the id of the host's first GPU: rows that share it were measured on the same machine.
    """
    if not torch.cuda.is_available():
        return {"device": "no GPU"}
    import pynvml

    pynvml.nvmlInit()
    first = pynvml.nvmlDeviceGetHandleByIndex(0)
    return {
        "device": str(pynvml.nvmlDeviceGetName(first)),
        "machine": str(pynvml.nvmlDeviceGetUUID(first)).split("-")[1],
    }


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-benchmarks.jsonl"), help="file of results")
    return parser


def join_alone(device: torch.device) -> None:
    """Makes this process the only rank of the default process group."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)


def alone(function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls a function of a module in a process of its own, whose memory and GPU are free afterwards."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def timed(action: Callable[[], Any]) -> float:
    """Seconds of an action that waits for its own work."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def seconds(action: Callable[[], Any], repeats: int) -> float:
    """Median seconds of an action that queues work on the GPU, after two warm-up runs, because layers compile twice."""
    times = []
    for _ in range(repeats + 2):
        synchronize()
        start = time.perf_counter()
        action()
        synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[repeats // 2]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matrix_rate(size: int = 8192) -> float:
    """FLOP/s of a bfloat16 matrix product on random numbers, the practical peak of the chip."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def products() -> None:
        for _ in range(10):
            left @ right

    return 20 * size**3 / seconds(products, 3)
