"""The workflow files pass their own schemas and call ci/'s scripts and nothing else."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from tests.publish.conftest import ROOT

GITHUB, GITLAB = ROOT / "ci/github-actions.yml", ROOT / "ci/gitlab-ci.yml"
SCRIPT = re.compile(r"(?:sudo --preserve-env )?\./ci/(test|publish)(?: \S+)*")


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        (GITHUB, ["--builtin-schema", "vendor.github-workflows"]),
        (GITLAB, ["--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci"]),
    ],
)
def test_workflow_passes_its_schema(path: Any, schema: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", *schema, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def github_steps() -> list[dict[str, Any]]:
    jobs = yaml.safe_load(GITHUB.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


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


def test_both_workflows_test_and_publish() -> None:
    called = [match[1] for command in commands() if (match := SCRIPT.fullmatch(command))]
    assert sorted(called) == ["publish", "publish", "test", "test"]


def test_actions_are_pinned_by_commit() -> None:
    used = [step["uses"] for step in github_steps() if "uses" in step]
    assert used
    assert [use for use in used if not re.fullmatch(r"actions/checkout@[0-9a-f]{40}", use)] == []


def test_publishing_may_prove_who_it_is() -> None:
    """Keyless signatures need an identity token; only the job that publishes gets one."""
    jobs = yaml.safe_load(GITHUB.read_text())["jobs"]
    assert jobs["publish"]["permissions"]["id-token"] == "write"
    assert "permissions" not in jobs["test"]
    assert gitlab_jobs()["publish"]["id_tokens"] == {"SIGSTORE_ID_TOKEN": {"aud": "sigstore"}}
    assert "id_tokens" not in gitlab_jobs()["test"]
