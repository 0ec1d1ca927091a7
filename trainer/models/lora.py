"""Low-rank adapters (LoRA: Hu et al. 2021, arXiv:2106.09685), in the file format of the library peft.

An adapted layer keeps its name and the name of its weight, so the names of the frozen network do not change.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from trainer.config.sections.roles import ALL_LINEAR, LoraConfig
from trainer.errors import ConfigError, DataError
from trainer.models.files import read_adapter_config
from trainer.models.pretrained import empty_language_model
from trainer.records.files.disk import writing

Gather = Callable[[Tensor], Tensor]


class LoraLinear(nn.Linear):  # type: ignore[misc]
    """W x + b + scaling B A x, with frozen W [out, in] and b, and trained A [rank, in] and B [out, rank] of `dtype`.

    B starts at zero, so training starts from the frozen network, unless `load_adapter` fills A and B. While `enabled`
    is False, A and B are those of `keep_start`, or zero.
    """

    def __init__(
        self, frozen: nn.Linear, settings: LoraConfig, generator: torch.Generator, dtype: torch.dtype = torch.float32
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = frozen.in_features, frozen.out_features
        self.weight, self.bias = frozen.weight, frozen.bias
        self.scaling = settings.alpha / settings.rank
        self.enabled = True
        bound = 1 / math.sqrt(self.in_features)
        first = torch.empty(settings.rank, self.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(first.to(dtype))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, settings.rank, dtype=dtype))
        self.register_buffer("start_A", None, persistent=False)
        self.register_buffer("start_B", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        plain = linear(x, self.weight, self.bias)
        a, b = (self.lora_A, self.lora_B) if self.enabled else (self.start_A, self.start_B)
        if a is None:
            return plain
        # Sharded weights come in the type of the computation already; before that, adapters may be more precise.
        return plain + self.scaling * linear(linear(x, a.to(x.dtype)), b.to(x.dtype))

    def keep_start(self) -> None:
        """Keeps a copy of A and B, in the type of W."""
        self.start_A, self.start_B = (
            part.detach().to(self.weight.dtype, copy=True) for part in (self.lora_A, self.lora_B)
        )

    def merged(self, gather: Gather) -> Tensor:
        """W + scaling B A, [out, in] float32. `gather` turns a sharded tensor into a whole one."""
        return gather(self.weight).float() + self.scaling * gather(self.lora_B).float() @ gather(self.lora_A).float()


def add_adapters(
    language_model: nn.Module, settings: LoraConfig, seed: int, dtype: torch.dtype = torch.float32
) -> None:
    """Freezes a language model and adds adapters of a type to layers of its decoder, equal on every rank.

    Raises ConfigError if no layer has the name of a target module.
    """
    language_model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parent, name, layer in _targets(language_model, settings):
        setattr(parent, name, LoraLinear(layer, settings, generator, dtype))


def target_names(model: Path, settings: LoraConfig) -> list[str]:
    """The names, such as q_proj, of the layers in the model at `model` that get an adapter."""
    return sorted({name for _, name, _ in _targets(empty_language_model(model), settings)})


def _targets(language_model: nn.Module, settings: LoraConfig) -> list[tuple[nn.Module, str, nn.Linear]]:
    """The layers to adapt, as (parent, name, layer)."""
    wanted = set(settings.target_modules)
    decoder = language_model.get_decoder()
    prefix = next(f"{path}." for path, module in language_model.named_modules() if module is decoder)
    linears = [
        (f"{prefix}{path}.{name}".replace("..", "."), parent, name, layer)
        for path, parent in decoder.named_modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear)
    ]
    names = {name for _, _, name, _ in linears}
    hint = f"its linear layers are {', '.join(sorted(names))}"
    if unknown := wanted - names - {ALL_LINEAR}:
        raise ConfigError(
            f"lora.target_modules: the model has no linear layer {', '.join(sorted(unknown))}",
            hint=f"{hint}; {ALL_LINEAR} selects all of them",
        )
    excluded: set[str] = set()
    for pattern in settings.exclude_modules:
        matching = {path for path, _, name, _ in linears if _selects(pattern, name, path)}
        if not matching and settings.path is None:  # `load_adapter` compares the layers with those of an adapter
            raise ConfigError(
                f"lora.exclude_modules: the model has no linear layer {pattern}", hint=f"{hint}, like {linears[0][0]}"
            )
        excluded |= matching
    return [
        (parent, name, layer)
        for path, parent, name, layer in linears
        if (name in wanted or ALL_LINEAR in wanted) and path not in excluded
    ]


def _selects(pattern: str, name: str, path: str) -> bool:
    """Whether a pattern is the layer's name, or a regular expression for its whole path. Raises ConfigError."""
    try:
        return pattern == name or re.fullmatch(pattern, path) is not None
    except re.error as error:
        raise ConfigError(
            f"lora.exclude_modules: {pattern!r} is no regular expression: {error}", hint="escape special characters"
        ) from error


