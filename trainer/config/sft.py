"""Settings of supervised fine-tuning."""

from pydantic import Field

from trainer.config.section import Section


class SftSettings(Section):
    messages_key: str | None = Field(
        None,
        description="column with conversations, of which every message of the assistant is learned; null: "
        "data.prompt_key and sft.response_key",
    )
    response_key: str = Field(
        "completion",
        description="column with the response to the prompt: text, or messages of which the last one counts. A dot "
        "enters a mapping, like extra_info.answer; so it does in data.prompt_key",
    )
    max_length: int = Field(1024, gt=1, description="maximum tokens per row; see data.overlong_prompts for longer ones")
