"""Data sets of the hub that `data.train_files` and `data.validation_files` name, as local files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from trainer.config.section import is_hub_name
from trainer.config.tree import Config, WorkersConfig
from trainer.data.published.origins import SUFFIXES, Hub, split_files
from trainer.data.published.table import DATASETS, TEST, TRAIN, PublishedDataset
from trainer.data.published.writing import write_dataset
from trainer.errors import DataError
from trainer.hub import download

C = TypeVar("C", bound=WorkersConfig)

# The splits of a data set that a setting reads, the first that exists.
_SPLITS = {"train_files": (TRAIN,), "validation_files": (TEST, "validation")}


def with_local_data(config: C) -> C:
    """The settings with data sets of the hub, such as `openai/gsm8k`, replaced by local files.

    A run that samples gets the rows that `trainer data` makes of the data sets that it knows; any other data set is
    read as it is. A dataset class of the user gets the names. Raises DataError if one cannot be downloaded, or has no
    file of the split.
    """
    if config.data.custom_cls.path is not None:
        return config
    converts = isinstance(config, Config)
    updates = {
        setting: [file for path in getattr(config.data, setting) for file in _local(path, setting, converts)]
        for setting in _SPLITS
    }
    return config.model_copy(update={"data": config.data.model_copy(update=updates)})


def _local(path: Path, setting: str, converts: bool) -> Sequence[Path]:
    if not is_hub_name(path):
        return [path]
    split = _SPLITS[setting][0]
    known = (dataset for dataset in DATASETS.values() if dataset.splits[split].hub == str(path))
    if converts and (dataset := next(known, None)):
        return [_converted(dataset, split)]
    return _downloaded(path, setting)


def _converted(dataset: PublishedDataset, split: str) -> Path:
    """The file of a split's rows, beside the hub's cache, which has its columns."""
    from huggingface_hub.constants import HF_HOME

    directory = Path(HF_HOME).absolute() / "slipway" / dataset.name
    (file,) = write_dataset(replace(dataset, splits={split: dataset.splits[split]}), Hub(), directory)
    return file


def _downloaded(path: Path, setting: str) -> Sequence[Path]:
    """The files of a data set's split."""
    where = f"data.{setting}={path}:"
    splits = _SPLITS[setting]
    patterns = [f"*{split}*{suffix}" for split in splits for suffix in SUFFIXES]
    folder = download(str(path), "data set", patterns, f"{where} no such file, and", "name a file that is there")
    for split in splits:
        places = split_files(folder, split, f"data/{split}-*")
        if len(places) > 1:
            named = " or ".join(f"data.{setting}=[{','.join(map(str, files))}]" for files in places.values())
            raise DataError(f"{where} {split} files in several folders", hint=f"name one of them: {named}")
        for files in places.values():
            return files
    raise DataError(
        f"{where} the data set has no {' or '.join(splits)} split in Parquet or JSON Lines",
        hint="download the file that you mean, and name it",
    )
