"""The command `train`."""

from trainer.cluster.garbage import without_collections
from trainer.commands.options import ConfigName, ConfigPath, Files, Overrides, load
from trainer.commands.output import emit_result


def train(
    overrides: Overrides = None,
    config: Files = None,
    config_name: ConfigName = None,
    config_path: ConfigPath = None,
) -> None:
    """Train a policy with PPO, GRPO, RLOO, REINFORCE++ or ReMax."""
    settings = load(config, overrides, config_name, config_path)
    with without_collections():
        from trainer.records.pages.report import write_report
        from trainer.runs.ppo import train as run

    emit_result(write_report(run(settings)))
