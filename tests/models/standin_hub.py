"""A hub on the loopback: the few calls of huggingface_hub's protocol that a download makes, and a record of them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandInHub:
    """Serves `repos` (id → folder). A gated one shows its list of files but gives none away, as the real hub does."""

    def __init__(self, repos: dict[str, Path], gated: frozenset[str] = frozenset()) -> None:
        self.repos, self.gated = repos, gated
        self.requests: list[tuple[str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub._answer(self)

            def do_HEAD(self) -> None:
                hub._answer(self)

            def log_message(self, format: str, *args: Any) -> None: ...

        self._handler = Handler
        self._open(0)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _open(self, port: int) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @contextmanager
    def away(self) -> Generator[None]:
        """Nobody listens at its address in here."""
        self.stop()
        yield
        self._open(int(self.url.rpartition(":")[2]))

    def fetched(self, repo: str) -> set[str]:
        """The files of `repo` whose contents were asked for."""
        pattern = re.compile(rf"/{re.escape(repo)}/resolve/[^/]+/(.+)")
        found = (pattern.fullmatch(path) for method, path in self.requests if method == "GET")
        return {match[1] for match in found if match}

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.split("?")[0]
        self.requests.append((request.command, path))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/[^/]+", path):
            folder = self.repos.get(match[1])
            if folder is None:
                self._refuse(request, 401, "RepoNotFound")
            elif match[2] == "revision":
                self._send(request, json.dumps({"id": match[1], "sha": COMMIT, "siblings": []}).encode())
            else:
                self._send(request, json.dumps([_entry(file) for file in sorted(folder.iterdir())]).encode())
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            folder = self.repos.get(match[1])
            if folder is None:
                self._refuse(request, 401, "RepoNotFound")
            elif match[1] in self.gated:
                self._refuse(request, 403, "GatedRepo")
            elif not (folder / match[2]).is_file():
                self._refuse(request, 404, "EntryNotFound")
            else:
                self._send(request, (folder / match[2]).read_bytes())
        else:
            self._refuse(request, 404, "RepoNotFound")

    def _send(self, request: BaseHTTPRequestHandler, content: bytes) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(content)

    def _refuse(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        request.send_response(status)
        request.send_header("X-Error-Code", code)
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("Content-Length", "0")
        request.end_headers()


def _entry(file: Path) -> dict[str, Any]:
    return {
        "type": "file",
        "path": file.name,
        "size": file.stat().st_size,
        "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
    }
