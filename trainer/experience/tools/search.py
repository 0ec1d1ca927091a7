"""Asks a retrieval server over HTTP: {"queries", "topk", "return_scores"} -> {"result": [[{"document"}, ...], ...]}."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import urllib3

from trainer.errors import ConfigError
from trainer.experience.tool import Tool, ToolResponse, ToolRow

_ATTEMPTS, _PAUSE = 10, 0.5  # of a server that answers with 5xx; seconds before the first retry, then doubled


class Search(Tool):
    """The parameter `query_list` holds the queries; the answer is JSON with the texts of the documents."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self._url = str(config.get("retrieval_service_url") or "")
        if not self._url:
            raise ConfigError("no retrieval_service_url", hint="set it in the tool's config")
        self._most, self._seconds = config.get("topk", 3), config.get("timeout", 30)
        workers = config.get("num_workers", 120)
        retries = urllib3.Retry(
            _ATTEMPTS - 1,
            backoff_factor=_PAUSE,
            backoff_max=5.0,
            status_forcelist=(500, 502, 503, 504),
            allowed_methods=None,
        )
        self._http = urllib3.PoolManager(maxsize=workers, retries=retries)
        self._threads = ThreadPoolExecutor(workers, "search")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        del instance_id
        queries = parameters.get("query_list")
        if not queries or not isinstance(queries, list):
            raise ValueError("'query_list' is missing, empty, or not a list in parameters.")
        pages = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, queries)
        text = "\n---\n".join(map(_as_text, pages)) if pages else "No search results found."
        return ToolResponse(text=json.dumps({"result": text}, ensure_ascii=False)), 0.0, {}

    def _ask(self, queries: Sequence[str]) -> list[Sequence[Mapping[str, Any]]]:
        """The documents found for each query. Raises RuntimeError, whose text is for the policy."""
        body = json.dumps({"queries": queries, "topk": self._most, "return_scores": True})
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        try:
            reply = self._http.request("POST", self._url, body=body, headers=headers, timeout=self._seconds)
        except urllib3.exceptions.HTTPError as error:
            raise RuntimeError(f"Search error: {type(error).__name__}") from error
        if reply.status != 200:
            raise RuntimeError(f"Search error: status {reply.status}")
        return list(json.loads(reply.data)["result"])


def _as_text(documents: Sequence[Mapping[str, Any]]) -> str:
    """The documents with their first lines as titles."""
    texts = []
    for number, document in enumerate(documents, start=1):
        title, _, text = document["document"]["contents"].partition("\n")
        texts.append(f"Doc {number} (Title: {title})\n{text}\n\n")
    return "".join(texts).strip()


ROW = ToolRow(name="search", tool=Search, verl=("verl.tools.search_tool.SearchTool",))
