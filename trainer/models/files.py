"""Checks model directories before anything starts, and loads tokenizers."""

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trainer.config.section import is_hub_name
from trainer.config.sections.model import ModelConfig
from trainer.config.sections.roles import LoraConfig, TrainedModelConfig
from trainer.config.tree import WorkersConfig
from trainer.errors import ConfigError, DataError
from trainer.hub import download
from trainer.models.backend import training_backend
from trainer.models.experts import check_expert_parallel
from trainer.models.model_class import check_causal, check_exported
from trainer.models.networks import check_context_parallel
from trainer.models.overrides import check_layers, with_overrides
from trainer.models.routers import check_routers

C = TypeVar("C", bound=WorkersConfig)

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# Rows that a thread decodes per call.
ROWS_AT_ONCE = 64
_LARGEST = 64 * 2**20  # bytes of JSON; the index of a thousand billion parameters has less


def with_local_models(config: C) -> C:
    """The settings with Hugging Face hub names, such as `Qwen/Qwen2.5-0.5B`, replaced by local directories.

    Downloads missing models unless HF_HUB_OFFLINE is set, applies `model.override_config`, and reads the rank of an
    adapter to start from. Raises DataError if a model cannot be downloaded or an adapter not be read, ConfigError for
    entries that cannot be overridden.
    """
    updates: dict[str, Any] = {
        role: section.model_copy(update={"path": _local(section.path, f"{role}.path")})
        for role, section in (("model", config.model), ("critic", config.critic))
        if section.path is not None
    }
    for role in ("actor", "critic"):
        section = updates.get(role, getattr(config, role))
        updates[role] = section.model_copy(update={"lora": _with_rank(section.lora)})
    teacher = config.distillation.teacher
    if teacher is not None:
        local = _local(teacher, "distillation.teacher")
        updates["distillation"] = config.distillation.model_copy(update={"teacher": local})
    reward_model = config.reward.model
    if reward_model.path is not None:
        reward_model = reward_model.model_copy(update={"path": _local(reward_model.path, "reward.model.path")})
        updates["reward"] = config.reward.model_copy(update={"model": reward_model})
    return with_overrides(config.model_copy(update=updates))


def _with_rank(settings: LoraConfig) -> LoraConfig:
    """The settings of adapters, with rank, alpha and layers of the adapter at `lora.path` if they name no rank."""
    if settings.path is None or settings.rank:
        return settings
    adapter = read_adapter_config(settings.path)
    layers = adapter.get("target_modules")
    if not isinstance(layers, list) or not isinstance(adapter.get("r"), int):
        raise DataError(
            f"lora.path={settings.path}: adapter_config.json has no rank r, or no list target_modules",
            hint="use an adapter that peft saved",
        )
    update = {"rank": adapter["r"], "alpha": float(adapter.get("lora_alpha", 8)), "target_modules": sorted(layers)}
    return settings.model_copy(update=update | {"exclude_modules": _excluded(adapter.get("exclude_modules"))})


def _excluded(modules: object) -> list[str]:
    """The patterns of peft's `exclude_modules`: a regular expression, or a list of names and ends of paths."""
    if isinstance(modules, str):
        return [modules]
    names = [str(name) for name in modules] if isinstance(modules, list) else []
    return [name if name.isidentifier() else rf".*\.{re.escape(name)}" for name in names]


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """The settings of an adapter in peft's format. Raises DataError if they cannot be read."""
    file = directory / "adapter_config.json"
    try:
        adapter = json.loads(_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"lora.path={directory}: cannot be read: {error}",
            hint="name a directory with adapter_config.json and adapter_model.safetensors",
        ) from error
    if not isinstance(adapter, dict):
        raise DataError(f"{file}: not a JSON object", hint="use an adapter that peft saved")
    return adapter


def _local(path: Path, setting: str) -> Path:
    if not is_hub_name(path):
        return path
    return download(
        str(path),
        "model",
        ["*.json", "*.safetensors", "*.txt", "*.jinja"],
        f"{setting}={path}: no such directory, and",
        "name a directory that every node can read, or set HF_HOME to a cache that holds the model",
    )


