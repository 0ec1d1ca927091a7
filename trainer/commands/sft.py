"""The command `sft`."""

from trainer.cluster.garbage import without_collections
from trainer.commands.options import ConfigName, ConfigPath, Files, Overrides, load_as
from trainer.commands.output import emit_result


def sft(
    overrides: Overrides = None,
    config: Files = None,
    config_name: ConfigName = None,
    config_path: ConfigPath = None,
) -> None:
    """Fine-tune `model.path` on responses or conversations; without it, make a small model as a warm start.

    Settings of the warm start have no section, like `train_files=FILE steps=200`.
    """
    from trainer.config.sft import SftConfig

    sections = {*SftConfig.model_fields, "optim", "engine", "checkpoint"}  # the last three are verl's
    named = [argument.lstrip("+~").partition("=")[0].partition(".")[0] for argument in overrides or []]
    if config or config_name or sections.intersection(named):
        settings = load_as(SftConfig, config, overrides, config_name, config_path)
        with without_collections():
            from trainer.records.pages.report import write_report
            from trainer.runs.offline.sft import fine_tune

        emit_result(write_report(fine_tune(settings)))
        return
    from trainer.config.overrides import parse_overrides
    from trainer.config.warm_start import WarmStartConfig
    from trainer.runs.offline.warm_start import make_warm_start

    emit_result(make_warm_start(parse_overrides(overrides or [], WarmStartConfig)).output)
