"""slime's command `train_async.py`: it samples the next batch while the models train."""

from trainer.compat.command_lines import Tool
from trainer.compat.importers.slime import DEFAULTS, RULES, is_slime
from trainer.compat.verl.rules import Given, Translation, Value, unsupported


def one_step_off(key: str, value: Value, _given: Given) -> Translation:
    if value != 1:
        raise unsupported(f"--{key}", value, ("1",))
    return Translation({"trainer.mode": "one_step_off"})


_RULES = {**RULES, "update_weights_interval": one_step_off}
ROW = Tool(
    name="slime (train_async.py)",
    starts=lambda entry, arguments: "train" if is_slime("train_async.py", entry, arguments) else None,
    defaults=lambda _command: DEFAULTS,
    rules=lambda _command: _RULES,
)
