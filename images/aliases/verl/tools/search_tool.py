"""The tool that searches."""

from trainer.experience.tools.search import Search as SearchTool

__all__ = ["SearchTool"]
