"""Exports the trained policy as a model directory for Transformers and vLLM."""

import json
import shutil
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from trainer.errors import DataError
from trainer.models.names_in_files import as_in_files, views_in_files
from trainer.models.pretrained import empty_language_model, read_tokenizer
from trainer.records.files.disk import writing

# Copied as they are: Transformers refuses to write some generation defaults that it reads, and the processors of models
# with images are not loaded.
_COPIED = (
    "generation_config.json",
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", "chat_template.json"),
)
FILE_BYTES = 5 * 10**9


def write_language_model(
    source: Path,
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    directory: Path,
    file_bytes: int = FILE_BYTES,
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Writes `weights` with the configuration, generation defaults, tokenizer and processors of the model at `source`.

    `weights` include the buffers that belong to the model's files; these keep their type. Weights above `file_bytes` in
    total are several safetensors files with an index. Each of several ranks calls it with the same weights and writes
    its share of these files; the first writes all others. If weights come in the model's order, a rank holds one file
    in memory. Raises CheckpointError if the disk refuses them, DataError if weights are missing.
    """
    model = empty_language_model(source, dtype)
    buffers, stored = dict(model.named_buffers()), _stored(model)
    views = views_in_files(model, {name: tensor.shape for name, tensor in stored.items()})
    given = ((name, tensor) for name, tensor in weights if name in stored)
    with writing(directory, sum(tensor.nbytes for tensor in stored.values())):
        directory.mkdir(parents=True, exist_ok=True)
        if views is None:
            _write_whole(model, given, dtype, directory, file_bytes, rank)
        else:
            files = _plan(dict(as_in_files(stored.items(), views)), file_bytes)
            kept = {view.name for name in buffers.keys() & views.keys() for view in views[name]}
            _write_files(directory, dict(list(files.items())[rank::ranks]), as_in_files(given, views), dtype, kept)
            if rank == 0 and len(files) > 1:
                _write_index(directory, files, int(model.num_parameters()))
        if rank == 0:
            _write_others(source, model, dtype, directory)


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """The weights and buffers of a model's files by Transformers' names, a tied weight once."""
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    names -= set(model._keys_to_ignore_on_save or ())
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}


def _plan(tensors: Mapping[str, Tensor], file_bytes: int) -> dict[str, dict[str, int]]:
    """The names and bytes of the tensors in each file, in order."""
    files: list[dict[str, int]] = [{}]
    for name, tensor in tensors.items():
        if files[-1] and sum(files[-1].values()) + tensor.nbytes > file_bytes:
            files.append({})
        files[-1][name] = tensor.nbytes
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{place:05}-of-{len(files):05}.safetensors": held for place, held in enumerate(files, start=1)}


def _write_files(
    directory: Path,
    files: Mapping[str, Collection[str]],
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    kept: Collection[str],
) -> None:
    """Writes each file once all of its tensors have come, in `dtype` except those that are `kept`."""
    file_of = {name: file for file, names in files.items() for name in names}
    held: dict[str, dict[str, Tensor]] = {file: {} for file in files}
    for name, tensor in weights:
        if (file := file_of.get(name)) is None:
            continue
        copied = tensor.detach().to("cpu", tensor.dtype if name in kept else dtype, copy=True)
        held[file][name] = copied.contiguous()
        if len(held[file]) == len(files[file]):
            save_file(held.pop(file), directory / file, {"format": "pt"})
    if held:
        missing = next(name for file, tensors in held.items() for name in files[file] if name not in tensors)
        raise DataError(f"{directory}: the weight {missing} is missing", hint="report this with the model's family")


def _write_index(directory: Path, files: Mapping[str, Mapping[str, int]], parameters: int) -> None:
    total = sum(sum(held.values()) for held in files.values())
    places = {name: file for file, held in files.items() for name in held}
    index = {"metadata": {"total_parameters": parameters, "total_size": total}, "weight_map": places}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _write_whole(
    model: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    directory: Path,
    file_bytes: int,
    rank: int,
) -> None:
    """Holds and writes all weights on the first rank, for families whose files Transformers computes from them."""
    if rank:
        deque(weights, maxlen=0)
        return
    buffers = dict(model.named_buffers())
    state = {name: tensor.to("cpu", tensor.dtype if name in buffers else dtype) for name, tensor in weights}
    model.load_state_dict(state, assign=True, strict=False)
    model.tie_weights()
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(directory, max_shard_size=file_bytes)


def _write_others(source: Path, model: nn.Module, dtype: torch.dtype, directory: Path) -> None:
    model.config.architectures, model.config.dtype = [type(model).__name__], str(dtype).removeprefix("torch.")
    model.config.save_pretrained(directory)
    GenerationConfig.from_model_config(model.config).save_pretrained(directory)
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    read_tokenizer(source).save_pretrained(directory)
