"""The command `plan`."""

from typing import Annotated

import typer

from trainer.commands.options import ConfigName, ConfigPath, Files, Overrides, load
from trainer.commands.output import emit


def plan(
    overrides: Overrides = None,
    config: Files = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; trainer.nnodes or 1 if not given.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs of a node; trainer.n_gpus_per_node or those here if not given.")
    ] = None,
    gpu_gib: Annotated[
        float | None, typer.Option(min=0, help="GiB of memory of a GPU, like 80; that of the GPUs here if not given.")
    ] = None,
    node_gib: Annotated[
        float | None, typer.Option(min=0, help="GiB of memory of a node; unknown if a machine is described without it.")
    ] = None,
    config_name: ConfigName = None,
    config_path: ConfigPath = None,
) -> None:
    """Show which role would run where, the settings that would be chosen and why, and the memory. Starts nothing."""
    settings = load(config, overrides, config_name, config_path)
    from trainer.planning.machine import plan_without_cluster

    for line in plan_without_cluster(settings, nodes, gpus, gpu_gib, node_gib).lines():
        emit(line)
