from pathlib import Path

import pytest

from trainer.compat.settings import explain_settings, load_config
from trainer.config.dpo import DpoConfig
from trainer.config.files import PRESETS, preset_names
from trainer.config.kto import KtoConfig
from trainer.config.overrides import parse_overrides, settings
from trainer.config.sft import SftConfig
from trainer.config.tree import Config, RunConfig
from trainer.config.warm_start import WarmStartConfig
from trainer.errors import ConfigError


def test_values_get_the_types_of_their_fields() -> None:
    arguments = ["data.train_files=[a.parquet,b.parquet]", "actor.learning_rate=1e-6", "trainer.stop_at=0.5"]
    config: Config = parse_overrides([*arguments, "data.shuffle=false", "trainer.nnodes=null"])
    assert config.data.train_files == [Path("a.parquet").absolute(), Path("b.parquet").absolute()]
    assert config.actor.learning_rate == 1e-6
    assert config.trainer.stop_at == 0.5
    assert config.data.shuffle is False
    assert config.trainer.nnodes is None


def test_the_last_value_counts_and_may_contain_equals_signs() -> None:
    config: Config = parse_overrides(["trainer.run_id=a", "trainer.run_id=b=c"])
    assert config.trainer.run_id == "b=c"


@pytest.mark.parametrize(
    ("argument", "words", "hint"),
    [
        ("actor.learning_rte=1", "actor.learning_rte", "actor.learning_rate"),
        ("critic.clip_ratio=1", "critic.clip_ratio", "actor.clip_ratio"),
        ("actor=1", "actor", "actor is a section"),
        ("--seed=1", "--seed", "trainer.seed"),
        ("trainer.total_steps", "KEY=VALUE", "trainer.total_steps"),
        ("trainer.total_steps=many", "trainer.total_steps=many: expected integer > 0", ""),
        ("trainer.total_steps=0", "trainer.total_steps=0: expected integer > 0", ""),
        ("model.dtype=int8", "expected float32 | bfloat16", ""),
    ],
)
def test_a_bad_override_is_named_with_the_nearest_match(argument: str, words: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides([argument])
    assert words in str(caught.value)
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


def test_every_setting_has_a_default_and_a_type_in_words() -> None:
    known = {setting.key: setting for setting in settings(Config)}
    assert known["trainer.seed"].default == 0
    assert all(setting.expected for setting in known.values())


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid_and_starts_with_a_description(name: str) -> None:
    config, _ = load_config([name], [])
    assert config != Config()
    assert (PRESETS / f"{name}.yaml").read_text().startswith("# ")


def test_files_override_presets_and_arguments_override_both(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "rollout: {samples_per_prompt: 16}\nactor.learning_rate: 1e-5\ndata: {train_files: [a.parquet, b.parquet]}\n"
    )
    config, _ = load_config(["grpo", str(mine)], ["+actor.learning_rate='2e-5'"])
    assert config.algorithm.advantage == "grpo"
    assert config.rollout.samples_per_prompt == 16
    assert config.actor.learning_rate == 2e-5
    assert config.data.train_files == [Path("a.parquet").absolute(), Path("b.parquet").absolute()]


def test_an_entry_of_a_list_in_yaml_may_contain_a_comma(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text('data: {train_files: ["a,b.parquet"]}\n')
    config, _ = load_config([str(mine)], ["data.validation_files=['c,d.parquet', e.parquet]"])
    assert [path.name for path in config.data.train_files] == ["a,b.parquet"]
    assert [path.name for path in config.data.validation_files] == ["c,d.parquet", "e.parquet"]


def test_a_name_of_digits_stays_text(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("trainer: {run_id: 2026}\n")
    assert load_config([str(mine)], [])[0].trainer.run_id == "2026"
    assert load_config([], ["trainer.run_id=007"])[0].trainer.run_id == "007"


@pytest.mark.parametrize("text", ["007", "1e5", "2026-01-01", "true", "a: b"])
def test_a_setting_of_text_keeps_the_text(text: str) -> None:
    assert load_config([], [f"trainer.run_id={text}"])[0].trainer.run_id == text


@pytest.mark.parametrize("yaml", ["actor.learning_rate: true", "rollout.samples_per_prompt: yes"])
def test_true_is_not_a_number(tmp_path: Path, yaml: str) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml)
    key = yaml.partition(":")[0]
    with pytest.raises(ConfigError, match=f"{key}=true: expected (number|integer) > 0"):
        load_config([str(mine)], [])
    with pytest.raises(ConfigError, match=f"{key}=true: expected (number|integer) > 0"):
        load_config([], [f"{key}=true"])


@pytest.mark.parametrize(
    ("yaml", "argument", "rank"),
    [
        ("actor.lora.rank: 8", "actor_rollout_ref.model.lora_rank=64", 64),
        ("actor_rollout_ref.model.lora_rank: 8", "actor.lora.rank=64", 64),
    ],
)
def test_the_later_value_counts_whatever_its_dialect(tmp_path: Path, yaml: str, argument: str, rank: int) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml)
    assert load_config([str(mine)], [argument])[0].actor.lora.rank == rank
    assert load_config([], [argument, yaml.replace(": ", "=")])[0].actor.lora.rank == 8


def test_a_repeated_key_overrides_equivalent_keys_between_its_uses() -> None:
    theirs = "actor_rollout_ref.actor.optim.lr"
    config, _ = load_config([], [f"{theirs}=1e-3", "actor.learning_rate=1e-4", f"{theirs}=1e-5"])
    assert config.actor.learning_rate == 1e-5


def test_paths_become_absolute_in_every_setting() -> None:
    arguments = [f"{setting.key}=some" for setting in settings(Config) if "path" in setting.expected.split()]
    arguments += ["trainer.resume=some", "data.train_files=[some]", "rollout.environment.name=A"]
    dumped = load_config([], arguments)[0].model_dump()

    def paths(tree: object) -> list[Path]:
        if isinstance(tree, dict):
            return [path for value in tree.values() for path in paths(value)]
        if isinstance(tree, list):
            return [path for value in tree for path in paths(value)]
        return [tree] if isinstance(tree, Path) else []

    absolute = paths(dumped)
    assert len(absolute) > 10
    assert all(path.is_absolute() for path in absolute)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("a: [", "not YAML"),
        ("- a", "not a mapping"),
        ("actor: {rate: 1}", r"actor\.rate"),
    ],
)
def test_a_file_without_settings_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        load_config([str(path)], [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["algorithm.advantage=grpo_passk", "rollout.samples_per_prompt=1"],
            "set rollout.samples_per_prompt to 2 or more",
        ),
        (["algorithm.dynamic_sampling=true", "rollout.samples_per_prompt=1"], "set rollout.samples_per_prompt"),
        (["actor.mini_batch_size=100"], "x rollout.samples_per_prompt): set it to 64"),
        (["data.train_batch_size=4", "rollout.samples_per_prompt=8"], "x rollout.samples_per_prompt): set it to 32"),
        (["reward.overlong_buffer=17"], "exceeds data.max_response_length=16"),
        (["algorithm.kl_control=adaptive", "algorithm.kl_coefficient=0"], "above 0 to start from"),
        (["algorithm.correction_low=3"], "is not below"),
        (["trainer.stop_at=0.9", "trainer.test_freq=-1"], "needs validations between steps"),
        (["trainer.save_freq=-7"], "expected integer >= -1"),
        (["rollout.speculative_tokens=4", "rollout.stop=[x]"], "does not support rollout.stop"),
        (["rollout.speculative_tokens=4", "rollout.min_p=0.1"], "does not support rollout.min_p"),
        (["rollout.speculative_tokens=4", "validation.min_p=0.1"], "does not support validation.min_p"),
        (["rollout.speculative_tokens=4", "trainer.deterministic=true"], "does not support rollout.speculative_tokens"),
        (["rollout.quantization=fp8"], "set algorithm.correction, or algorithm.correction=none"),
        (
            ["trainer.deterministic=true", "trainer.mode=asynchronous", "algorithm.correction=tis"],
            "trainer.deterministic does not support trainer.mode=asynchronous",
        ),
        (["trainer.deterministic=true", "rollout.weight_transfer=broadcast"], "leave it out"),
        (["actor.backend=exact", "rollout.top_p=0.9"], "does not support rollout.top_p, top_k or min_p"),
        (
            ["actor.backend=exact", "algorithm.correction=tis", "rollout.speculative_tokens=4"],
            "does not support rollout.speculative_tokens=4 and algorithm.correction=tis",
        ),
        (
            ["actor.backend=exact", "trainer.mode=one_step_off", "algorithm.correction=none"],
            "does not support trainer.mode=one_step_off",
        ),
        (["reward.name=regex"], "needs reward.pattern"),
        (["algorithm.advantage=rloo", "trainer.critic_warmup=3"], "has no critic"),
        (["data.custom_cls.name=Mine"], "without the path of its file"),
        (["device_mapping.actor=gpu0"], "device_mapping.actor=gpu0"),
    ],
)
def test_contradictory_settings_are_refused_before_anything_starts(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], arguments)
    assert words in str(caught.value)


