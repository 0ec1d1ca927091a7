"""An engine that records the experts of its tokens, for test_routes.py: `routes_program.py DIRECTORY ENGINE`.

Writes DIRECTORY/results.json.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.rollout.vllm.settings import engine_environment

os.environ.update(engine_environment(enforce_eager=True), OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1")

import torch
from torch import Tensor, nn

from tests.trainer.models.expert_families import write_experts_model
from trainer.config.tree import Config
from trainer.data.batches.batch import Batch
from trainer.data.batches.routes import Routes, Segment
from trainer.models.networks import PolicyNetwork
from trainer.models.packing import PackedRows, routes_of_rows
from trainer.models.pretrained import load_language_model
from trainer.models.routers import Routers, routers_and_blocks
from trainer.rollout.engine import open_engine
from trainer.rollout.sampling import Part, Response, SamplingRequest
from trainer.weights.buckets import pack, store

TEMPERATURE = 0.7
LENGTH = 40
LONG = 150  # longer than a KV block on CPUs
BEFORE = 7  # steps before an update
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 32}


def weights(directory: Path, seed: int) -> nn.Module:
    """A model whose logits are far from uniform and whose routers prefer some experts."""
    model = load_language_model(directory)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


def requests(vocabulary: int) -> list[SamplingRequest]:
    """Prompts of many lengths, and a long one with four responses."""
    generator = torch.Generator().manual_seed(1)
    lengths = [*torch.randint(1, 30, (6,), generator=generator).tolist(), LONG]
    prompts = [tuple(torch.randint(0, vocabulary, (length,), generator=generator).tolist()) for length in lengths]
    prompts += 3 * prompts[-1:]
    return [SamplingRequest(prompt, TEMPERATURE, row, record_from=0) for row, prompt in enumerate(prompts)]


def batch(asked: Sequence[SamplingRequest], responses: Sequence[Response]) -> Batch:
    prompts = [request.prompt for request in asked]
    rows = Batch.from_responses(
        prompts, [response.token_ids for response in responses], [response.log_probs or () for response in responses]
    )
    routes = Routes([response.routes for response in responses])
    return rows.with_(routes=routes.with_prompts_of_others(prompts))


class OtherChoices(PolicyNetwork):
    """A network whose routers choose the experts next to their expected_ones."""

    def __init__(self, language_model: nn.Module) -> None:
        rule = Routers(language_model.get_decoder()).rule
        assert rule is not None

        def moved(router: nn.Module, _: Any, routed: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits, weights, chosen = routed
            others = (chosen + 1) % router.weight.shape[0]
            return logits, rule.weights(logits, others).to(weights.dtype), others

        for router, _ in routers_and_blocks(language_model.get_decoder()):
            router.register_forward_hook(moved)
        super().__init__(language_model, TEMPERATURE)


@torch.no_grad()
def own_choices(network: PolicyNetwork, rows: Batch) -> Routes:
    network(PackedRows.of(rows.with_(routes=None)))
    return routes_of_rows(rows, False, network.routers.chosen().numpy())


def agreement(recorded: Routes, expected_ones: Routes, counted: Callable[[int, Tensor], Tensor] | None = None) -> float:
    """The share of recorded tokens whose experts are the network's own in all layers, in any order; of the tokens that
    `counted(row, tokens)` marks."""
    same = total = 0
    for row, first, choices in recorded.in_memory():
        expected = torch.cat([torch.from_numpy(part.choices) for part in expected_ones.segments[row]])
        recorded_ones = torch.from_numpy(choices).long().sort(dim=-1).values
        wanted = expected[first : first + len(recorded_ones)].sort(dim=-1).values
        equal, tokens = (recorded_ones == wanted).flatten(1).all(dim=1), first + torch.arange(len(recorded_ones))
        if counted is not None:
            equal = equal[counted(row, tokens)]
        same, total = same + int(equal.sum()), total + len(equal)
    return same / total


@torch.no_grad()
def difference(network: PolicyNetwork, rows: Batch) -> float:
    """The largest difference between a network's log-probs and the engine's."""
    return float((network(PackedRows.of(rows, share_prompts=True))[0] - rows.rollout_log_probs).abs().max())


def in_parts(engine: Any, asked: Sequence[SamplingRequest], update: Sequence[Any]) -> list[Response]:
    """The responses, sampled some steps at a time, with new weights after the first steps."""
    new = dict(enumerate(asked))
    parts: dict[int, list[Part]] = {number: [] for number in new}
    for call in range(200):
        for number, part in engine.advance(new, BEFORE).items():
            parts[number].append(part)
        new = {}
        if call == 0 and update:
            engine.replace_weights(update)
        if all(recorded_ones and recorded_ones[-1].finished for recorded_ones in parts.values()):
            break
    return [
        Response(
            tuple(token for part in recorded_ones for token in part.token_ids),
            tuple(value for part in recorded_ones for value in part.log_probs or ()),
            routes=[segment for part in recorded_ones for segment in part.routes],
        )
        for recorded_ones in parts.values()
    ]


def described(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    return [(segment.first, segment.end) for segment in segments]


def main(directory: Path, name: str) -> None:
    model = write_experts_model(directory / "model", max_position_embeddings=512, **SIZES)
    sections = {
        "model": {"path": model},
        "data": {"max_prompt_length": LONG + LENGTH, "max_response_length": LENGTH},
        "rollout": {"temperature": TEMPERATURE, "kv_cache_gib": 0.1, "engine": name, "prefix_caching": name == "vllm"},
        "actor": {"router_replay": "engine"},
    }
    config = Config.model_validate(sections)
    engine: Any = open_engine(name, config, "cpu", [7])
    trained, later = weights(model, 3), weights(model, 4)
    buckets, of_later = (
        [store(bucket) for bucket in pack(made.named_parameters(remove_duplicate=False), torch.float32, 2**17)]
        for made in (trained, later)
    )
    engine.replace_weights(buckets)
    asked = requests(trained.config.vocab_size)
    responses = engine.generate(asked)
    rows = batch(asked, responses)
    assert rows.routes is not None
    network = PolicyNetwork(trained, TEMPERATURE)
    expected_ones = own_choices(network, rows)
    other = OtherChoices(weights(model, 3))
    results: dict[str, Any] = {
        "lengths": [(len(request.prompt), len(got.token_ids)) for request, got in zip(asked, responses, strict=True)],
        "segments": [described(response.routes) for response in responses],
        "unrecorded": rows.routes.unrecorded(rows.lengths.tolist()),
        "agreement": agreement(rows.routes, expected_ones),
        "difference": difference(network, rows),
        "difference of other choices": difference(other, rows.with_(routes=None)),
        "difference of other choices, replayed": difference(other, rows),
        "unasked": [len(response.routes) for response in engine.generate([SamplingRequest(asked[0].prompt, 0.7)])],
    }
    longer = SamplingRequest((*asked[0].prompt, *responses[0].token_ids), 0.7, record_from=rows.lengths[0].item() - 1)
    (continued,) = engine.generate([longer])
    results["continued"] = [len(longer.prompt), len(continued.token_ids), described(continued.routes)]
    if name == "vllm":
        results["steps of the fast path"] = engine.fast_path.steps
        same = in_parts(engine, asked, [])
        results["parts"] = [same_routes(*pair) for pair in zip(same, responses, strict=True)]
        updated = batch(asked, in_parts(engine, asked, of_later))
        assert updated.routes is not None
        expected_ones = own_choices(PolicyNetwork(weights(model, 3), TEMPERATURE), updated)

        def is_before(row: int, tokens: Tensor) -> Tensor:
            return tokens < len(asked[row].prompt) + BEFORE - 1

        results["agreement before an update"] = agreement(updated.routes, expected_ones, is_before)
        results["agreement after it"] = agreement(updated.routes, expected_ones, lambda *tokens: ~is_before(*tokens))
        first, again = engine.generate(asked[-1:]), engine.generate(asked[-1:])
        both = batch([asked[-1]] * 2, [*first, *again])
        assert both.routes is not None
        results["cached"] = {
            "segments": [described(response.routes) for response in (*first, *again)],
            "unrecorded": both.routes.unrecorded(both.lengths.tolist()),
        }
    (directory / "results.json").write_text(json.dumps(results))


def same_routes(first: Response, other: Response) -> bool:
    """Whether the experts are the same where both have a record."""
    recorded_ones = []
    for response in (first, other):
        table = torch.full((LONG + LENGTH, 2, 2), -1)
        for _, first, choices in Routes([response.routes]).in_memory():
            table[first : first + len(choices)] = torch.from_numpy(choices).long()
        recorded_ones.append(table)
    both = (recorded_ones[0] >= 0) & (recorded_ones[1] >= 0)
    return bool(both.any()) and torch.equal(recorded_ones[0][both], recorded_ones[1][both])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
