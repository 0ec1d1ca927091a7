"""The base class of datasets that read their files themselves, under verl's name."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config.sections.data import DataConfig
from trainer.data.dataset import Prompt, PromptDataset
from trainer.data.formats.schema import write_table
from trainer.errors import DataError


class RLHFDataset:
    """Prompts of a class of the user, which `data.custom_cls` names.

    A subclass overrides `_read_files_and_tokenize`. It reads `self.data_files` into `self.dataframe`: anything with a
    length whose items are rows with the columns of a prompt file. Raises DataError like `PromptDataset`.
    """

    def __init__(
        self, data_files: str | Path | Sequence[str | Path], tokenizer: Any, config: DataConfig, processor: None = None
    ) -> None:
        files = [data_files] if isinstance(data_files, str | Path) else data_files
        self.data_files = [str(file) for file in files]
        self.tokenizer, self.config, self.processor = tokenizer, config, processor
        self.prompt_key, self.max_prompt_length = config.prompt_key, config.max_prompt_length
        self.dataframe: Any = None
        self._read_files_and_tokenize()
        overridden = type(self)._read_files_and_tokenize is not RLHFDataset._read_files_and_tokenize
        paths = [Path(file) for file in self.data_files]
        self._prompts = self._prompts_of_rows() if overridden else PromptDataset(paths, tokenizer, config)

    def _read_files_and_tokenize(self) -> None:
        """Sets `self.dataframe`. The default reads the files as they are."""

    def _prompts_of_rows(self) -> PromptDataset:
        name = type(self).__name__
        if self.dataframe is None:
            raise DataError(
                f"{name}._read_files_and_tokenize sets no self.dataframe",
                hint="read self.data_files into self.dataframe, a sequence of rows",
            )
        rows = [dict(self.dataframe[index]) for index in range(len(self.dataframe))]
        wanted = ("data_source", self.prompt_key, "reward_model", "extra_info", "tools", "agent_name")
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory, f"{name}.parquet")
            write_table([{column: row[column] for column in wanted if column in row} for row in rows], file)
            return PromptDataset([file], self.tokenizer, self.config.model_copy(update={"cache_dir": None}))

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]