def test_a_setting_or_a_section_is_explained() -> None:
    (paragraph,) = explain_settings(["actor.clip_ratio_high"])
    assert paragraph.startswith("actor.clip_ratio_high=null  (number > 0 or null)")
    assert "upper epsilon" in paragraph
    assert len(explain_settings(["actor"])) > 10
    with pytest.raises(ConfigError) as caught:
        explain_settings(["actor.clip_ratio_hihg"])
    assert "actor.clip_ratio_high" in caught.value.hint


@pytest.mark.parametrize("name", ["actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor", "data.gen_batch_size"])
def test_a_setting_of_verl_without_a_value_asks_for_one(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explain_settings([name])
    assert str(caught.value) == f"{name} is verl's, and only settings of this trainer are explained"
    assert caught.value.hint == "give it a value, KEY=VALUE without blanks, to see what it means here"


def test_a_blank_before_an_equals_sign_is_named_for_verl_s_settings_as_well() -> None:
    with pytest.raises(ConfigError, match="not of the form KEY=VALUE") as caught:
        load_config(["verl"], ["actor_rollout_ref.actor.optim.lr", "=", "1e-6"])
    assert caught.value.hint == "did you mean actor_rollout_ref.actor.optim.lr=VALUE?"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("actor.lr", "did you mean actor.learning_rate?"),
        ("actr", "did you mean actor?"),
        ("lr", "did you mean actor.learning_rate or critic.learning_rate or learning_rate?"),
        ("actor.optimiser", "did you mean actor.optimizer?"),
        ("lora.rank", "did you mean actor.lora.rank or critic.lora.rank?"),
        ("rollout.temprature", "did you mean rollout.temperature?"),
        ("algorithm.kl", "did you mean algorithm.kl_coefficient or algorithm.kl_estimator or algorithm.kl_control?"),
        ("data.length", "did you mean data.max_prompt_length or data.max_response_length?"),
        ("dpo.bta", "did you mean dpo.beta?"),
        ("beta", "did you mean dpo.beta or kto.beta?"),
        ("sft.max_lenght", "did you mean sft.max_length?"),
    ],
)
def test_the_nearest_settings_and_sections_of_any_command_are_suggested(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explain_settings([name])
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("model", "argument", "hint"),
    [
        (Config, "actor.lr=1", "did you mean actor.learning_rate=VALUE?"),
        (Config, "dpo.beta=1", "it is a setting of `python -m trainer dpo`"),
        (Config, "dpo.bta=1", "did you mean dpo.beta, a setting of `python -m trainer dpo`?"),
        (Config, "actor_rollout_ref.actor.optim.lrr=1", "did you mean actor_rollout_ref.actor.optim.lr=VALUE?"),
        (DpoConfig, "rollout.temperature=1", "it is a setting of `python -m trainer train`"),
        (Config, "seed=1", "did you mean trainer.seed=VALUE?"),
        (KtoConfig, "dpo.beta=1", "it is a setting of `python -m trainer dpo`"),
        (SftConfig, "data.max_lenght=1", "did you mean data.max_length=VALUE?"),
        (WarmStartConfig, "stepz=1", "did you mean steps=VALUE?"),
    ],
)
def test_an_unknown_setting_of_a_command_may_be_one_of_another(
    model: type[RunConfig], argument: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], [argument], model) if model in (Config, SftConfig) else parse_overrides([argument], model)
    assert caught.value.hint == hint


