"""The server: pages and data for this machine's user only.

It listens on loopback. The address has a random token, so other users and other pages cannot guess it. The Host header must be a name of
loopback, so a page elsewhere cannot rebind its name to this server. Only GET is answered, and nothing is ever opened by a client's path:
files of the page are known by name, folders by number.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from importlib import resources
from typing import TYPE_CHECKING, Any

from mless.errors import EngineFault, MlessError
from mless.explorer.asking import NotThere
from mless.explorer.folders import Folders
from mless.explorer.views import answer

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_DEFECT = "this is a defect of mless; please report it with what the terminal shows"
#: Slices that are read at the same time: each needs memory.
_AT_ONCE = 4


def page_files() -> dict[str, bytes]:
    """The files of the page, by name. They come with the package and are few."""
    folder = resources.files("mless.explorer") / "page"
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.name.endswith(tuple(_KINDS))}


def need_server() -> None:
    """Refuse with the cure where Starlette or uvicorn is not installed."""
    try:
        import starlette
        import uvicorn
    except ImportError as fault:
        raise EngineFault(
            f'the explorer needs Starlette and uvicorn, and {fault.name} is not installed; install them: pip install "mless[show]"'
        ) from None
    del starlette, uvicorn


def make_app(folders: Folders, token: str) -> Starlette:
    """The application. `token` is the first part of every address."""
    need_server()
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.responses import Response
    from starlette.routing import Route

    files = page_files()
    slots = threading.BoundedSemaphore(_AT_ONCE)

    def known(request: Request) -> bool:
        return secrets.compare_digest(request.path_params["token"].encode(), token.encode())

    def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if not known(request) or name not in files:
            return _said(404, "there is nothing at this address; open the one that `mless show` printed")
        kind = _KINDS["." + name.rpartition(".")[2]]
        return Response(files[name], media_type=kind)

    def data(request: Request) -> Response:
        if not known(request):
            return _said(404, "there is nothing at this address; open the one that `mless show` printed")
        # A page elsewhere may guess, but not read: browsers say where a request comes from.
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return _said(403, "this request comes from another page; open the address that `mless show` printed")
        try:
            with slots:
                found = answer(folders, request.path_params["path"], dict(request.query_params))
        except NotThere as fault:
            return _said(404, str(fault))
        except MlessError as fault:
            return _said(422, str(fault))
        except Exception:  # noqa: BLE001 - answered here, so that a defect has the headers of every answer
            traceback.print_exc()
            return _said(500, _DEFECT)
        return _json(200, found)

    def nothing(request: Request, fault: Exception) -> Response:
        return _said(404, "there is nothing at this address; open the one that `mless show` printed")

    def broken(request: Request, fault: Exception) -> Response:
        return _said(500, _DEFECT)

    app = Starlette(
        routes=[
            Route("/{token}/", file),
            Route("/{token}/page/{name}", file),
            Route("/{token}/api/{path:path}", data),
        ],
        middleware=[Middleware(Guard)],
        exception_handlers={404: nothing, 405: nothing, 500: broken},
    )
    app.router.redirect_slashes = False  # an address is known or not
    return app


def _json(status: int, content: Mapping[str, Any]) -> Response:
    from starlette.responses import Response

    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Response(text, status_code=status, media_type="application/json")


def _said(status: int, why: str) -> Response:
    return _json(status, {"error": why})


class Guard:
    """Refuses what does not come from this machine's browser, and adds the headers that keep a page in its bounds."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a socket is not accepted

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in _HEADERS.items()),
                ]
            await send(message)

        refused = _refusal(scope)
        await (refused or self._app)(scope, receive, with_headers)


def _refusal(scope: Scope) -> Response | None:
    if scope["method"] != "GET":
        return _said(405, "this server only shows; expected GET")
    given: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        given.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    hosts = given.get("host", [])
    if len(hosts) != 1 or hosts[0].rpartition(":")[0] not in _NAMES or not _is_port(scope, hosts[0]):
        return _said(403, "this server answers on loopback only; open the address that `mless show` printed")
    if any(origin != f"http://{hosts[0]}" for origin in given.get("origin", [])):
        return _said(403, "this request comes from another page; open the address that `mless show` printed")
    return None


def _is_port(scope: Scope, host: str) -> bool:
    server = scope.get("server")
    return server is not None and host.rpartition(":")[2] == str(server[1])


def prepare(folders: Folders) -> None:
    """Make what the first page asks for, and read the items' shares, which the first head needs, before a person has found the map."""
    from mless.explorer.slices import shares

    # Whatever is wrong is said when the page asks for it.
    with suppress(Exception):
        answer(folders, "start", {})
    for folder in folders:
        with suppress(Exception):
            if shares(folder) is not None:
                return


class Running:
    """A server in a thread of this process. `stop` ends it."""

    def __init__(self, folders: Folders, port: int = 0) -> None:
        need_server()
        import uvicorn

        #: What was given and is not shown, with the reason and the way out.
        self.lacking = folders.lacking
        self.token = secrets.token_urlsafe(16)
        self._socket = _bound(port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            make_app(folders, self.token), log_level="error", access_log=False, server_header=False, lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True, name="mless-show").start()
        threading.Thread(target=prepare, args=(folders,), daemon=True, name="mless-prepare").start()

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/{self.token}/"

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Until it ends, which Ctrl-C makes it do."""
        # Ctrl-C in a thread's join marks a running thread as ended (Python 3.11), and its socket would be closed too early.
        while not self._ended.wait(0.5):
            pass

    def stop(self) -> None:
        self._server.should_exit = True
        self._ended.wait(10)
        self._socket.close()


def _bound(port: int) -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((LOOPBACK, port))
        found.listen(128)  # from now on a browser that is too quick waits instead of being refused
    except OSError as fault:
        found.close()
        raise EngineFault(
            f"port {port} of this machine cannot be had ({fault.strerror}); choose another --port, or leave it out for a free one"
        ) from None
    return found