def check_models(config: WorkersConfig, longest: str | None = None) -> None:
    """Checks every model of a run. `longest` are the settings that limit a row, if they are not those of `config`.

    Raises DataError if a model is missing, of the wrong kind or more than a run would export, or if the vocabulary of
    critic or teacher is not the actor's.
    Raises ConfigError if a role's training backend does not support its model, DataError if the ranks of
    `sharding.context_parallel` cannot compute its rows together or those of `sharding.expert_parallel` cannot divide
    its experts, or if settings of routers are given for a model without routers that are known.
    """
    actor = config.model.directory
    actor_size = _vocabulary_size(actor, "model.path")
    check_exported(actor, read_json(actor / "config.json"), "model.path")
    _check_layers("actor", config.actor, actor)
    _check_backend("actor", config.actor, actor)
    _check_positions(config, actor, longest)
    _check_heads(actor, config.rollout.tensor_parallel)
    if config.reward.model.path is not None:
        _check_reward_model(config, config.reward.model.path)
    teacher = config.distillation.teacher
    if teacher is not None:
        if not _same_words(actor, teacher, "distillation.teacher"):
            raise DataError(
                f"distillation.teacher={teacher} has another vocabulary than model.path={actor}: it would misread the "
                "policy's tokens",
                hint="use a teacher of the same model family",
            )
        check_causal(teacher, read_json(teacher / "config.json"), "distillation.teacher")
        _check_layers("actor", config.actor, teacher, routes=False)
        _check_positions(config, teacher)
    critic = config.critic.path
    if config.needs_critic:
        if critic is not None:
            _vocabulary_size(critic, "critic.path")
        _check_layers("critic", config.critic, critic or actor)
        _check_backend("critic", config.critic, critic or actor)
    if not config.needs_critic or critic is None:
        return
    if not _same_words(actor, critic, "critic.path"):
        raise DataError(
            f"critic.path={critic} has another vocabulary ({_vocabulary_size(critic, 'critic.path')} tokens) than "
            f"model.path={actor} ({actor_size} tokens): it would misread the actor's tokens",
            hint="use a critic of the same model family, or omit critic.path to start from the actor's model",
        )
    check_causal(critic, read_json(critic / "config.json"), "critic.path")
    _check_positions(config, critic)


def _check_layers(role: str, settings: TrainedModelConfig, model: Path, routes: bool = True) -> None:
    """What depends on the layers that Transformers makes; `routes`: settings of routers are for this model too."""
    sharding = settings.sharding
    given = [f"{role}.{setting}" for setting in settings.needs_routers] if routes else []
    if sharding.context_parallel == sharding.expert_parallel == 1 and not given:
        return
    from trainer.models.pretrained import empty_language_model  # takes seconds, and few runs need it

    language_model = empty_language_model(model)
    check_context_parallel(language_model, role, sharding.context_parallel, sharding.tensor_parallel)
    check_expert_parallel(language_model, role, sharding.expert_parallel)
    check_routers(language_model, given)


def _check_backend(role: str, settings: TrainedModelConfig, model: Path) -> None:
    backend = training_backend(settings.backend)
    if settings.lora.rank and not backend.takes_adapters:
        raise ConfigError(
            f"{role}.backend={settings.backend} does not support adapters",
            hint=f"set {role}.lora.rank=0, or {role}.backend=fsdp",
        )
    backend.check(role, read_json(model / "config.json"))


def _check_positions(config: WorkersConfig, model: Path, given: str | None = None) -> None:
    settings = read_json(model / "config.json")
    prompt, response = config.longest_row
    longest = prompt + response
    given = given or (
        f"data.max_prompt_length={prompt} and data.max_response_length={response} add up to {longest} tokens"
    )
    positions, rotations = settings.get("max_position_embeddings"), _rotations(settings)
    scaled = settings.get("rope_scaling") or any(rotation.get("factor") for rotation in rotations)
    if isinstance(positions, int) and longest > positions and not scaled:
        raise DataError(
            f"{given}, but {model} has {positions} positions",
            hint="lower that, or use a model with more positions",
        )
    for rotation in rotations:
        limit = _positions_alike(rotation, settings)
        if isinstance(limit, int) and longest > limit:
            raise DataError(
                f"{given}, but beyond {limit} the rotation of {model} depends on the longest row of a pass: log-probs "
                "would depend on other rows",
                hint="lower that, or use a model whose rotation is fixed, such as one with yarn",
            )


