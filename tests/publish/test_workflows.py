"""The workflow files pass their own schemas and call ci/'s scripts and nothing else.

actionlint itself needs Go and runs in the workflow (ci/actionlint).
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

from tests.publish.conftest import ROOT

GITLAB = ROOT / "ci/gitlab-ci.yml"
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
SCRIPT = re.compile(
    r"(?:sudo --preserve-env )?\./ci/"
    r"(actionlint|audit|build|lock|newest-vllm|propose-locks|publish|setup|site|test)(?: \S+)*"
)
FORMS = sorted(set((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) - {ROOT / ".github/ISSUE_TEMPLATE/config.yml"})
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": FORMS,
    "github-issue-config": [ROOT / ".github/ISSUE_TEMPLATE/config.yml"],
    "dependabot": [ROOT / ".github/dependabot.yml"],
    "citation-file-format": [ROOT / "CITATION.cff"],
    "gitlab-ci": [GITLAB],
}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_pass_their_schema(schema: str) -> None:
    options = ["--builtin-schema", f"vendor.{schema}"]
    if schema == "gitlab-ci":
        options += ["--data-transform", "gitlab-ci"]
    assert SCHEMAS[schema]
    done = CliRunner().invoke(check_jsonschema, [*options, *map(str, SCHEMAS[schema])])
    assert done.exit_code == 0, done.output


def github_jobs() -> dict[str, dict[str, Any]]:
    return {
        f"{workflow.stem}/{name}": job
        for workflow in WORKFLOWS
        for name, job in yaml.safe_load(workflow.read_text())["jobs"].items()
    }


def github_steps() -> list[dict[str, Any]]:
    return [step for job in github_jobs().values() for step in job.get("steps", [])]


def gitlab_jobs() -> dict[str, dict[str, Any]]:
    content = yaml.safe_load(GITLAB.read_text())
    return {name: job for name, job in content.items() if isinstance(job, dict) and "stage" in job}


def commands() -> list[str]:
    return [step["run"] for step in github_steps() if "run" in step] + [
        line for job in gitlab_jobs().values() for line in job["script"]
    ]


@pytest.mark.parametrize("command", commands())
def test_workflow_calls_a_script_that_is_there(command: str) -> None:
    match = SCRIPT.fullmatch(command)
    assert match, f"{command!r} does more than call one of ci/'s scripts"
    assert os.access(ROOT / "ci" / match[1], os.X_OK)


def test_proposed_locks_go_to_a_branch_of_their_own(tmp_path: Path) -> None:
    """With real git; `gh` is a stand-in that writes down its calls."""
    checkout, remote, tools = tmp_path / "checkout", tmp_path / "remote.git", tmp_path / "tools"
    for folder in (checkout / "ci", checkout / "tests", checkout / "images/locks", tools):
        folder.mkdir(parents=True)
    shutil.copy2(ROOT / "ci/propose-locks", checkout / "ci")
    locks = ("ci/requirements.txt", "tests/requirements.txt", "tests/hubs-requirements.txt", "images/locks/cpu.txt")
    for name in (*locks, "other"):
        (checkout / name).write_text("old\n")
    (tools / "gh").write_text(f'#!/bin/sh\necho "$1 $2" >>{tmp_path}/calls\n')
    (tools / "gh").chmod(0o755)

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *words]
        return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout

    subprocess.run(["git", "init", "--quiet", "--bare", str(remote)], check=True)
    git("init", "--quiet", "--initial-branch", "main")
    git("remote", "add", "origin", str(remote))
    git("add", ".")
    git("commit", "-qm", "first")

    def propose() -> str:
        environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["ci/propose-locks"], cwd=checkout, env=environment, capture_output=True, text=True, check=True
        )
        return done.stderr

    assert "no lock has changed" in propose()
    lock = checkout / "images/locks/cpu.txt"
    debs = "# deb: tini 1 sha256:00\n# deb: gone 1 sha256:00\n"
    lock.write_text(f"# epoch: 1\n{debs}ray[default]==2.0 \\\n    --hash=sha256:00\nsix==1\n")
    git("commit", "-qam", "second")
    lock.write_text("# epoch: 2\n# deb: tini 2 sha256:11\nray[default]==2.1 \\\n    --hash=sha256:11\nsix==1\n")
    (checkout / "other").write_text("not a lock\n")
    propose()
    changed = git("--git-dir", str(remote), "diff", "--name-only", "refreshed-locks~", "refreshed-locks")
    assert changed == "images/locks/cpu.txt\n"
    assert (tmp_path / "calls").read_text().splitlines() == ["auth setup-git", "pr list", "pr create"]
    told = git("--git-dir", str(remote), "log", "-1", "--format=%b", "refreshed-locks")
    assert "**images/locks/cpu.txt**" in told
    assert [line for line in told.splitlines() if line.startswith("- ")] == [
        "- gone (Debian) 1 -> none",
        "- ray[default] 2.0 -> 2.1",
        "- tini (Debian) 1 -> 2",
    ]


def test_actions_are_pinned_by_commit_with_the_version_beside_it() -> None:
    lines = [
        line.strip()
        for path in WORKFLOWS
        for line in path.read_text().splitlines()
        if "uses:" in line and ": ./" not in line
    ]
    assert lines
    pinned = re.compile(r"(?:- )?uses: actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert [line for line in lines if not pinned.fullmatch(line)] == []


def test_only_publishing_and_proposing_jobs_may_write() -> None:
    """Keyless signatures and Pages need an identity token. The job that resolves locks writes nothing itself."""
    for workflow in WORKFLOWS:
        assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}
    granted = {name: job["permissions"] for name, job in github_jobs().items() if "permissions" in job}
    assert granted == {
        "publish/publish": {"contents": "read", "packages": "write", "id-token": "write"},
        "build/build": {"contents": "read", "packages": "write", "id-token": "write"},
        "nightly/locks-as-pull-request": {"contents": "write", "pull-requests": "write"},
        "docs/deploy": {"pages": "write", "id-token": "write"},
    }
    assert gitlab_jobs()["publish"]["id_tokens"] == {"SIGSTORE_ID_TOKEN": {"aud": "sigstore"}}
    assert "id_tokens" not in gitlab_jobs()["test"]


def test_an_owner_with_capitals_publishes_in_lower_case(tmp_path: Path) -> None:
    """GitHub's owners may have capitals, a registry's repositories may not. `buildkit` is a stand-in."""
    for folder in ("ci", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy2(ROOT / "ci/publish", tmp_path / "ci")
    (tmp_path / ".venv/bin/buildkit").write_text('#!/bin/sh\necho "$SLIPWAY_REGISTRY $*"\n')
    (tmp_path / ".venv/bin/buildkit").chmod(0o755)
    environment = {**os.environ, "SLIPWAY_CI_READY": "1", "SLIPWAY_REGISTRY": "ghcr.io/Some-Team/Slipway"}
    done = subprocess.run([tmp_path / "ci/publish", "cpu"], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "ghcr.io/some-team/slipway publish --target=cpu\n"
    for words, targets in (([], "--target=all"), (["cpu", "cuda:a"], "--target=cpu --target=cuda:a")):
        command = [tmp_path / "ci/publish", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"ghcr.io/some-team/slipway publish {targets}\n"


def test_builder_takes_nothing_but_the_name_of_a_target() -> None:
    """SLSA build level 3: the caller can neither add steps nor hand in secrets, and the signature names this file."""
    builder = yaml.safe_load((ROOT / ".github/workflows/build.yml").read_text())
    call = builder[True]["workflow_call"]  # YAML 1.1 reads `on` as true
    assert set(call) == {"inputs"}
    assert set(call["inputs"]) == {"target"}
    job = builder["jobs"]["build"]
    assert job["runs-on"] == "${{ vars.LARGE_RUNNER || 'ubuntu-24.04' }}"
    assert job["env"]["SLIPWAY_BUILDER"] == ".github/workflows/build.yml"
    assert "{{ secrets" not in (ROOT / ".github/workflows/build.yml").read_text()
    assert "secrets" not in github_jobs()["publish/publish"]


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "ci").iterdir() if path.is_file()))
def test_scripts_install_hashed_wheels_only(script: str) -> None:
    """A source archive's build would run its author's code, with build requirements that no hash pins."""
    text = (ROOT / "ci" / script).read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if "pip install" in line and ".txt" in line:
            assert "--require-hashes" in line
            assert "--only-binary :all:" in line
