"""A rollout engine and a trainer in one process: `engine_program.py DIRECTORY ENGINE RANK SIZE LORA`.

Samples, compares log-probs with the trainer's, trains, syncs and compares again. With a RANK above 0 adapters of that
rank are trained. With a SIZE above 1 the engine spans that many processes. Writes DIRECTORY/results.json.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainer.rollout.vllm.settings import engine_environment

os.environ.update(engine_environment(enforce_eager=True), OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1")

import torch

from trainer.algorithms.losses.aggregation import GlobalCount, aggregate
from trainer.algorithms.truncation import Truncation, truncated
from trainer.cluster.place import Team
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.data.batches.partition import MicroBatchLimit
from trainer.models.export import write_language_model
from trainer.models.files import load_tokenizer
from trainer.models.lora import add_adapters
from trainer.models.networks import PolicyNetwork
from trainer.models.pretrained import load_language_model
from trainer.models.small import ModelShape, build_tokenizer, create_model, save_model
from trainer.rollout.end_tokens import end_token_ids
from trainer.rollout.engine import RolloutEngine, open_engine
from trainer.rollout.sampling import Part, Response, SamplingRequest, request_seed
from trainer.training.engine import OptimizerSettings, TrainingEngine
from trainer.training.ranks.process_group import join, open_store
from trainer.training.ranks.sharding import Execution
from trainer.weights.buckets import SentBucket, pack, store

TEMPERATURE = 0.7
LIMIT = MicroBatchLimit(32)
LONG = 300
END = 7  # a common token, so that responses have different lengths


def make_model(directory: Path) -> int:
    tokenizer = build_tokenizer(["What is 1 + 2? #### 3"])
    model = create_model(tokenizer, ModelShape(), seed=0)
    with torch.no_grad():  # a new model is almost uniform, so wrong weights would hardly show
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
    save_model(model, tokenizer, directory)
    return len(tokenizer)


def requests(vocabulary: int, step: int) -> list[SamplingRequest]:
    """Prompts of many lengths, then a group: the same long prompt, whose start engines may compute once."""
    generator = torch.Generator().manual_seed(1)
    lengths = [*torch.randint(1, 65, (96,), generator=generator).tolist(), LONG]
    prompts = [tuple(torch.randint(0, vocabulary, (length,), generator=generator).tolist()) for length in lengths]
    prompts += 3 * prompts[-1:]
    return [SamplingRequest(prompt, TEMPERATURE, request_seed(0, step, row, 0)) for row, prompt in enumerate(prompts)]


def batch(asked: list[SamplingRequest], responses: list[Response]) -> Batch:
    return Batch.from_responses(
        [request.prompt for request in asked],
        [response.token_ids for response in responses],
        [response.log_probs for response in responses],
    )


def difference(trainer: TrainingEngine, sampled: Batch) -> float:
    return float((trainer.forward(sampled, LIMIT) - sampled.rollout_log_probs).abs().max())


def sync(trainer: TrainingEngine, engine: RolloutEngine, adapters: bool) -> list[str]:
    """Sends the trained weights to the engine and returns their names."""
    language_model = trainer.network.language_model
    weights = trainer.adapter_weights(language_model) if adapters else trainer.full_weights(language_model)
    buckets = [store(bucket) for bucket in pack(weights, torch.float32, bucket_bytes=2**17)]
    engine.replace_weights(buckets)
    return [name for bucket in buckets for name in bucket.layout.names]


def loss(output: Any, part: Batch, count: GlobalCount) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    value = aggregate(output[0] * part.rollout_log_probs, part.response_mask, "token-mean", count)
    return value, {"loss": value}


class SpanningEngine:
    """An engine that spans several processes. They all get the same calls, and the first one's results count.

    `opened` starts a rank of it, as `open_engine` does.
    """

    def __init__(self, *arguments: object, size: int, opened: Callable[..., RolloutEngine] = open_engine) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            team = Team(rank, size, f"slipway-test-{os.getpid()}")
            context.Process(target=serve, args=(theirs, opened, *arguments, team), daemon=True).start()
            theirs.close()  # so that a dead process is noticed
            self._pipes.append(ours)

    def generate(self, requests: list[SamplingRequest]) -> list[Response]:
        return self._call("generate", requests)

    def replace_weights(self, buckets: Iterable[SentBucket]) -> None:
        self._call("replace_weights", list(buckets))

    def advance(self, new: Mapping[int, SamplingRequest], steps: int) -> dict[int, Part]:
        return self._call("advance", new, steps)

    def _call(self, method: str, *arguments: object) -> Any:
        for pipe in self._pipes:
            pipe.send((method, arguments))
        results = [pipe.recv() for pipe in self._pipes]
        return results[0]


def serve(pipe: Connection, opened: Callable[..., RolloutEngine], *where: object) -> None:
    engine = opened(*where)
    while True:
        method, arguments = pipe.recv()
        pipe.send(getattr(engine, method)(*arguments))


def main(directory: Path, name: str, rank: int, size: int, lora: str) -> None:
    vocabulary = make_model(directory / "model")
    config = Config.model_validate(
        {
            "model": {"path": directory / "model"},
            "data": {"max_prompt_length": LONG},
            "rollout": {"temperature": TEMPERATURE, "kv_cache_gib": 0.1, "lora": lora},
            "actor": {
                "lora": {
                    "rank": rank,
                    "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"],
                    "exclude_modules": [r".*\.layers\.0\.self_attn\.q_proj"],
                }
            },
        }
    )
    device = torch.device("cpu")
    join(open_store("127.0.0.1", 1, 60), 0, 1, device, "127.0.0.1", 60)
    language_model = load_language_model(directory / "model")
    if rank:
        add_adapters(language_model, config.actor.lora, seed=0)
    network = PolicyNetwork(language_model, TEMPERATURE)
    trainer = TrainingEngine(network, Execution(device, torch.float32), OptimizerSettings(1e-2, 0.0, 1.0))
    end_tokens = [END, *end_token_ids(directory / "model")]
    where = (name, config, "cpu", end_tokens)
    engine: Any = SpanningEngine(*where, size=size) if size > 1 else open_engine(*where)

    results: dict[str, Any] = {}
    asked = requests(vocabulary, step=1)
    if not config.engines_apply_adapters:
        results["before any sync"] = difference(trainer, batch(asked, engine.generate(asked)))
    results["sent"] = sync(trainer, engine, config.engines_apply_adapters)
    responses = engine.generate(asked)
    sampled = batch(asked, responses)
    results["after the first sync"] = difference(trainer, sampled)
    results["responses"] = [response.token_ids for response in responses]
    results["responses again"] = [response.token_ids for response in engine.generate(asked)]
    results["responses of the next step"] = [
        response.token_ids for response in engine.generate(requests(vocabulary, 2))
    ]
    results["responses of a few"] = [response.token_ids for response in engine.generate(asked[10:14])]
    greedy = [SamplingRequest(request.prompt, 0.0, seed=row) for row, request in enumerate(asked)]
    results["greedy"] = [response.token_ids for response in engine.generate(greedy)]
    results["greedy again"] = [response.token_ids for response in engine.generate(greedy)]
    shorter = [replace(request, max_tokens=3) for request in asked]
    results["three tokens"] = [(response.token_ids, response.ended) for response in engine.generate(shorter)]
    results["no requests"] = engine.generate([])
    plain_ones = engine.generate([replace(request, log_probs=False) for request in asked])
    results["without log-probs"] = [(response.token_ids, response.log_probs) for response in plain_ones]

    trainer.update(sampled, loss, LIMIT)
    results["trained, not synced"] = difference(trainer, sampled)
    sync(trainer, engine, config.engines_apply_adapters)
    unstopped = engine.generate(asked)
    results["after the second sync"] = difference(trainer, batch(asked, unstopped))

    if not rank and size == 1:
        plain = load_language_model(directory / "model")
        plain.load_state_dict(dict(trainer.full_weights(network.language_model)))
        results["truncated"] = {
            label: furthest(plain, engine, [replace(request, truncation=truncation) for request in asked])
            for label, truncation in TRUNCATIONS.items()
        }
        del engine
        results |= stopped(name, config, trainer, asked, unstopped)
    if name == "vllm" and not rank and size == 1:
        results |= export(directory, asked, list(trainer.full_weights(network.language_model)))
    (directory / "results.json").write_text(json.dumps(results))


TRUNCATIONS = {
    "top_p": Truncation(top_p=0.6),
    "top_k": Truncation(top_k=3),
    "min_p": Truncation(min_p=0.3),
    "all of them": Truncation(top_p=0.8, top_k=5, min_p=0.05),
}


@torch.inference_mode()
def furthest(plain: Any, engine: RolloutEngine, asked: list[SamplingRequest]) -> dict[str, float]:
    """The largest difference between an engine's log-probs and the renormalised ones of the plain model, and the
    smallest log-prob that the sampled tokens have in the distribution that allows all tokens, minus theirs."""
    difference, below = 0.0, 0.0
    for request, response in zip(asked, engine.generate(asked), strict=True):
        tokens = torch.tensor(response.token_ids)
        logits = plain(torch.tensor([[*request.prompt, *response.token_ids]])).logits[0, len(request.prompt) - 1 : -1]
        whole = (logits.float() / TEMPERATURE).log_softmax(dim=1)
        allowed = truncated(whole, [request.truncation] * len(tokens))
        sampled = torch.tensor(response.log_probs)
        difference = max(difference, (allowed[range(len(tokens)), tokens] - sampled).abs().max().item())
        below = min(below, (whole[range(len(tokens)), tokens] - sampled).min().item())
    return {"difference": difference, "below": below}


def stopped(
    name: str, config: Config, trainer: TrainingEngine, asked: list[SamplingRequest], unstopped: list[Response]
) -> dict[str, Any]:
    """Responses of an engine with stop strings, and the same responses cut where their text first has one."""
    tokenizer = load_tokenizer(config.model)
    # Prompts that end within a character would lend their bytes to the first token.
    whole = [row for row, request in enumerate(asked) if tokenizer.decode(request.prompt[-1:]).isascii()]
    asked, unstopped = [asked[row] for row in whole], [unstopped[row] for row in whole]
    texts = [tokenizer.decode(response.token_ids) for response in unstopped]
    pairs = [first + second for text in texts for first, second in pairwise(text)]
    stops = [pair for pair in pairs if pair.isascii()][:40]  # half a character is no text yet while it is sampled
    rollout = config.rollout.model_copy(update={"stop": stops})
    engine = open_engine(
        name, config.model_copy(update={"rollout": rollout}), "cpu", [END, *end_token_ids(config.model.directory)]
    )
    sync(trainer, engine, adapters=False)
    expected = []
    for response in unstopped:
        ends = [
            count
            for count in range(1, len(response.token_ids) + 1)
            if any(stop in tokenizer.decode(response.token_ids[:count]) for stop in stops)
        ]
        expected.append((response.token_ids[: (ends or [None])[0]], bool(ends) or response.ended))
    return {
        "stopped": [(response.token_ids, response.ended) for response in engine.generate(asked)],
        "cut at the stop strings": expected,
        "uncut": [response.token_ids for response in unstopped],
    }


def export(
    directory: Path, requests: list[SamplingRequest], weights: list[tuple[str, torch.Tensor]]
) -> dict[str, list[int]]:
    """The first greedy token of each prompt, from the exported model and from the trainer."""
    from vllm import LLM, SamplingParams

    write_language_model(directory / "model", weights, torch.float32, directory / "export")
    exported = LLM(
        str(directory / "export"),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=2**26,
        max_model_len=LONG + 16,
        enable_chunked_prefill=False,
    )
    token_ids = exported.generate(
        [{"prompt_token_ids": list(request.prompt)} for request in requests],
        SamplingParams(temperature=0.0, max_tokens=1, detokenize=False),
        use_tqdm=False,
    )
    plain = load_language_model(directory / "model")
    plain.load_state_dict(dict(weights))
    logits = [plain(torch.tensor([request.prompt])).logits[0, -1] for request in requests]
    return {
        "first tokens of the export": [output.outputs[0].token_ids[0] for output in token_ids],
        "first tokens of the trainer": [int(row.argmax()) for row in logits],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
