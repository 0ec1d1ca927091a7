"""How an image came to be: SLSA provenance v1 in an in-toto statement.

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
class Origin:
    """What went in. `changed`: the checkout had uncommitted changes. `lock` is `sha256:…`; times are RFC 3339."""

    target: str
    variant: str
    version: str
    revision: str
    changed: bool
    lock: str
    lock_path: str
    base: str
    base_provider: str
    base_digest: str
    source_date: int
    started: str
    finished: str


@dataclass(frozen=True)
class Builder:
    """Who built it: a CI run where its variables are set, else this tool on somebody's machine."""

    identifier: str
    invocation: str
    source: str


def read_builder(environ: Mapping[str, str] = os.environ) -> Builder:
    """GitHub's and GitLab's own variables name the workflow, the run and the repository."""
    if environ.get("GITHUB_ACTIONS") == "true":
        source = f"{environ['GITHUB_SERVER_URL']}/{environ['GITHUB_REPOSITORY']}"
        workflow = f"{environ['GITHUB_SERVER_URL']}/{environ.get('GITHUB_WORKFLOW_REF', environ['GITHUB_REPOSITORY'])}"
        run = f"{source}/actions/runs/{environ['GITHUB_RUN_ID']}/attempts/{environ.get('GITHUB_RUN_ATTEMPT', '1')}"
        return Builder(workflow, run, f"git+{source}")
    if environ.get("GITLAB_CI") == "true":
        source = environ["CI_PROJECT_URL"]
        return Builder(f"{source}/-/runners/{environ.get('CI_RUNNER_ID', '')}", environ["CI_JOB_URL"], f"git+{source}")
    return Builder("https://slipway.dev/buildkit/local", "", "git+https://slipway.dev/source")


def statement(name: str, digest: str, origin: Origin, builder: Builder) -> dict[str, Any]:
    """`name` is the image's repository, `digest` that of its manifest."""
    source: dict[str, Any] = {"uri": builder.source, "digest": {"gitCommit": origin.revision}, "name": "source"}
    if origin.changed:
        source["annotations"] = {"uncommittedChanges": True}
    metadata = {"invocationId": builder.invocation, "startedOn": origin.started, "finishedOn": origin.finished}
    algorithm, _, value = digest.partition(":")
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {algorithm: value}}],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"target": origin.target, "variant": origin.variant},
                "internalParameters": {"baseProvider": origin.base_provider, "sourceDateEpoch": origin.source_date},
                "resolvedDependencies": [
                    *([source] if origin.revision else []),
                    {
                        "name": "lock",
                        "uri": f"file:{origin.lock_path}",
                        "digest": {"sha256": origin.lock.removeprefix("sha256:")},
                    },
                    base_dependency(origin),
                ],
            },
            "runDetails": {
                "builder": {"id": builder.identifier, "version": {"slipway": origin.version}},
                "metadata": {name: value for name, value in metadata.items() if value},
            },
        },
    }


def base_dependency(origin: Origin) -> dict[str, Any]:
    """With its digest where it came from a registry; a bootstrapped one is bound by the lock, package by package."""
    base = {"name": "base", "uri": f"pkg:generic/{origin.base}"}
    if origin.base_provider != "registry":
        return base
    return {**base, "digest": {"sha256": origin.base_digest.removeprefix("sha256:")}}


def encode(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def check_statement(content: bytes, digest: str, lock: str, revision: str) -> str:
    """What the statement says in a line. Raises `TrustError` unless it is about this image, its lock and its source."""
    try:
        document = json.loads(content)
        kinds = (document["_type"], document["predicateType"])
        subjects = {f"{name}:{value}" for part in document["subject"] for name, value in part["digest"].items()}
        definition = document["predicate"]["buildDefinition"]
        inputs = {part["name"]: part.get("digest", {}) for part in definition["resolvedDependencies"]}
        builder = document["predicate"]["runDetails"]["builder"]["id"]
        found = {
            "image": digest in subjects,
            "lock": lock == f"sha256:{inputs['lock']['sha256']}",
            "source revision": revision == inputs.get("source", {}).get("gitCommit", ""),
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrustError(f"the provenance cannot be understood: {error!r}", "publish the image again") from error
    if kinds != (STATEMENT, PREDICATE):
        raise TrustError(f"the provenance is of another kind: {kinds}", "publish the image again")
    if wrong := [name for name, same in found.items() if not same]:
        raise TrustError(f"the provenance is about another {' and another '.join(wrong)}", "do not use this image")
    return f"built by {builder} from {revision[:12] or 'no commit'}"
