"""Programs run by a SandboxFusion server over HTTP (https://github.com/bytedance/SandboxFusion)."""

import json
from collections.abc import Mapping
from typing import Any

import urllib3

from trainer.rewards.sandbox.programs import Ended, SandboxError

_ATTEMPTS, _PAUSE = 3, 0.5  # of a server that answers with 429 or 5xx; seconds before the first retry, then doubled
_SPARE_SECONDS = 10.0  # for the network and the server's queue
_MOST_BYTES = 64 * 2**20  # of a reply, which holds what the program wrote

_http = urllib3.PoolManager(
    maxsize=64,
    retries=urllib3.Retry(
        _ATTEMPTS - 1, backoff_factor=_PAUSE, status_forcelist=(429, 502, 503, 504), allowed_methods=None
    ),
)


class UnreachableSandboxError(SandboxError):
    """The server does not run a program."""


def run_remotely(
    url: str, program: str, stdin: str | None, seconds: float, memory_mb: int, language: str = "python"
) -> Ended:
    """What a program wrote; its compilation and its run may take `seconds` each. Raises UnreachableSandboxError."""
    job: dict[str, Any] = {
        "code": program,
        "stdin": stdin,
        "language": language,
        "compile_timeout": seconds,
        "run_timeout": seconds,
        "memory_limit_MB": memory_mb,
        "files": {},
        "fetch_files": [],
    }
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    try:
        reply = _http.request(
            "POST",
            url,
            body=json.dumps(job),
            headers=headers,
            timeout=2 * seconds + _SPARE_SECONDS,
            preload_content=False,
        )
        content = reply.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            reply.close()
            return Ended("", "", f"the program wrote more than {_MOST_BYTES} bytes")
        reply.release_conn()
    except urllib3.exceptions.HTTPError as error:
        raise UnreachableSandboxError(f"the sandbox at {url} does not answer: {error}") from error
    if reply.status != 200:
        raise UnreachableSandboxError(f"the sandbox at {url} answered with status {reply.status}")
    try:
        answer = json.loads(content)
        status, run, compiled = answer["status"], answer.get("run_result"), answer.get("compile_result")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreachableSandboxError(f"the sandbox at {url} sent {content[:200]!r}") from error
    if status == "SandboxError":
        raise UnreachableSandboxError(f"the sandbox at {url} failed: {answer.get('message', '')}")
    return _ended(run or compiled or {}, failed=status != "Success")


def _ended(result: Mapping[str, Any], failed: bool) -> Ended:
    how = result.get("status")
    error = ""
    if how == "TimeLimitExceeded":
        error = "no result in time"
    elif failed or how != "Finished":
        error = f"the program ended with status {result.get('return_code', how)}"
    return Ended(result.get("stdout") or "", result.get("stderr") or "", error)
