"""Who answers the policy in each conversation: the user's environment, tools, or nobody."""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config.custom_code import check_method, check_parameters
from trainer.config.tree import Config
from trainer.data.dataset import SINGLE_TURN, Dataset, Prompt, PromptDataset
from trainer.data.formats.tool_schema import OpenAIFunctionToolSchema
from trainer.data.formats.tools import ToolEntry, load_class, read_entries, read_yaml, schema_of_tool
from trainer.errors import ConfigError
from trainer.experience.call_format import CallFormat
from trainer.experience.conversations.tool_agent import ToolAgent, Toolbox, user_kwargs
from trainer.experience.environment import ConversationEnvironment, Program, environment_class
from trainer.experience.programs.host import Programs
from trainer.experience.tool import ToolRow
from trainer.experience.user import UserRow
from trainer.rows import find_rows

logger = logging.getLogger(__name__)

TOOL_AGENT = "tool_agent"  # verl's name for rows whose turns tools answer
PROGRAM = "program"
_BY_SETTING = {"auto": SINGLE_TURN, "single_turn": SINGLE_TURN, "tools": TOOL_AGENT, "program": PROGRAM}
_NO_VISION = ("verl.tools.image_zoom_in_tool.", "verl.tools.geo3k_tool.")
_NO_MCP = ("verl.tools.mcp_base_tool.", "verl.tools.mcp_search_tool.")
# The arguments of each method that is called: by position, by name.
_TOOL_CALLS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "create": ((), ("create_kwargs",)),
    "execute": (("instance_id", "parameters"), ("agent_data",)),
    "release": (("instance_id",), ()),
}
_USER_CALLS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "start_interaction": (("request_id",), ("name",)),
    "generate_response": (("request_id", "messages"), ("name",)),
    "finalize_interaction": (("request_id",), ()),
}


class Agents:
    """Opens the environment of each conversation. Raises ConfigError or DataError if one cannot be made."""

    def __init__(self, config: Config, tokenizer: Any, changed: threading.Event) -> None:
        """`changed` is set when a program asks."""
        custom = config.rollout.environment
        self._environment_class = environment_class(custom) if custom.path else None
        self._default = PROGRAM if custom.hub else _BY_SETTING[config.rollout.agent]
        self._toolbox = make_toolbox(config, tokenizer)
        programs = config.rollout.program.command or custom.hub
        self.programs = Programs(config, tokenizer, self._toolbox.format, changed) if programs else None

    @property
    def has_tools(self) -> bool:
        return bool(self._toolbox.tools)

    def answer(self, prompt: Prompt) -> bool:
        """Whether anybody answers the policy in conversations about this prompt."""
        return self._environment_class is not None or (prompt.agent_name or self._default) != SINGLE_TURN

    def open(self, prompt: Prompt, seed: int) -> ConversationEnvironment | Program:
        """The environment of a new conversation, or its program, which is not started yet."""
        if self.programs is not None and (prompt.agent_name or self._default) == PROGRAM:
            return self.programs.agent(prompt)
        environment = self._environment_class() if self._environment_class else ToolAgent(self._toolbox)
        environment.reset(prompt, seed)
        return environment


def check_agents(config: Config, dataset: Dataset) -> None:
    """Raises ConfigError if the environment cannot be loaded or called, if rows name an agent that does not exist, or
    if no row uses the tools; DataError if the first row names no user although there are some. A dataset of the user's
    own class is not checked."""
    if config.rollout.environment.given:
        if config.rollout.environment.path is not None:
            environment_class(config.rollout.environment)
        if config.rollout.interactions_file is not None:
            raise ConfigError(
                "rollout.environment and rollout.interactions_file both answer the policy", hint="leave out one of them"
            )
        return
    if not isinstance(dataset, PromptDataset):
        return
    default = _BY_SETTING[config.rollout.agent]
    names = {name or default for name in dataset.agent_names()}
    unknown = sorted(names - {SINGLE_TURN, TOOL_AGENT, default})
    if unknown:
        raise ConfigError(
            f"rows name the agent {unknown[0]!r} in the column agent_name",
            hint=f"agents: {SINGLE_TURN}, {TOOL_AGENT}; or set rollout.environment to a class of your own",
        )
    running = [entry for entry in read_entries(config.data) if entry.class_name is not None]
    if TOOL_AGENT not in names and (running or config.rollout.interactions_file is not None):
        raise ConfigError(
            "no row uses the tools of data.tools_file or the users of rollout.interactions_file",
            hint="set rollout.agent=tools, or write tool_agent into the rows' column agent_name",
        )
    if TOOL_AGENT in names and config.rollout.interactions_file is not None:
        user_kwargs(dataset[0], dict.fromkeys(_user_names(config)))


