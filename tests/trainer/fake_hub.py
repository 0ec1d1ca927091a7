"""A stand-in for the Hugging Face hub: serves the folders OWNER/NAME of a directory, and takes uploads into it."""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.serving import serving

REVISION = "0" * 40


@contextmanager
def fake_hub(folder: Path, cache: Path) -> Iterator[dict[str, str]]:
    """Environment variables that name a hub with the repositories in `folder`."""
    handler = type("Handler", (FakeHub,), {"folder": folder})
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(cache)}


class FakeHub(BaseHTTPRequestHandler):
    """The hub's interface. Repositories of the owner `gated` refuse their files, others are missing."""

    folder: Path

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        kind, owner, name, action, rest = self._route()
        repository = self.folder / owner / name
        files = sorted(str(file.relative_to(repository)) for file in repository.rglob("*") if file.is_file())
        if not files:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif kind and action == "revision":
            siblings = [{"rfilename": file} for file in files]
            self._send_json({"id": f"{owner}/{name}", "sha": REVISION, "siblings": siblings})
        elif kind:
            self._send_json([{"type": "file", "path": file, "size": 1, "oid": REVISION} for file in files])
        elif owner == "gated":
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        else:
            content = (repository / rest.partition("/")[2]).read_bytes()
            self._send(200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": REVISION})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        address = f"http://{self.headers['Host']}"
        _, owner, name, action, _ = self._route()
        if self.headers.get("Authorization") != "Bearer right":
            self._send(401, b'{"error": "Invalid credentials"}', {})
        elif self.path == "/api/repos/create":
            given = json.loads(body)
            self._send_json({"url": f"{address}/{given['organization']}/{given['name']}", "id": "1"})
        elif self.path == "/api/validate-yaml":
            self._send_json({"errors": [], "warnings": []})
        elif action == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._send_json({"files": files})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    path = self.folder / owner / name / line["value"]["path"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(base64.b64decode(line["value"]["content"]))
            self._send_json({"commitUrl": f"{address}/{owner}/{name}/commit/{REVISION}", "commitOid": REVISION})

    def _route(self) -> tuple[str, str, str, str, str]:
        """The kind of repository, for the API alone; owner, name, action, and what follows."""
        parts = self.path.partition("?")[0].strip("/").split("/")
        kind = parts[1] if parts[0] == "api" and parts[1] in ("datasets", "models") else ""
        if kind or parts[0] == "datasets":
            parts = parts[2 if kind else 1 :]
        owner, name, action, *rest = [*parts, "", "", ""]
        return kind, owner, name, action, "/".join(rest).rstrip("/")

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for header, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing."""
