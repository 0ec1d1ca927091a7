"""The data sources of a run and the rules that score them, checked before training."""

from collections.abc import Mapping
from pathlib import Path

from trainer.config.sections.reward import RewardConfig
from trainer.config.tree import Config
from trainer.errors import ConfigError
from trainer.rewards.function import SOURCES_HINT
from trainer.rewards.processes.pool import RewardPool
from trainer.rows import RewardRule

Counts = Mapping[tuple[Path, str], int]
"""Prompts by file and data source."""


def check_sources(config: Config, counts: Counts) -> list[str]:
    """Notes of the rules that the run needs. Raises ConfigError if a rule or the user's function cannot work, or if
    nothing scores a data source: no rule knows it, and no environment or program may score its conversations."""
    reward = config.reward
    if reward.custom_function.given:
        with RewardPool(reward, 1) as pool:
            pool.check()
        return []
    if reward.server.url is not None:
        return []
    needed: dict[str, RewardRule] = {rule.name: rule for _, source in counts if (rule := reward.rule_for(source))}
    checked = [
        f"reward rule {rule.name}: {rule.check(**rule.values(reward))}" for rule in needed.values() if rule.check
    ]
    notes = [note for note in checked if not note.endswith(": ")]
    unknown = [place for place in counts if not has_scorer(reward, place[1])]
    if not unknown:
        return notes
    listed = "; ".join(f"{file}: {source!r} ({counts[file, source]} prompts)" for file, source in unknown)
    problem = f"no reward rule knows these data sources: {listed}"
    if not may_score_itself(config):
        raise ConfigError(problem, hint=SOURCES_HINT)
    return [
        *notes,
        f"{problem}: a conversation that ends without a score of its own, like one cut at data.max_response_length, "
        f"scores {reward.failure_score or 0:g}",
    ]


def may_score_itself(config: Config) -> bool:
    """Whether an environment or a program may score conversations."""
    return config.rollout.environment.given or config.rollout.uses_endpoint


def has_scorer(reward: RewardConfig, source: str) -> bool:
    """Whether a rule, the user's own function or server, or a reward model alone scores responses of a source."""
    custom = reward.custom_function.given or reward.server.url is not None
    return custom or reward.weight == 0 or reward.rule_for(source) is not None


def source_lines(config: Config, counts: Counts) -> list[str]:
    """A line per file and data source, largest first: its prompts, and the rule that scores them."""
    function = config.reward.custom_function
    scorer = config.reward.server.url
    if function.path is not None:
        scorer = f"{function.path.name}:{function.name or 'compute_score'}"
    elif function.given:
        scorer = "a function of Python"
    lines = []
    for (file, source), count in sorted(counts.items(), key=lambda item: -item[1]):
        rule = config.reward.rule_for(source)
        lines.append(f"{file}: {count} prompts of {source!r}, scored by {scorer or (rule.name if rule else 'no rule')}")
    return lines