def _rotations(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parameters of a model's rotary embeddings: one set, or one for each kind of layer."""
    parameters = settings.get("rope_parameters") or settings.get("rope_scaling")
    if not isinstance(parameters, dict):
        return []
    return [rotation for rotation in parameters.values() if isinstance(rotation, dict)] or [parameters]


def _positions_alike(rotation: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """How long rows may be while Transformers rotates all of them alike; None if that depends on no length.

    Some rotations change with the largest position of a forward pass, whichever row has it.
    """
    positions = settings.get("max_position_embeddings")
    match rotation.get("rope_type", rotation.get("type")):
        case "longrope" | "su":  # its first name
            name = "original_max_position_embeddings"
            return rotation.get(name) or settings.get(name) or positions
        case "dynamic":
            return positions
        case _:
            return None


def _check_heads(model: Path, devices: int) -> None:
    """Raises ConfigError if an engine cannot divide the model's attention heads among its devices.

    Every device gets equally many query heads. Key-value heads are divided too, or copied if there are fewer.
    """
    settings = read_json(model / "config.json")
    text_settings = settings.get("text_config", settings)
    heads, key_value_heads = (
        text_settings.get(name) if isinstance(text_settings, dict) else None
        for name in ("num_attention_heads", "num_key_value_heads")
    )
    key_value_heads = key_value_heads or heads
    if not isinstance(heads, int) or not isinstance(key_value_heads, int):
        return

    def divides(size: int) -> bool:
        return heads % size == 0 and (key_value_heads % size == 0 or size % key_value_heads == 0)

    if not divides(devices):
        fitting = ", ".join(str(size) for size in range(1, heads + 1) if divides(size))
        raise ConfigError(
            f"rollout.tensor_parallel={devices} does not divide the {heads} attention heads and {key_value_heads} "
            f"key-value heads of {model}",
            hint=f"set it to one of {fitting}",
        )


def _same_words(actor: Path, other: Path, setting: str) -> bool:
    """Whether both models use the same vocabulary. Compares embedding sizes if one has no tokenizer.json."""
    size = _vocabulary_size(other, setting)
    ours, theirs = _tokens(actor), _tokens(other)
    if ours is None or theirs is None:
        return size == _vocabulary_size(actor, "model.path")
    return ours == theirs and size >= len(ours)


def reads_tokens(config: WorkersConfig) -> bool:
    """Whether the reward model reads the policy's tokens without re-tokenizing the text."""
    settings = config.reward.model
    if settings.input is not None:
        return settings.input == "tokens"
    assert settings.path is not None
    return _same_words(config.model.directory, settings.path, "reward.model.path")


def _check_reward_model(config: WorkersConfig, path: Path) -> None:
    _vocabulary_size(path, "reward.model.path")
    settings = read_json(path / "config.json")
    kind, labels = (settings.get("architectures") or ["?"])[0], len(settings.get("id2label") or "01")
    if not kind.endswith("ForSequenceClassification") or labels != 1:
        raise DataError(
            f"reward.model.path={path}: {kind} with {labels} labels is not a reward model",
            hint="use a sequence classifier (…ForSequenceClassification) with one label; its logit is the score",
        )
    if config.reward.model.input == "tokens" and not _same_words(config.model.directory, path, "reward.model.path"):
        raise DataError(
            f"reward.model.path={path} has another vocabulary than model.path={config.model.directory}: it would "
            "misread the policy's tokens",
            hint="set reward.model.input=text",
        )


def load_tokenizer(settings: ModelConfig) -> Any:
    """The model's tokenizer, with `model.pad_token` if set. Raises DataError if it is missing or `check_tokenizer`
    fails."""
    from trainer.models.pretrained import read_tokenizer  # takes seconds

    model = settings.directory
    # Transformers creates an empty tokenizer for some model families.
    if not any((model / name).is_file() for name in _VOCABULARIES):
        raise DataError(
            f"{model}: no tokenizer: none of {', '.join(_VOCABULARIES)} exists",
            hint="copy the tokenizer's files from the model's source",
        )
    tokenizer = read_tokenizer(model)
    if settings.pad_token is not None:
        if settings.pad_token not in tokenizer.get_vocab():
            raise DataError(
                f"model.pad_token={settings.pad_token}: {model} has no such token", hint=_pad_hint(tokenizer)
            )
        tokenizer.pad_token = settings.pad_token
    check_tokenizer(tokenizer, model)
    return tokenizer


def decode(tokenizer: Any, rows: Sequence[Sequence[int]]) -> list[str]:
    """The text of each row without special tokens.

    `batch_decode` uses one core. This uses all cores if the tokenizer is a fast one without clean-up of spaces.
    """
    if not tokenizer.is_fast or tokenizer.clean_up_tokenization_spaces:
        return [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    parts = [rows[start : start + ROWS_AT_ONCE] for start in range(0, len(rows), ROWS_AT_ONCE)]
    with ThreadPoolExecutor() as threads:  # the images turn the tokenizer's own threads off, because they break forks
        decoded = threads.map(partial(tokenizer.backend_tokenizer.decode_batch, skip_special_tokens=True), parts)
        return [text for part in decoded for text in part]


def check_tokenizer(tokenizer: Any, model: Path) -> None:
    """Raises DataError if the tokenizer lacks an end or pad token, or has tokens that the model does not embed."""
    settings = read_json(model / "generation_config.json") if (model / "generation_config.json").is_file() else {}
    if tokenizer.eos_token_id is None and settings.get("eos_token_id") is None:
        raise DataError(
            f"{model}: the tokenizer has no end token, so responses would never end",
            hint="set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json",
        )
    if tokenizer.pad_token_id is None:
        raise DataError(
            f"{model}: the tokenizer has no pad token; users of the trained model need one for batches",
            hint=_pad_hint(tokenizer),
        )
    size = _vocabulary_size(model, "model.path")
    if len(tokenizer) > size:
        raise DataError(
            f"{model}: the tokenizer has {len(tokenizer)} tokens, the model embeds {size}",
            hint="use the tokenizer that the model was trained with, or resize the model's embeddings",
        )


def _pad_hint(tokenizer: Any) -> str:
    """A hint that suggests a pad token: one with `pad`, `reserved` or `unk` in its name, else the end token."""
    names = sorted(tokenizer.get_vocab(), key=lambda name: (len(name), name))
    fitting = [
        name for word in ("pad", "reserved", "unk") for name in names if name[0] in "<[" and word in name.lower()
    ]
    example = (fitting or [tokenizer.eos_token or "TOKEN"])[0]
    return f"set model.pad_token='{example}', or pad_token in tokenizer_config.json"


def _vocabulary_size(model: Path, setting: str) -> int:
    config = model / "config.json"
    if not config.is_file():
        raise DataError(f"{model}: no model: config.json is missing", hint=f"set {setting} to a model directory")
    settings = read_json(config)
    check_layers(config, settings)
    inner = settings.get("text_config")
    size = settings.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else None)
    if not isinstance(size, int):
        raise DataError(f"{config}: no vocab_size", hint=f"set {setting} to a Transformers causal language model")
    return size


def _tokens(model: Path) -> dict[str, int] | None:
    """The id of every token, or None if tokenizer.json is missing or has no vocabulary."""
    file = model / "tokenizer.json"
    if not file.is_file():
        return None
    content = read_json(file)
    vocabulary = content.get("model", {}).get("vocab")
    if not isinstance(vocabulary, dict):
        return None
    return vocabulary | {token["content"]: token["id"] for token in content.get("added_tokens", [])}


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read: {error}", hint="restore the file from the model's source") from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: not a JSON object", hint="restore the file from the model's source")
    return content


def _text(file: Path) -> str:
    """Raises OSError also for a pipe or a device, which might never end, and for a file that is too large."""
    if file.exists() and not file.is_file():
        raise OSError("not a regular file")
    if file.stat().st_size > _LARGEST:
        raise OSError(f"larger than {_LARGEST // 2**20} MiB")
    return file.read_text(encoding="utf-8")
