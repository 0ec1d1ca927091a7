"""The schema of a tool in OpenAI's format, under verl's names. A chat template sees the fields in this order."""

from typing import Any

from pydantic import BaseModel, Field


class OpenAIFunctionPropertySchema(BaseModel):
    """A parameter of a tool. Templates do not see other fields than these."""

    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The parameters of a tool."""

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """The function that a tool is."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=lambda: OpenAIFunctionParametersSchema(type="object", properties={})
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool."""

    type: str
    function: OpenAIFunctionSchema
