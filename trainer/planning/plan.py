"""The plan of a run: which role runs where, the settings that were chosen, and the memory that all this takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.cluster.nodes import Slot
from trainer.config.tree import WorkersConfig
from trainer.planning.choices import Choice, with_choices
from trainer.planning.memory import (
    Share,
    alternatives,
    check_fit,
    copies_gib,
    model_of,
    offloaded_gib,
    shares,
    table,
    tight,
)
from trainer.planning.model_size import ModelSize
from trainer.planning.placement import Placement, engine_slots, place_roles


@dataclass(frozen=True)
class Plan:
    """`config` has a value for every choice."""

    config: WorkersConfig
    placement: Placement
    choices: Sequence[Choice]
    shares: Sequence[Share]

    def lines(self) -> Iterator[str]:
        """The plan as text: choices, the table of memory, and a warning where memory may be short."""
        yield from self._mixtures()
        for choice in self.choices:
            yield f"chosen: {choice}"
        silent = [share.slot.node.address for share in self.shares if share.slot.node.device_gib is None]
        if silent and self.shares[0].slot.device == "cuda":
            yield f"nothing is chosen from the GPUs' memory, which {silent[0]} does not tell"
        yield from table(self.shares)
        if (gib := copies_gib(self.config, self.placement)) > 0:
            yield f"copies in the memory of each node: {gib:.2f} GiB, while they are renewed {3 * gib:.2f} GiB"
        for node, gib in offloaded_gib(self.config, self.placement).items():
            has = f"of {node.node_gib:.1f} GiB" if node.node_gib is not None else "GiB; how much it has is unknown"
            yield f"offloaded to the memory of {node.address}: {gib:.1f} {has}"
            if node.node_gib is not None and gib > node.node_gib:
                yield f"warning: {node.address} lacks {gib - node.node_gib:.1f} GiB: offload less, or use more nodes"
        if warning := tight(self.shares):
            yield f"warning: {warning}"

    def _mixtures(self) -> Iterator[str]:
        """A line for each mixture of experts: its parameters, and those that compute a token."""
        models = {role: model_of(self.config, role) for role in self.placement if role not in ("rollout", "reward")}
        for model in dict.fromkeys(models.values()):
            size = ModelSize.read(model)
            if size is not None and size.experts is not None:
                roles = ", ".join(role for role, its in models.items() if its == model)
                yield (
                    f"{roles}: {size.parameters / 1e9:.2f} billion parameters, {size.active / 1e9:.2f} active: "
                    f"{size.experts.chosen} of {size.experts.number} experts in {size.experts.layers} of {size.layers} "
                    "layers"
                )


def plan_of(config: WorkersConfig, slots: Sequence[Slot], roles: Sequence[str]) -> Plan:
    """The plan for these slots. Raises ConfigError if batches or models do not fit."""
    placement = place_roles(config, slots, roles)
    config.check_ranks({role: len(slots) for role, slots in placement.items()})
    if "rollout" in placement:
        engine_slots(config, placement["rollout"])
    config, choices = with_choices(config, placement)
    needed = shares(config, placement)
    check_fit(needed, alternatives(config, placement))
    return Plan(config, placement, choices, needed)
