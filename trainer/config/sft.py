"""Settings of supervised fine-tuning."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from trainer.config.offline import OfflineConfig
from trainer.config.section import Section


class SftSettings(Section):
    messages_key: str | None = Field(
        None,
        description="column with conversations, of which every message of the assistant is learned; null: "
        "data.prompt_key and sft.response_key",
    )
    response_key: str = Field(
        "completion",
        description="column with the response to the prompt: text, or messages of which those of the assistant are "
        "learned. A dot enters a mapping, like extra_info.answer; so it does in data.prompt_key",
    )
    max_length: int = Field(1024, gt=1, description="maximum tokens per row; see data.overlong_prompts for longer ones")


class SftConfig(OfflineConfig):
    """Settings of fine-tuning: `data.train_batch_size` counts rows; of `actor.*` what concerns optimizer and memory."""

    method = "fine-tuning"
    fixed_actor: ClassVar[Mapping[str, Any]] = {
        **OfflineConfig.fixed_actor,
        "policy_loss": "gpg",
        "loss_aggregation": "token-mean",
    }
    compares = False
    command = "sft"
    sft: SftSettings = SftSettings()

    @model_validator(mode="after")
    def _every_column_and_limit_is_read(self) -> Self:
        if self.sft.messages_key is not None:
            unread = {"data.prompt_key": self.data.model_fields_set, "sft.response_key": self.sft.model_fields_set}
            for key, given in unread.items():
                if key.partition(".")[2] in given:
                    raise ValueError(
                        f"{key} has no effect with sft.messages_key={self.sft.messages_key}: leave one out"
                    )
        for name in ("max_prompt_length", "max_response_length"):
            if name in self.data.model_fields_set:
                raise ValueError(f"data.{name} has no effect on fine-tuning: set sft.max_length, which limits a row")
        return self

    @property
    def row_tokens(self) -> tuple[int, int]:
        return 1, self.sft.max_length - 1  # all but the first token may be learned

    @property
    def row_limit(self) -> str:
        return f"sft.max_length={self.sft.max_length}"
