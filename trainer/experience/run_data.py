"""The data of a run, read and checked before anything starts."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from trainer.config.sections.data import DataConfig
from trainer.config.tree import Config
from trainer.data.dataset import Dataset, PromptDataset, PromptSampler, check_files, open_dataset
from trainer.data.formats.chat_template import use_chat_template
from trainer.data.subset import Subset
from trainer.experience.conversations.agents import check_agents
from trainer.models.files import load_tokenizer
from trainer.rewards.sources import check_sources, source_lines

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunData:
    """The tokenizer and data of a run: prompts to train on, held-out prompts, and the order of the former."""

    tokenizer: Any
    training: Dataset
    validation: Dataset
    sampler: PromptSampler

    @classmethod
    def load(cls, config: Config) -> Self:
        """Reads the files of `data`.

        Raises DataError if one is missing or does not fit, ConfigError if no reward rule knows a data source.
        """
        data = config.data
        tokenizer = use_chat_template(load_tokenizer(config.model), data)
        seed = config.trainer.seed
        if data.custom_cls.path is None:  # such a class may need no files
            check_files(data, ["train_files", "validation_files"])
        training = open_dataset(data.train_files, tokenizer, data, Subset.of_training(data, seed))
        validation = open_dataset(data.validation_files, tokenizer, data, Subset.of_validation(data, seed))
        counts = _sources(training, validation, data)
        for line in [*source_lines(config, counts), *check_sources(config, counts)]:
            logger.info("%s", line)
        for dataset in (training, validation):
            check_agents(config, dataset)
        sampler = PromptSampler.of(data, config.trainer, len(training))
        return cls(tokenizer, training, validation, sampler)

    def steps(self, config: Config) -> int:
        """Steps of the run."""
        return config.steps(len(self.training))

    def planned_steps(self, config: Config) -> int:
        """Steps that schedules span."""
        return config.planned_steps(len(self.training))


def _sources(training: Dataset, validation: Dataset, settings: DataConfig) -> Mapping[tuple[Path, str], int]:
    """Prompts by file and data source; the file of the user's own dataset is that of its code."""
    if isinstance(training, PromptDataset) and isinstance(validation, PromptDataset):
        return {**training.count_sources(), **validation.count_sources()}
    code = settings.custom_cls.path
    assert code is not None
    return Counter(
        (code, dataset[index].data_source) for dataset in (training, validation) for index in range(len(dataset))
    )
