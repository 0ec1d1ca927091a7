"""The devices of each role, like `node0:0,1;node1:0,1`. Without a node, devices are those of node0."""

import re

from pydantic import Field, field_validator

from trainer.config.section import Section

_PART = re.compile(r"(?:node(\d+):)?(\d+(?:,\d+)*)")


def parse_devices(text: str) -> list[tuple[int, int]]:
    """(node, device) of each rank, in the order written. Raises ValueError for bad syntax or a repeated device."""
    devices = []
    for part in text.replace(" ", "").split(";"):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"{text!r} is not a list of devices: write node0:0,1;node1:0,1")
        devices += [(int(match[1] or 0), int(device)) for device in match[2].split(",")]
    if len(set(devices)) < len(devices):
        raise ValueError(f"{text!r} names a device twice")
    return devices


class DeviceMappingConfig(Section):
    """The devices of each role, like node0:0,1;node1:0,1; all devices when not given.

    A node without GPUs has one device, 0.
    """

    actor: str | None = Field(None, description="devices of the actor; its weights are sharded over them")
    critic: str | None = Field(None, description="devices of the critic")
    reference: str | None = Field(None, description="devices of the reference")
    teacher: str | None = Field(None, description="devices of the teacher, for distillation")
    rollout: str | None = Field(None, description="devices of the rollout engines")
    reward: str | None = Field(None, description="devices of the reward model; rules run on CPU")

    @field_validator("*")
    @classmethod
    def _is_a_list_of_devices(cls, text: str | None) -> str | None:
        if text is not None:
            parse_devices(text)
        return text
