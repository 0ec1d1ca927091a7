"""The data sources of a run and the rules that score them, checked before training."""

from collections.abc import Mapping
from pathlib import Path

from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.rewards.function import SOURCES_HINT
from trainer.rows import RewardRule

Counts = Mapping[tuple[Path, str], int]
"""Prompts by file and data source."""


def check_sources(config: Config, counts: Counts) -> list[str]:
    """Notes of the rules that the run needs. Raises ConfigError if no rule knows a data source, or a rule cannot work.

    The user's own function or server knows every source. An environment or a program may score conversations itself.
    """
    reward = config.reward
    others = (reward.custom_function.path, reward.server.url, config.rollout.environment.path)
    if any(other is not None for other in others) or config.rollout.agent == "program":
        return []
    rules = {place: reward.rule_for(place[1]) for place in counts}
    unknown = [place for place, rule in rules.items() if rule is None]
    if unknown and reward.weight != 0:
        listed = "; ".join(f"{file}: {source!r} ({counts[file, source]} prompts)" for file, source in unknown)
        raise ConfigError(f"no reward rule knows these data sources: {listed}", hint=SOURCES_HINT)
    needed: dict[str, RewardRule] = {rule.name: rule for rule in rules.values() if rule is not None}
    notes = [f"reward rule {rule.name}: {rule.check()}" for rule in needed.values() if rule.check]
    return [note for note in notes if not note.endswith(": ")]


def source_lines(config: Config, counts: Counts) -> list[str]:
    """A line per file and data source, largest first: its prompts, and the rule that scores them."""
    function = config.reward.custom_function
    own = config.reward.server.url
    if function.path is not None:
        own = f"{function.path.name}:{function.name or 'compute_score'}"
    lines = []
    for (file, source), count in sorted(counts.items(), key=lambda item: -item[1]):
        rule = config.reward.rule_for(source)
        lines.append(f"{file}: {count} prompts of {source!r}, scored by {own or (rule.name if rule else 'no rule')}")
    return lines
