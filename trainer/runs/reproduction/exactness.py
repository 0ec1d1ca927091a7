"""Which runs repeat to the bit, and which may not."""

from collections.abc import Iterator

from trainer.config.custom_code import code_lines
from trainer.config.tree import Config, RunConfig
from trainer.runs.reproduction.certificate import Hardware


def obstacles(settings: RunConfig) -> Iterator[str]:
    """Each reason why a run of these settings has other weights each time."""
    if settings.trainer.mode == "asynchronous":
        yield "trainer.mode=asynchronous: the timing of engines and learner decides which weights sample a token"


def reservations(settings: RunConfig, hardware: Hardware | None) -> Iterator[str]:
    """Each reason why a run of these settings may have other weights, although nothing differs."""
    names = {device for devices in (hardware.devices if hardware else {}).values() for device in devices}
    if any("threads" not in name for name in names) and not settings.trainer.deterministic:
        yield (
            "kernels on GPUs may add numbers in another order: differences by rounding are possible without "
            "trainer.deterministic"
        )
    for line in code_lines(settings):
        yield f"{line}: the same weights need the same answers of it"
    if isinstance(settings, Config):
        yield from _order_of_answers(settings)


def _order_of_answers(settings: Config) -> Iterator[str]:
    rollout, together = settings.rollout, settings.trainer.deterministic
    found = None
    if rollout.agent == "program":
        found = "rollout.agent=program"
    elif rollout.agent == "tools" and not together:
        found = "rollout.agent=tools without trainer.deterministic"
    elif rollout.environment.path is not None and not together:
        found = "rollout.environment without trainer.deterministic"
    if found:
        yield f"{found}: the order in which conversations are answered decides what an engine computes together"
