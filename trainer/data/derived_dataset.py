"""The base class of datasets that read their files themselves, under verl's name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.sections.data import DataConfig
from trainer.data.dataset import Prompt, PromptDataset
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
        rows = [_plain(self.dataframe[index]) for index in range(len(self.dataframe))]
        return PromptDataset([Path(name)], self.tokenizer, self.config, rows=rows)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]


def _plain(value: Any) -> Any:
    """The value with dictionaries, lists and numbers of Python's own, as files give them."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if hasattr(value, "tolist"):  # an array, or a number of NumPy's
        value = value.tolist()
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