def load_adapter(language_model: nn.Module, settings: LoraConfig) -> None:
    """Fills the adapters of a model with those at `settings.path`.

    Raises ConfigError if their rank, scale or layers differ from the settings, DataError if they cannot be read.
    """
    directory = settings.path
    assert directory is not None
    adapter = read_adapter_config(directory)
    try:
        weights = load_file(directory / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(
            f"lora.path={directory}: cannot be read: {error}",
            hint="name a directory with adapter_config.json and adapter_model.safetensors",
        ) from error
    if other := [name for name in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern") if adapter.get(name)]:
        raise ConfigError(
            f"lora.path={directory}: adapters with {', '.join(other)} are not supported",
            hint="use an adapter of plain LoRA, or merge it into the model",
        )
    if (adapter.get("r"), adapter.get("lora_alpha")) != (settings.rank, settings.alpha):
        raise ConfigError(
            f"lora.path={directory}: its rank is {adapter.get('r')} and its alpha {adapter.get('lora_alpha')}, "
            f"but lora.rank={settings.rank} and lora.alpha={settings.alpha:g}",
            hint=f"set lora.rank={adapter.get('r')} and lora.alpha={adapter.get('lora_alpha')}",
        )
    parameters = dict(adapter_parameters(language_model))
    if different := sorted(parameters.keys() ^ weights.keys()):
        raise ConfigError(
            f"lora.path={directory}: it has adapters for other layers; the first difference is {different[0]}",
            hint="leave out lora.rank: the adapter then gives rank, alpha and layers",
        )
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name])


def adapted_layers(module: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    return ((name, layer) for name, layer in module.named_modules() if isinstance(layer, LoraLinear))


def keep_start(module: nn.Module) -> None:
    """Keeps a copy of the adapters as they are, whole on every rank, for `adapters_off`. No checkpoint contains it."""
    for _, layer in adapted_layers(module):
        layer.keep_start()


@contextmanager
def adapters_off(network: nn.Module) -> Iterator[None]:
    """Turns the adapters off while the block runs: the network is then the frozen one, or that of `keep_start`."""
    layers = [layer for _, layer in adapted_layers(network)]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


def adapter_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A and B of every adapter, by peft's names."""
    for name, layer in adapted_layers(module):
        for part in ("lora_A", "lora_B"):
            yield peft_name(name, part), getattr(layer, part)


def named_adapters(weights: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each adapted layer, by the layer's name in the model. The keys of `weights` are peft's names."""
    layers = [name.split(".", 2)[2].rsplit(".", 2)[0] for name in weights]
    return {name: (weights[peft_name(name, "lora_A")], weights[peft_name(name, "lora_B")]) for name in layers}


def peft_name(layer: str, part: str) -> str:
    """peft's name of `part` (lora_A or lora_B) of a layer."""
    return f"base_model.model.{layer}.{part}.weight"


def adapter_weights(module: nn.Module, gather: Gather) -> Iterator[tuple[str, Tensor]]:
    """The whole adapters, by peft's names. Every rank must exhaust it."""
    return ((name, gather(parameter.detach())) for name, parameter in adapter_parameters(module))


def _excluded_by_peft(patterns: Sequence[str]) -> list[str] | str:
    """peft's `exclude_modules`: a list of names, or a regular expression for whole paths if any pattern is one."""
    if all(pattern.isidentifier() for pattern in patterns):
        return list(patterns)
    return "|".join(rf".*\.{pattern}" if pattern.isidentifier() else f"(?:{pattern})" for pattern in patterns)


def write_adapter(weights: Iterable[tuple[str, Tensor]], settings: LoraConfig, base: Path, directory: Path) -> None:
    """Writes an adapter directory in peft's format for the model at `base`. Raises CheckpointError if it cannot."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in weights}
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "exclude_modules": _excluded_by_peft(settings.exclude_modules),
        "bias": "none",
        "inference_mode": True,
    }
    with writing(directory, sum(tensor.nbytes for tensor in tensors.values())):
        directory.mkdir()
        (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
