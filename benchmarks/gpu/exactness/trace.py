"""What enters and leaves each operator of an engine's model, beside the forward pass from shared operators."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.common import Results
from benchmarks.gpu.exactness.comparing import apart
from benchmarks.gpu.exactness.forward import CHUNK, Model, Operators, hidden_states
from benchmarks.gpu.exactness.sampling import Line, Work, drawn_tokens, sample

LEAVES = {
    *("input_layernorm", "qkv_proj", "rotary_emb", "attn", "o_proj"),
    *("post_attention_layernorm", "gate_up_proj", "act_fn", "down_proj", "norm"),
}
Calls = list[list[Tensor]]


class Trace:
    """Watches the modules of a model until `end`; tensors are cloned, because vLLM's kernels work in place."""

    def __init__(self, model: Any) -> None:
        self.entering: dict[str, Calls] = {}
        self.leaving: dict[str, Calls] = {}
        self._layer = 0
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            parts = name.split(".")
            if parts[-1] in LEAVES:
                self._watch(module, parts[-1], int(parts[parts.index("layers") + 1]) if "layers" in parts else 0)

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _watch(self, module: Any, leaf: str, number: int) -> None:
        def label() -> str:
            if leaf == "norm":
                return leaf
            # The layers share the module of the rotation.
            return f"{self._layer if leaf == 'rotary_emb' else number}.{leaf}"

        def before(_module: Any, arguments: Any, named: Any) -> None:
            if leaf == "input_layernorm":
                self._layer = number
            self.entering.setdefault(label(), []).append(_clones([*arguments, *named.values()]))

        def after(_module: Any, _arguments: Any, _named: Any, output: Any) -> None:
            values = output if isinstance(output, (tuple, list)) else [output]
            self.leaving.setdefault(label(), []).append(_clones(values))

        self._hooks += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]


def _clones(values: Any) -> list[Tensor]:
    return [value.clone() for value in values if isinstance(value, Tensor)]


def _joined(calls: Calls, tokens: int) -> list[Tensor]:
    """The values of a prefill and of the decoding steps after it as one."""
    return [torch.cat([part.reshape(len(part), -1) for part in parts])[:tokens] for parts in zip(*calls, strict=True)]


def watch(worker: Any, kept: dict[str, Any]) -> None:
    """Runs in the engine. Decoding steps run without graphs, or the hooks would not."""
    runner = worker.model_runner
    kept["trace"] = Trace(runner.get_model())
    manager: Any = getattr(runner, "cudagraph_manager", None)
    kept["captured"] = getattr(manager, "_graphs_captured", None)
    if kept["captured"] is not None:
        manager._graphs_captured = False


def unwatch(worker: Any, kept: dict[str, Any]) -> None:
    kept["trace"].end()
    if kept["captured"] is not None:
        worker.model_runner.cudagraph_manager._graphs_captured = kept["captured"]


def compare(
    engine: Any, model: Model, chosen: Operators, cache: Tensor, vocabulary: int, device: str, results: Results
) -> None:
    """One prompt and some decoded tokens, operator by operator: along the chain, then each from the engine's inputs."""
    length, steps = (24, 4) if device == "cpu" else (300, 24)
    work = Work("trace", [drawn_tokens(random.Random(3), vocabulary, length)], [steps])
    kept: dict[str, Any] = {}
    engine.collective_rpc(watch, args=(kept,))
    try:
        sampled, _ = sample(engine, work)
    finally:
        engine.collective_rpc(unwatch, args=(kept,))
    trace: Trace = kept["trace"]
    line = sampled.line(device)
    tokens = len(line.ids)
    record: dict[str, list[Tensor]] = {}
    hidden = hidden_states(model, chosen, line, cache, record)[line.predicting]
    found = chosen.log_probs(chosen.product(hidden[:CHUNK], model.head, None), line.targets, 1.0)
    results.add(trace="log-probs", **apart(found.cpu(), sampled.log_probs))

    def differing(ours: Any, theirs: list[Tensor]) -> list[int]:
        """Tokens of the prompt and decoded tokens that differ."""
        bad = torch.zeros(tokens, dtype=torch.bool, device=device)
        for mine, other in zip(ours, theirs, strict=False):
            bad |= (mine.reshape(tokens, -1) != other).any(dim=1)
        return [int(bad[:length].sum()), int(bad[length:].sum())]

    chain = {
        name: bad
        for name, values in record.items()
        if name in trace.leaving and any(bad := differing(values, _joined(trace.leaving[name], tokens)))
    }
    first = dict(list(chain.items())[:6])
    results.add(trace="chain", operators=len(record), differing=len(chain), first_prompt_and_decoded=first)
    for number in sorted({0, 1, len(model.layers) - 1}):
        rows = {}
        for leaf, compute in _recomputed(model, chosen, line, cache, number).items():
            ours = compute(*_joined(trace.entering[f"{number}.{leaf}"], tokens))
            theirs = _joined(trace.leaving[f"{number}.{leaf}"], tokens)
            rows[leaf] = differing(ours if isinstance(ours, tuple) else (ours,), theirs)
        results.add(trace="each from the engine's inputs", layer=number, prompt_and_decoded=rows)


def _recomputed(
    model: Model, chosen: Operators, line: Line, cache: Tensor, number: int
) -> dict[str, Callable[..., Any]]:
    layer = model.layers[number]

    def norm(weight: Tensor) -> Callable[..., Any]:
        return lambda x, residual=None: chosen.norm(x, weight, model.eps, residual)

    def product(name: str) -> Callable[..., Any]:
        return lambda x: chosen.product(x, layer[name], layer.get(f"{name}_bias"))

    return {
        "input_layernorm": norm(layer["input_norm"]),
        "qkv_proj": product("qkv"),
        "rotary_emb": lambda _, query, key: chosen.rope(line.positions, query, key, model.width, cache),
        "attn": lambda query, key, value: model.attend(chosen, query, key, value, line.bounds),
        "o_proj": product("o"),
        "post_attention_layernorm": norm(layer["post_norm"]),
        "gate_up_proj": product("gate_up"),
        "act_fn": chosen.silu,
        "down_proj": product("down"),
    }