def make_toolbox(config: Config, tokenizer: Any) -> Toolbox:
    """The tools and users of the settings. Raises ConfigError or DataError."""
    entries = [] if config.rollout.environment.given else read_entries(config.data)
    if config.rollout.agent != "tools":  # a list of schemas may serve the template alone
        entries = [entry for entry in entries if entry.class_name is not None]
    tools = [make_tool(entry) for entry in entries]
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"data.tools_file={config.data.tools_file}: two tools are called {twice}", hint="rename one")
    users = _users(config)
    if config.rollout.agent == "tools" and not tools and not users:
        raise ConfigError("rollout.agent=tools without tools", hint="set data.tools_file, or rollout.interactions_file")
    for name, entry in zip(names, entries, strict=True):
        logger.info("tool %s: %s", name, entry.class_name)
    return Toolbox(
        dict(zip(names, tools, strict=True)),
        [schema_of_tool(tool) for tool in tools],
        users,
        find_rows("trainer.experience.formats", CallFormat)[config.rollout.tools.format],
        config.rollout.tools,
        config.rollout.max_turns,
        lambda token_ids: str(tokenizer.decode(token_ids)),
        config.rollout.environment_timeout,
    )


def make_tool(entry: ToolEntry) -> Any:
    """The tool of an entry: one of ours, or an object of the user's class. Raises ConfigError."""
    name = entry.class_name
    if name is None:
        raise ConfigError(
            f"{entry.where}: a tool without class_name cannot run", hint="write YAML: tools, each with a class_name"
        )
    for prefixes, missing in ((_NO_VISION, "there is no vision"), (_NO_MCP, "there is no MCP client")):
        if name.startswith(prefixes):
            raise ConfigError(f"{entry.where}: {name} is not supported here: {missing}", hint="remove the tool")
    rows = _by_name(find_rows("trainer.experience.tools", ToolRow))
    make = rows[name].tool if name in rows else load_class(entry.where, name)
    schema = None if entry.schema is None else OpenAIFunctionToolSchema.model_validate(entry.schema)
    try:
        tool = make(dict(entry.config), schema)
    except Exception as error:
        raise ConfigError(
            f"{entry.where}: {name} cannot be made: {type(error).__name__}: {error}",
            hint=getattr(error, "hint", "") or "check its config and tool_schema",
        ) from error
    for method, (positional, named) in _TOOL_CALLS.items():
        check_parameters(entry.where, check_method(entry.where, tool, method), named, positional)
    return tool


def _user_entries(config: Config) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, class and config of each user of `rollout.interactions_file`. Raises DataError or ConfigError."""
    file = config.rollout.interactions_file
    if file is None:
        return []
    where = f"rollout.interactions_file={file}"
    content = read_yaml(where, file)
    entries = content.get("interaction") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(e, dict) and e.get("class_name") for e in entries):
        raise ConfigError(
            f"{where}: interaction is not a list of entries", hint="an entry has name, class_name and config"
        )
    users = []
    for entry in entries:
        simple = entry["class_name"].rpartition(".")[2]
        name = entry.get("name") or simple.removesuffix("Interaction").lower() or simple.lower()
        users.append((name, entry["class_name"], {**(entry.get("config") or {}), "name": name}))
    return users


def _user_names(config: Config) -> list[str]:
    return [name for name, _, _ in _user_entries(config)]


def _users(config: Config) -> dict[str, Any]:
    rows = _by_name(find_rows("trainer.experience.users", UserRow))
    users = {}
    for name, class_name, settings in _user_entries(config):
        where = f"rollout.interactions_file={config.rollout.interactions_file}"
        make = rows[class_name].user if class_name in rows else load_class(where, class_name)
        if name in users:
            raise ConfigError(f"{where}: two users are called {name}", hint="give each a name of its own")
        users[name] = user = make(settings)
        for method, (positional, named) in _USER_CALLS.items():
            check_parameters(where, check_method(where, user, method), named, positional)
    return users


def _by_name(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Rows by their own name and by the names of verl's classes."""
    return {name: row for row in rows.values() for name in (row.name, *row.verl)}
