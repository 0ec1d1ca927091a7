"""The base class of tools."""

from trainer.data.formats.tool_schema import OpenAIFunctionToolSchema
from trainer.experience.tool import Tool as BaseTool
from trainer.experience.tool import ToolResponse

__all__ = ["BaseTool", "OpenAIFunctionToolSchema", "ToolResponse"]
