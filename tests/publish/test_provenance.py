"""SLSA provenance: the builder and the inputs that it names, and statements that are refused."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from buildkit.errors import TrustError
from buildkit.publishing import provenance
from buildkit.publishing.provenance import Builder, BuildRecord, check_statement, read_builder, statement
from tests.publish.conftest import LABELS, REVISION

DIGEST = "sha256:" + "d" * 64
BUILDER = Builder("https://ci.example/workflow", "https://ci.example/run/1", "git+https://ci.example/slipway")

# https://docs.github.com/en/actions/reference/workflows-and-actions/variables
GITHUB = {
    "GITHUB_ACTIONS": "true",
    "GITHUB_SERVER_URL": "https://github.com",
    "GITHUB_REPOSITORY": "team/slipway",
    "GITHUB_WORKFLOW_REF": "team/slipway/.github/workflows/slipway.yml@refs/heads/main",
    "GITHUB_REF": "refs/tags/v1",
    "GITHUB_RUN_ID": "7",
    "GITHUB_RUN_ATTEMPT": "2",
}
# https://docs.gitlab.com/ci/variables/predefined_variables/
GITLAB = {
    "GITLAB_CI": "true",
    "CI_PROJECT_URL": "https://gitlab.example/team/slipway",
    "CI_JOB_URL": "https://gitlab.example/team/slipway/-/jobs/9",
    "CI_RUNNER_ID": "3",
    "CI_COMMIT_REF_NAME": "main",
}


@pytest.mark.parametrize(
    ("environ", "builder"),
    [
        (
            GITHUB,
            Builder(
                "https://github.com/team/slipway/.github/workflows/slipway.yml@refs/heads/main",
                "https://github.com/team/slipway/actions/runs/7/attempts/2",
                "git+https://github.com/team/slipway@refs/tags/v1",
            ),
        ),
        (
            {**GITHUB, "SLIPWAY_BUILDER": ".github/workflows/build.yml"},
            Builder(
                "https://github.com/team/slipway/.github/workflows/build.yml@refs/tags/v1",
                "https://github.com/team/slipway/actions/runs/7/attempts/2",
                "git+https://github.com/team/slipway@refs/tags/v1",
            ),
        ),
        (
            GITLAB,
            Builder(
                "https://gitlab.example/team/slipway/-/runners/3",
                "https://gitlab.example/team/slipway/-/jobs/9",
                "git+https://gitlab.example/team/slipway@main",
            ),
        ),
        ({}, Builder("https://slipway.dev/buildkit/local", "", "git+https://slipway.dev/source")),
    ],
)
def test_builder_is_the_ci_job_where_there_is_one(environ: dict[str, str], builder: Builder) -> None:
    assert read_builder(environ) == builder


def test_statement_is_about_the_image_its_source_and_its_lock(record: BuildRecord) -> None:
    document = statement("registry.example.com/slipway", DIGEST, record, BUILDER)
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["predicateType"] == "https://slsa.dev/provenance/v1"
    assert document["subject"] == [{"name": "registry.example.com/slipway", "digest": {"sha256": "d" * 64}}]
    build, run = document["predicate"]["buildDefinition"], document["predicate"]["runDetails"]
    assert build["externalParameters"] == {"target": "cpu", "variant": "small"}
    inputs = {part["name"]: part.get("digest") for part in build["resolvedDependencies"]}
    assert inputs["source"] == {"gitCommit": REVISION}
    assert inputs["lock"] == {"sha256": "a" * 64}
    assert run["builder"]["id"] == BUILDER.identifier
    assert run["metadata"]["startedOn"] == "2026-11-21T10:00:00Z"


@pytest.mark.parametrize(("mark", "passes"), [({}, True), ({"uncommittedChanges": True}, False)])
def test_a_build_with_uncommitted_changes_is_refused(record: BuildRecord, mark: dict[str, bool], passes: bool) -> None:
    """Earlier releases signed this mark."""
    document = statement("r.example/s", DIGEST, record, BUILDER)
    document["predicate"]["buildDefinition"]["resolvedDependencies"][0]["annotations"] = mark
    context = nullcontext() if passes else pytest.raises(TrustError, match="built with uncommitted changes to bbbbbb")
    with context:
        check_statement(provenance.encode(document), DIGEST, LABELS)


def test_checkout_without_git_names_no_commit(record: BuildRecord) -> None:
    document = statement("r.example/s", DIGEST, replace(record, revision=""), BUILDER)
    labels = {**LABELS, "org.opencontainers.image.revision": ""}
    assert "no commit" in check_statement(provenance.encode(document), DIGEST, labels)


def test_good_statement_has_a_summary(record: BuildRecord) -> None:
    content = provenance.encode(statement("r.example/s", DIGEST, record, BUILDER))
    line = check_statement(content, DIGEST, LABELS)
    assert line == f"built by https://ci.example/workflow from {REVISION[:12]}"


@pytest.mark.parametrize(
    ("digest", "labels", "words"),
    [
        ("sha256:" + "e" * 64, {}, "about another image"),
        (DIGEST, {"dev.slipway.lock": "sha256:" + "e" * 64}, "about another lock"),
        (DIGEST, {"dev.slipway.target": "cuda"}, "about another target"),
        (DIGEST, {"dev.slipway.variant": "other"}, "about another variant"),
        (DIGEST, {"dev.slipway.extension": "sha256:" + "e" * 64}, "about another extension"),
        (DIGEST, {"org.opencontainers.image.revision": "e" * 40}, "about another source revision"),
    ],
)
def test_statement_about_something_else_is_refused(
    record: BuildRecord, digest: str, labels: dict[str, str], words: str
) -> None:
    content = provenance.encode(statement("r.example/s", DIGEST, record, BUILDER))
    with pytest.raises(TrustError, match=words):
        check_statement(content, digest, {**LABELS, **labels})


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"subject": 1}', b"\xff", b'{"_type": [], "subject": [{}]}'])
def test_invalid_statement_is_refused(content: bytes) -> None:
    with pytest.raises(TrustError, match="cannot be read"):
        check_statement(content, DIGEST, LABELS)