@pytest.mark.parametrize("name", ["dpo", "dpo.beta", "kto.undesirable_weight", "sft.max_length", "steps"])
def test_settings_of_other_commands_are_explained(name: str) -> None:
    paragraphs = explain_settings([name])
    assert all(paragraph.startswith(name) for paragraph in paragraphs)
    assert "a setting of `python -m trainer " in paragraphs[0]


def test_a_preset_with_a_typing_error_is_suggested() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["grp"], [])
    assert caught.value.hint.startswith("did you mean grpo?")


@pytest.mark.parametrize("name", ["actor_rollout_ref.optim.lrr", "1e-6", "anything"])
def test_only_near_matches_are_suggested(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explain_settings([name])
    assert "did you mean" not in caught.value.hint


def test_every_setting_has_a_description() -> None:
    undocumented = [setting.key for setting in settings(Config) if not setting.description]
    assert undocumented == []


def test_a_setting_that_is_a_mapping_keeps_its_keys(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("reward: {sources: {a/b.c: math}}\n")
    assert load_config([str(mine)], [])[0].reward.sources == {"a/b.c": "math"}
    added = load_config([str(mine)], ["reward.sources.other=gsm8k"])[0].reward.sources
    assert added == {"a/b.c": "math", "other": "gsm8k"}
    assert load_config([str(mine)], ["reward.sources={d: math}"])[0].reward.sources == {"d": "math"}


def test_rules_between_settings_of_a_section_do_not_name_it_twice() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(["algorithm.correction_low=3", "algorithm.correction_high=2"])
    assert str(caught.value) == "algorithm.correction_low is not below algorithm.correction_high"
