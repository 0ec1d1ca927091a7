"""Settings of prompts and responses."""

from typing import Literal, Self

from pydantic import Field, model_validator

from trainer.config.custom_code import CustomCode
from trainer.config.section import AbsolutePath, Arguments, DataPath, Section


class DataConfig(Section):
    train_files: list[DataPath] = Field(
        [],
        description="training prompts: Parquet, JSON Lines, folders saved by datasets, or a data set of the hub",
    )
    validation_files: list[DataPath] = Field(
        [], description="held-out prompts; of the hub the split `test`, else `validation`"
    )
    train_max_samples: int = Field(
        -1, description="rows of the training files to use, drawn at random with shuffle, else the first; -1: all"
    )
    validation_max_samples: int = Field(-1, description="the same for the held-out files")
    train_batch_size: int = Field(64, gt=0, description="prompts per step")
    max_prompt_length: int = Field(
        64, gt=0, description="maximum tokens per prompt; see overlong_prompts for longer ones"
    )
    overlong_prompts: Literal["error", "filter", "truncate_left", "truncate_right"] = Field(
        "error",
        description="what to do with longer prompts. error: refuse; filter: drop; truncate_left, truncate_right: cut "
        "that side",
    )
    max_response_length: int = Field(16, gt=0, description="maximum tokens per response")
    prompt_key: str = Field(
        "prompt", description="column with the prompt: messages, or the text of one message of the user"
    )
    chat_template: str | None = Field(
        None, description="chat template in place of the model's: Jinja text, or a file that holds it"
    )
    chat_template_kwargs: Arguments = Field(
        {}, description="arguments for the chat template, like {enable_thinking: false}"
    )
    system_prompt: str | None = Field(None, description="system message for prompts that start without one")
    tools_file: AbsolutePath | None = Field(
        None,
        description="file with the tools for the chat template: a JSON list, or YAML with the classes that run them; a "
        "row's own column `tools` replaces it",
    )
    shuffle: bool = Field(True, description="shuffle the prompts in each epoch")
    drop_last: bool = Field(
        False,
        description="leave out what does not fill a batch at the end of each epoch, as verl does; false: a batch may "
        "span two epochs, so that every prompt is drawn once in each",
    )
    cache_dir: AbsolutePath | None = Field(
        None, description="directory that caches tokenised prompts between runs, like /dev/shm/slipway; null: no cache"
    )
    custom_cls: CustomCode = Field(
        CustomCode(), description="your own dataset class: (files, tokenizer, data settings) -> prompts"
    )

    def batches(self, rows: int, epochs: int) -> int:
        """Whole batches in so many epochs, at least one."""
        size = self.train_batch_size
        return max(1, epochs * (rows // size) if self.drop_last else epochs * rows // size)

    @model_validator(mode="after")
    def _your_own_class_chooses_its_rows(self) -> Self:
        if self.custom_cls.path is not None and max(self.train_max_samples, self.validation_max_samples) > 0:
            raise ValueError("data.custom_cls reads the files itself: limit the rows there, not with max_samples")
        return self
