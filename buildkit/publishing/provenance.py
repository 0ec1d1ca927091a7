"""The record of an image's build: SLSA provenance v1 in an in-toto statement.

https://slsa.dev/spec/v1.0/provenance and https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from buildkit.errors import TrustError

MEDIA_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "https://slipway.dev/buildkit/publish/v1"


@dataclass(frozen=True)
class BuildRecord:
    """The inputs and times of a build. `lock` is `sha256:…`, and so is `extension`, the digest of what a user added.

    `started` and `finished` are RFC 3339, `source_date` is in seconds since 1970.
    """

    target: str
    variant: str
    version: str
    revision: str
    lock: str
    lock_path: str
    base: str
    base_provider: str
    base_digest: str
    source_date: int
    started: str
    finished: str
    extension: str = ""


@dataclass(frozen=True)
class Builder:
    """The CI job that built the image, or this tool on a person's machine."""

    identifier: str
    invocation: str
    source: str


def read_builder(environ: Mapping[str, str] = os.environ) -> Builder:
    """The builder, from the variables of GitHub or GitLab; without them, the local one."""
    if environ.get("GITHUB_ACTIONS") == "true":
        source = f"{environ['GITHUB_SERVER_URL']}/{environ['GITHUB_REPOSITORY']}"
        workflow = f"{environ['GITHUB_SERVER_URL']}/{environ.get('GITHUB_WORKFLOW_REF', environ['GITHUB_REPOSITORY'])}"
        if path := environ.get("SLIPWAY_BUILDER"):  # a reusable workflow, which GitHub's variables do not name
            workflow = f"{source}/{path}@{environ['GITHUB_REF']}"
        run = f"{source}/actions/runs/{environ['GITHUB_RUN_ID']}/attempts/{environ.get('GITHUB_RUN_ATTEMPT', '1')}"
        return Builder(workflow, run, with_reference(f"git+{source}", environ.get("GITHUB_REF", "")))
    if environ.get("GITLAB_CI") == "true":
        source = environ["CI_PROJECT_URL"]
        reference = environ.get("CI_COMMIT_TAG") or environ.get("CI_COMMIT_REF_NAME", "")
        runner = f"{source}/-/runners/{environ.get('CI_RUNNER_ID', '')}"
        return Builder(runner, environ["CI_JOB_URL"], with_reference(f"git+{source}", reference))
    return Builder("https://slipway.dev/buildkit/local", "", "git+https://slipway.dev/source")


def with_reference(source: str, reference: str) -> str:
    """The source with the branch or tag that was built, as SPDX's download locations write it."""
    return f"{source}@{reference}" if reference else source


def statement(name: str, digest: str, record: BuildRecord, builder: Builder) -> dict[str, Any]:
    """The in-toto statement. `name` is the image's repository, `digest` that of its manifest."""
    source = {"uri": builder.source, "digest": {"gitCommit": record.revision}, "name": "source"}
    metadata = {"invocationId": builder.invocation, "startedOn": record.started, "finishedOn": record.finished}
    algorithm, _, value = digest.partition(":")
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {algorithm: value}}],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"target": record.target, "variant": record.variant},
                "internalParameters": {"baseProvider": record.base_provider, "sourceDateEpoch": record.source_date},
                "resolvedDependencies": [
                    *([source] if record.revision else []),
                    {
                        "name": "lock",
                        "uri": f"file:{record.lock_path}",
                        "digest": {"sha256": record.lock.removeprefix("sha256:")},
                    },
                    base_dependency(record),
                    *extension_dependency(record),
                ],
            },
            "runDetails": {
                "builder": {"id": builder.identifier, "version": {"slipway": record.version}},
                "metadata": {name: value for name, value in metadata.items() if value},
            },
        },
    }


def base_dependency(record: BuildRecord) -> dict[str, Any]:
    """The base, with its digest if it comes from a registry; the lock binds the packages of a bootstrapped base."""
    base = {"name": "base", "uri": f"pkg:generic/{record.base}"}
    if record.base_provider != "registry":
        return base
    return {**base, "digest": {"sha256": record.base_digest.removeprefix("sha256:")}}


def extension_dependency(record: BuildRecord) -> list[dict[str, Any]]:
    if not record.extension:
        return []
    digest = {"sha256": record.extension.removeprefix("sha256:")}
    return [{"name": "extension", "uri": "file:slipway.toml", "digest": digest}]


def encode(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def check_statement(content: bytes, digest: str, labels: Mapping[str, str]) -> str:
    """A summary in one line.

    Raises `TrustError` unless the statement is about the image with this digest and these labels, made of its commit
    alone.
    """
    revision = labels.get("org.opencontainers.image.revision", "")
    try:
        document = json.loads(content)
        kinds = (document["_type"], document["predicateType"])
        subjects = {f"{name}:{value}" for part in document["subject"] for name, value in part["digest"].items()}
        definition = document["predicate"]["buildDefinition"]
        parts = {part["name"]: part for part in definition["resolvedDependencies"]}
        inputs = {name: part.get("digest", {}) for name, part in parts.items()}
        asked = definition["externalParameters"]
        changed = parts.get("source", {}).get("annotations", {}).get("uncommittedChanges", False)
        builder = document["predicate"]["runDetails"]["builder"]["id"]
        agreements = {
            "image": digest in subjects,
            "target": labels.get("dev.slipway.target") == asked["target"],
            "variant": labels.get("dev.slipway.variant") == asked["variant"],
            "lock": labels.get("dev.slipway.lock") == f"sha256:{inputs['lock']['sha256']}",
            "extension": labels.get("dev.slipway.extension", "")
            == ":".join(next(iter(inputs.get("extension", {}).items()), ())),
            "source revision": revision == inputs.get("source", {}).get("gitCommit", ""),
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TrustError(f"the provenance cannot be read: {error!r}", "publish the image again") from error
    if kinds != (STATEMENT, PREDICATE):
        raise TrustError(f"the provenance has an unknown type: {kinds}", "publish the image again")
    if wrong := [name for name, same in agreements.items() if not same]:
        raise TrustError(f"the provenance is about another {' and another '.join(wrong)}", "do not use this image")
    if changed:
        raise TrustError(
            f"it was built with uncommitted changes to {revision[:12]}: nobody else has its source",
            "do not use this image; publish it again from a clean checkout",
        )
    return f"built by {builder} from {revision[:12] or 'no commit'}"
