"""What a user adds to an image: requirements files, Debian packages and folders are read, or refused by their place."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildkit.errors import ExtensionError
from buildkit.recipe.extension import Extension, files_of, folder_digest, read_extension, read_requirements


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_requirements_are_read_as_pip_reads_them(tmp_path: Path) -> None:
    text = "# comment\nsix>=1.17  # why\n\nfoo[bar]==1 ; python_version < '4'\nidna \\\n  >=3\n"
    assert read_requirements(write(tmp_path, "r.txt", text)).requirements == {
        "six>=1.17": "r.txt, line 2",
        'foo[bar]==1; python_version < "4"': "r.txt, line 4",
        "idna>=3": "r.txt, line 5",
    }


@pytest.mark.parametrize("text", ["", "\n# six\n"])
def test_a_file_without_requirements_is_refused(tmp_path: Path, text: str) -> None:
    """The image would be the plain one, under the plain one's name."""
    with pytest.raises(ExtensionError, match=r"r\.txt names no requirement"):
        read_requirements(write(tmp_path, "r.txt", text))


def test_hashes_in_a_file_bind_the_wheels(tmp_path: Path) -> None:
    text = f"Six==1.17 \\\n  --hash=sha256:{'a' * 64} \\\n  --hash sha256:{'b' * 64}\n"
    read = read_requirements(write(tmp_path, "r.txt", text))
    assert (read.requirements, read.hashes) == ({"Six==1.17": "r.txt, line 1"}, {"six": {"a" * 64, "b" * 64}})


@pytest.mark.parametrize(
    ("line", "problem", "hint"),
    [
        ("./mine", "names a path", "--copy"),
        ("../mine-1-py3-none-any.whl", "names a path", "find-links"),
        ("mine-1-py3-none-any.whl", "names a path", "find-links"),
        ("folder/mine", "names a path", "--copy"),
        ("/opt/mine.tar.gz", "names a path", "--copy"),
        ("~/mine", "names a path", "--copy"),
        ("file:///opt/mine", "names a path", "--copy"),
        ("mine @ file:///opt/mine", "names a path", "--copy"),
        ("-e .", "names a path", "--copy"),
        ("--editable=.", "names a path", "--copy"),
        ("mine @ https://example.org/mine.whl", "names an address", "configuration"),
        ("https://example.org/mine.whl", "names an address", "configuration"),
        ("git+https://example.org/mine", "names an address", "configuration"),
        ("mine @ git+ssh://git@example.org/mine", "names an address", "configuration"),
        ("--index-url https://example.org/simple", "names an index", "configuration"),
        ("-i https://example.org/simple", "names an index", "configuration"),
        ("--extra-index-url=https://example.org/simple", "names an index", "configuration"),
        ("-f https://example.org/links", "names an index", "configuration"),
        ("--no-index", "names an index", "configuration"),
        ("-r other.txt", "names another file", "--with"),
        ("-c bounds.txt", "names another file", "beside the requirements"),
        ("--pre", "has the option --pre", "leave it out"),
        ("two words", "is no requirement", "six>=1.17"),
        ("six==1 --hash=md5:aa", "is no requirement", "six>=1.17"),
    ],
)
def test_a_line_that_is_no_requirement_is_refused_with_its_place(
    tmp_path: Path, line: str, problem: str, hint: str
) -> None:
    with pytest.raises(ExtensionError) as caught:
        read_requirements(write(tmp_path, "r.txt", f"six\n{line}\n"))
    assert str(caught.value).startswith("r.txt, line 2: ")
    assert problem in str(caught.value)
    assert hint in caught.value.hint


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",))))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_text(text, encoding="utf-8")
    with contextlib.suppress(ExtensionError):
        assert all(place.startswith("any.txt, line ") for place in read_requirements(path).requirements.values())


@pytest.mark.parametrize("name", ["", "-o", "--allow-downgrades", "jq git", "Jq", "jq;rm", "jq=", "jq/sid", "a"])
def test_only_names_of_debian_packages_reach_apt(name: str) -> None:
    with pytest.raises(ExtensionError, match="no name of a Debian package"):
        read_extension((), [name], ())


def test_names_with_a_version_are_kept() -> None:
    extension = read_extension((), ["jq", "g++", "jq=1.6-2.1+deb12u3", "jq"], ())
    assert extension == Extension(packages=("jq", "g++", "jq=1.6-2.1+deb12u3"))


def test_nothing_to_add_is_no_extension() -> None:
    assert read_extension((), (), ()) is None


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExtensionError, match=r"absent\.txt cannot be read"):
        read_extension([tmp_path / "absent.txt"], (), ())


# ---- folders ----


def test_a_project_adds_its_dependencies_and_is_imported_from_its_sources(tmp_path: Path) -> None:
    write(tmp_path, "mine/pyproject.toml", '[project]\nname = "mine"\ndependencies = ["six>=1"]\n')
    write(tmp_path, "mine/src/mine/__init__.py", "")
    write(tmp_path, "flat/pyproject.toml", "")
    write(tmp_path, "package/__init__.py", "")
    extension = read_extension((), (), [tmp_path / name for name in ("mine", "flat", "package")])
    assert extension is not None
    assert extension.requirements == {"six>=1": "mine/pyproject.toml"}
    assert extension.project_paths == ["/opt/slipway/extension/mine/src", "/opt/slipway/extension/flat"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[project]\ndependencies = ["other @ file:///other"]', "mine/pyproject.toml: `other @ file:///other` names"),
        ('[project]\ndependencies = "six"', "dependencies"),
        ("project = 1", "pyproject.toml cannot be read"),
        ("[project", "pyproject.toml"),
        ('[project]\ndynamic = ["dependencies"]', "dynamic"),
    ],
)
def test_a_project_whose_dependencies_cannot_be_resolved_is_refused(tmp_path: Path, text: str, words: str) -> None:
    write(tmp_path, "mine/pyproject.toml", text)
    with pytest.raises(ExtensionError) as caught:
        read_extension((), (), [tmp_path / "mine"])
    assert words in str(caught.value)


def test_folders_that_cannot_be_copied_as_they_are_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "a/mine/code.py", "")
    write(tmp_path, "b/mine/code.py", "")
    write(tmp_path, "linked/code.py", "")
    (tmp_path / "linked" / "outside").symlink_to(tmp_path / "a")
    (tmp_path / "with space").mkdir()
    for folders, words in (
        (["absent"], "is no folder"),
        (["a/mine/code.py"], "is no folder"),
        (["a/mine", "b/mine"], "two folders are called mine"),
        (["linked"], "is a link to outside"),
        (["with space"], "no such name"),
    ):
        with pytest.raises(ExtensionError, match=words):
            read_extension((), (), [tmp_path / name for name in folders])


def test_the_digest_covers_names_contents_and_modes_and_leaves_out_what_tools_leave(tmp_path: Path) -> None:
    file = write(tmp_path, "mine/code.py", "1")
    first = folder_digest(tmp_path / "mine")
    for name in (".git/config", "__pycache__/code.pyc", ".venv/pyvenv.cfg"):
        write(tmp_path, f"mine/{name}", "x")
    assert folder_digest(tmp_path / "mine") == first
    assert [path.name for path in files_of(tmp_path / "mine")] == ["code.py"]
    file.chmod(0o755)
    executable = folder_digest(tmp_path / "mine")
    file.write_text("2")
    changed = folder_digest(tmp_path / "mine")
    file.rename(tmp_path / "mine" / "other.py")
    assert len({first, executable, changed, folder_digest(tmp_path / "mine")}) == 4
