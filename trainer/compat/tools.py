"""Which tool a command belongs to, among those in `trainer/compat/importers/`."""

from trainer.compat.command_lines import Tool
from trainer.compat.scripts import Command
from trainer.rows import find_rows

TOOLS = find_rows("trainer.compat.importers", Tool)


def tool_of(command: Command) -> tuple[Tool, str] | None:
    """The tool that understands a command line, and the name of our command for it; None if none does."""
    for tool in TOOLS.values():
        ours = tool.starts(command.entry, command.arguments)
        if ours is not None:
            return tool, ours
    return None
