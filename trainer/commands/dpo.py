"""The command `dpo`."""

from trainer.cluster.garbage import without_collections
from trainer.commands.options import Files, Overrides
from trainer.commands.output import emit_result


def dpo(overrides: Overrides = None, config: Files = None) -> None:
    """Train on preference pairs with DPO."""
    with without_collections():
        from trainer.config.dpo import DpoConfig
        from trainer.config.overrides import parse_overrides
        from trainer.records.pages.report import write_report
        from trainer.runs.offline.dpo import train_on_preferences

    emit_result(write_report(train_on_preferences(parse_overrides(overrides or [], DpoConfig, config or []))))
