"""The command `kto`."""

from trainer.cluster.garbage import without_collections
from trainer.commands.options import Files, Overrides
from trainer.commands.output import emit_result


def kto(overrides: Overrides = None, config: Files = None) -> None:
    """Train with KTO on responses that are labelled desirable or undesirable."""
    with without_collections():
        from trainer.config.kto import KtoConfig
        from trainer.config.overrides import parse_overrides
        from trainer.records.pages.report import write_report
        from trainer.runs.offline.kto import train_on_labels

    emit_result(write_report(train_on_labels(parse_overrides(overrides or [], KtoConfig, config or []))))
