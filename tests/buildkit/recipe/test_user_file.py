"""`slipway.toml`: a user's variants and additions, beside their own code."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from buildkit.cli import app
from buildkit.errors import BuildkitError, MatrixError, UsageError
from buildkit.recipe.lock_file import extension_lock_path, lock_name, lock_path
from buildkit.recipe.matrix import load_matrix
from buildkit.recipe.user_file import find_user_file
from tests.buildkit.conftest import ROOT

OWN_VLLM = '[targets.cuda.variants.own]\nrequirements = ["vllm==0.33.0", "torch==2.14.0"]\n'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of a user outside of the project."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def user_file(home: Path, text: str) -> Path:
    (home / "slipway.toml").write_text(text)
    return home / "slipway.toml"


def test_the_nearest_file_counts(home: Path) -> None:
    (home / "deep" / "er").mkdir(parents=True)
    outer = user_file(home, "")
    assert find_user_file(home / "deep" / "er") == outer
    inner = user_file(home / "deep", "")
    assert find_user_file(home / "deep" / "er") == inner


def test_a_variant_is_its_requirements_and_takes_the_rest_from_its_target(home: Path) -> None:
    matrix = load_matrix(ROOT, user_file(home, OWN_VLLM))
    variant, default = matrix.variant("cuda", "own"), matrix.variant("cuda")
    assert variant.requirements == ("cuda-toolkit[cccl,crt,nvcc,nvvm]", "vllm==0.33.0", "torch==2.14.0")
    assert (variant.base, variant.driver, variant.architectures) == (
        default.base,
        default.driver,
        default.architectures,
    )
    assert (variant.exclude, variant.prune, variant.packages) == (default.exclude, default.prune, default.packages)
    assert variant.status == "untested"
    assert default.driver


def test_its_lock_lies_beside_the_file(home: Path) -> None:
    matrix = load_matrix(ROOT, user_file(home, OWN_VLLM))
    variant = matrix.variant("cuda", "own")
    assert lock_path(matrix, variant) == home / "slipway-locks" / "cuda" / "own.txt"
    assert lock_name(matrix, variant) == "slipway-locks/cuda/own.txt"
    assert lock_path(matrix, matrix.variant("cuda")).is_relative_to(ROOT)


def test_every_variant_is_extended_and_its_image_has_another_name(home: Path) -> None:
    (home / "mine").mkdir()
    (home / "requirements.txt").write_text("six\n")
    text = '[extend]\nwith = ["requirements.txt"]\napt = ["jq"]\ncopy = ["mine"]\n'
    matrix = load_matrix(ROOT, user_file(home, text))
    variant = matrix.variant("cpu")
    assert variant.extension is not None
    assert variant.extension.requirements == {"six": "requirements.txt, line 1"}
    assert (variant.extension.packages, variant.extension.folders) == (("jq",), (home / "mine",))
    assert variant.identifier == f"cpu-{variant.name}-extended"
    assert (variant.image_status, variant.stock.image_status) == ("untested", "proven")
    assert variant.stock == load_matrix(ROOT).variant("cpu")
    assert extension_lock_path(matrix, variant) == home / "slipway-locks/cpu" / f"{variant.name}-extended.txt"


def test_options_on_top_of_the_file_have_no_lock(home: Path) -> None:
    matrix = load_matrix(ROOT, user_file(home, '[extend]\napt = ["jq"]\n'))
    variant = matrix.variant("cpu")
    more = load_matrix(ROOT, user_file(home, '[extend]\napt = ["git"]\n')).variant("cpu").extension
    assert extension_lock_path(matrix, variant.extended(more)) is None
    both = variant.extended(more).extension
    assert both is not None
    assert both.packages == ("jq", "git")


def test_a_lock_of_additions_refuses_to_renew_the_base_of_the_project(
    project: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_file(home, '[extend]\napt = ["jq"]\n')
    monkeypatch.chdir(home)
    done = CliRunner().invoke(app, ["lock", "--target", "cpu", "--upgrade-base", "--project", str(project)])
    assert isinstance(done.exception, UsageError)
    assert "no base" in str(done.exception)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[extent]\n", "unknown key `extent`"),
        ("[extend]\nwhit = []\n", "unknown key `whit`"),
        ('[extend]\nwith = "r.txt"\n', "extend.with is not a list"),
        ("[extend]\napt = [1]\n", "extend.apt is not a list"),
        ("extend = 1\n", "extend is not a table"),
        ("[targets.xpu.variants.a]\n", "targets has an unknown key `xpu`"),
        ("[targets.cpu]\nbase = 'x'\n", "unknown key `base`"),
        ("[targets.cpu.variants.a]\ncolour = 1\n", "colour"),
        ("[targets.cpu.variants.a]\nbase = 'x'\n", "`base` is 'x'"),
        ("[targets.cpu.variants]\na = 1\n", "slipway.toml: a value has the wrong type"),
        ("[targets.cpu.variants.a]\nrequirements = 1\n", "slipway.toml: a value has the wrong type"),
        ("targets = 1\n", "targets is not a table"),
        ('[targets.cpu.variants."vllm0.32-torch2.13"]\n', "already has a variant"),
        ("[targets", "slipway.toml"),
    ],
)
def test_a_malformed_file_names_the_place(home: Path, text: str, words: str) -> None:
    with pytest.raises(MatrixError) as caught:
        load_matrix(ROOT, user_file(home, text))
    assert words in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("text", ['with = ["absent.txt"]', 'copy = ["absent"]', 'apt = ["-o"]'])
def test_what_is_not_there_is_named(home: Path, text: str) -> None:
    with pytest.raises(BuildkitError, match=r"absent|`-o`"):
        load_matrix(ROOT, user_file(home, f"[extend]\n{text}\n"))
