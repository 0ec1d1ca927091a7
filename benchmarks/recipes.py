"""How many of verl's published scripts this trainer accepts, and why it refuses the others. Needs no GPU and no model.

python -m benchmarks.recipes CHECKOUT... > benchmarks/measured/verl_scripts.md   checkouts or bare mirrors of verl
python -m benchmarks.recipes --list plain CHECKOUT...          each refused script of a kind, with its reasons
python -m benchmarks.recipes --defaults CONFIG.yaml... > trainer/compat/verl/defaults.json

`benchmarks.recipe_commands` expands the scripts; their settings go through the checks of `trainer config`.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from benchmarks.recipe_commands import Command, ScriptEndedError, UnsetVariableError, training_commands
from trainer.compat.settings import hydra_files, load_config
from trainer.config.hydra import flattened
from trainer.config.sections.device_mapping import parse_devices
from trainer.config.sft import SftConfig
from trainer.config.tree import Config
from trainer.errors import ConfigError, UnusableSettingsError
from trainer.main_ppo import command_of, preset_of

PLAIN = "FSDP, vLLM, text"
# The first kind whose pattern is found in a command's words, or in the script's path, counts.
KINDS = {
    "NPU": r"npu|ascend|mindspeed",
    "fine-tuning": r"^\S*sft_trainer",
    "other entry point": r"^(?!(\S+ )?(verl|trainer)\.trainer\.main_(ppo|fastrl)\b)",
    "Megatron": r"strategy=(megatron|mlite)|model_engine=(?!dp|fsdp)|megatron_trainer|torchtitan|veomni|actor\.engine",
    "SGLang or TensorRT-LLM": r"rollout\.name=(?!vllm|hf)\w+",
    "vision": r"image_key=(?!images? )\w+|geo3k|vl[-_]|-VL-|_vl|video|limit_images|omni|freeze_vision|pokemon",
    PLAIN: "",
}


@dataclass
class Outcome:
    """What the check says about one command."""

    script: str
    kind: str
    notes: list[str] = field(default_factory=list)
    problems: list[ConfigError] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return "refused" if self.problems else "with a note" if self.notes else "accepted"


def commands_of(checkout: Path) -> Iterator[tuple[Path, Command]]:
    """Each training command of the scripts in a checkout. A variable that nobody sets is 1."""
    for path in sorted([*checkout.rglob("*.sh"), *checkout.rglob("*.slurm")]):
        variables = {"SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_PER_NODE": "8"}
        name = str(path.relative_to(checkout))
        text = path.read_text(encoding="utf-8", errors="replace")
        while True:
            try:
                trainings = training_commands(text, variables, checkout, name)
            except UnsetVariableError as stop:
                if stop.name in variables:
                    break
                variables[stop.name] = "1"
                continue
            except ScriptEndedError:
                trainings = []
            if not trainings and "$#" in text and "1" not in variables:
                variables |= {"1": "8", "2": "1"}  # it wants arguments: processes of a node, and where to save
                continue
            yield from ((path, command) for command in trainings)
            break


def check(checkout: Path, script: Path, command: Command) -> Outcome:
    """Checks a command as `python -m trainer.main_ppo` would, and collects every problem instead of the first."""
    name = str(script.relative_to(checkout))
    words = " ".join([command.entry, *command.arguments])
    kind = next(
        kind
        for kind, pattern in KINDS.items()
        if re.search(pattern, words) or (re.search(pattern, name) and kind == "NPU")
    )
    outcome = Outcome(name, kind)
    options, arguments = split_options(command.arguments)
    try:
        preset = preset_of(command.entry)
    except ConfigError as error:
        outcome.problems = [error]
        return outcome
    tunes = command_of(command.entry) == "sft"
    arguments += command.devices if tunes else ()
    config = _load(outcome, [preset, *_files(checkout, script, options)], arguments, SftConfig if tunes else Config)
    if config is not None:
        try:
            _check_ranks(config.for_workers() if isinstance(config, SftConfig) else config)
        except ConfigError as error:
            outcome.problems.append(error)
    return outcome


def _load(
    outcome: Outcome, files: Sequence[str], arguments: Sequence[str], model: type[Config] | type[SftConfig]
) -> Config | SftConfig | None:
    """The settings without those that are refused, whose errors `outcome` gets; None if the rest is refused as well."""
    while True:
        try:
            config, outcome.notes = load_config(files, arguments, model)
            return config
        except ConfigError as error:
            outcome.problems += error.problems if isinstance(error, UnusableSettingsError) else [error]
            keys = {key_of(problem) for problem in outcome.problems}
            accepted = [argument for argument in arguments if argument.partition("=")[0].lstrip("+~") not in keys]
            if len(accepted) == len(arguments):
                return None
            arguments = accepted


def key_of(problem: ConfigError) -> str:
    """The key that a message begins with."""
    return re.split(r"[=:\s]", str(problem).lstrip("~+"), maxsplit=1)[0]


def split_options(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Hydra's `--config-name` and `--config-path`, and the overrides of a command line."""
    options: dict[str, str] = {}
    overrides, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        if word.startswith("--config-"):
            name, separator, value = word.partition("=")
            options[name] = value if separator or not rest else rest.pop(0)
        elif "=" in word or word.startswith("~"):
            overrides.append(word)
    return options, overrides


def _files(checkout: Path, script: Path, options: dict[str, str]) -> list[str]:
    if "--config-name" not in options:
        return []
    given = options.get("--config-path", "config").removeprefix("file://").strip("'\"")
    tried = [given, checkout / given, checkout / given.removeprefix("recipe/"), script.parent / given]
    for directory in tried:
        files = hydra_files(options["--config-name"], str(directory))
        if files[0].startswith("verl") or Path(files[0]).exists():
            return files
    return files


