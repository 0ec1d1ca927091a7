"""The tool that checks answers to GSM8K."""

from trainer.experience.tools.gsm8k import AnswerCheck as Gsm8kTool

__all__ = ["Gsm8kTool"]