def _check_ranks(config: Config) -> None:
    devices = (config.trainer.nnodes or 1) * (config.trainer.n_gpus_per_node or 8)
    roles = ("actor", "critic", "reference")
    mapped = {role: getattr(config.device_mapping, role) for role in roles}
    config.check_ranks({role: len(parse_devices(listed)) if listed else devices for role, listed in mapped.items()})


def checkouts(places: Sequence[str], directory: Path) -> list[Path]:
    """The places as checkouts. A bare mirror is unpacked below the directory."""
    folders = []
    for number, place in enumerate(places):
        path = Path(place)
        if (path / "objects").is_dir():
            path = directory / str(number)
            path.mkdir()
            archive = subprocess.run(["git", "-C", place, "archive", "HEAD"], capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", path], input=archive.stdout, check=True)
        folders.append(path.resolve())
    return folders


HEAD = """# verl's published scripts

`benchmarks/recipes.py` expands the scripts of three public snapshots (verl of January and August 2026, verl-recipe of
August 2026) with bash, and reads every training command as its entry point would: translation, types, contradictions,
division over the script's devices. It starts no GPU, no model and no run. A note names a key without effect on the
result, or says what is different here. *Limits* are refusals only for experts or vision. No table here counts what the
model and the rows decide: whether ranks can divide a model's heads and experts, and that prompts with images are
refused when they are read.
"""
LIMITS = ("experts", "there is no vision")


def page(outcomes: Sequence[Outcome]) -> str:
    """The page of the documentation."""
    lines = [HEAD, "| commands | all | accepted | accepted with a note | refused | of these limits |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for kind in reversed(KINDS):
        of_kind = [outcome for outcome in outcomes if outcome.kind == kind]
        verdicts = Counter(outcome.verdict for outcome in of_kind)
        counts = [
            len(of_kind),
            *(verdicts[word] for word in ("accepted", "with a note", "refused")),
            sum(map(_limited, of_kind)),
        ]
        lines.append(f"| {kind} | " + " | ".join(map(str, counts)) + " |")
    values: dict[str, Counter[str]] = {}
    plain, everywhere = Counter[str](), Counter[str]()
    for outcome in outcomes:
        for key, value in {(key_of(problem), _value(problem)) for problem in outcome.problems}:
            everywhere[key] += 1
            plain[key] += outcome.kind == PLAIN
            values.setdefault(key, Counter())[value] += 1
    lines += ["", "## Refused", "", f"Keys in scripts of the kind *{PLAIN}*, and those refused at least ten times.", ""]
    lines += ["| key | plain | all | values |", "| --- | --- | --- | --- |"]
    for key in sorted(everywhere, key=lambda key: (-plain[key], -everywhere[key], key)):
        if plain[key] or everywhere[key] >= 10:
            shown = ", ".join(value for value, _ in values[key].most_common(4)).replace("|", "\\|")
            lines.append(f"| `{key}` | {plain[key]} | {everywhere[key]} | {shown} |")
    notes = Counter(
        (note.partition(" ")[0].partition("=")[0].rstrip(":"), note.partition(": ")[2])
        for outcome in outcomes
        if outcome.kind == PLAIN
        for note in outcome.notes
    )
    lines += ["", "## Accepted with a note", "", f"In scripts of the kind *{PLAIN}*.", ""]
    lines += ["| key | commands | note |", "| --- | --- | --- |"]
    lines += [f"| `{key}` | {count} | {reason} |" for (key, reason), count in notes.most_common()]
    return "\n".join(lines) + "\n"


def _limited(outcome: Outcome) -> bool:
    """Whether only experts or vision stand in the way."""
    return bool(outcome.problems) and all(any(word in str(problem) for word in LIMITS) for problem in outcome.problems)


def _value(problem: ConfigError) -> str:
    text = str(problem)
    match = re.match(r"[^=:\s]+=(.*?)(?: is not supported here(.*)|: .*)?$", text, re.DOTALL)
    reason = " ".join((match[1] + (match[2] or "") if match else "unknown").split())
    return "a path" if "/" in reason else reason[:80]


def write_defaults(files: Sequence[str]) -> str:
    """The keys of verl's configurations with their defaults: of the first file that has one other than null."""
    defaults: dict[str, object] = {}
    for file in files:
        for key, value in flattened("", yaml.safe_load(Path(file).read_text(encoding="utf-8"))).items():
            name = key.lstrip(".")
            if defaults.get(name) is None and not any(part.startswith("_") for part in name.split(".")):
                defaults[name] = value
    return json.dumps(defaults, indent=0) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="+")
    parser.add_argument("--list", metavar="KIND")
    parser.add_argument("--defaults", action="store_true")
    arguments = parser.parse_args()
    if arguments.defaults:
        sys.stdout.write(write_defaults(arguments.places))
        return
    with tempfile.TemporaryDirectory() as directory:
        outcomes = [
            check(checkout, script, command)
            for checkout in checkouts(arguments.places, Path(directory))
            for script, command in commands_of(checkout)
        ]
    if arguments.list:
        for outcome in outcomes:
            if outcome.kind.startswith(arguments.list.replace("plain", PLAIN)):
                lines = [f"{outcome.verdict}: {outcome.script}", *(f"  {problem}" for problem in outcome.problems)]
                sys.stdout.write("\n".join(lines) + "\n")
        return
    sys.stdout.write(page(outcomes))


if __name__ == "__main__":
    main()
