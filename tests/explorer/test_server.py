"""The server answers this machine's own page and nobody else. Nothing outside the page's files and the tables' numbers is ever sent."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import mless
from mless.errors import BadFolder, EngineFault
from mless.explorer import exporting
from mless.explorer.folders import Folders
from mless.explorer.server import Running, make_app, page_files
from stored_attention import write_attention

TOKEN = "a-token-of-the-test"
SECRET = "the-secret-beside-the-folder"
EVIL = '"></script><script>alert(1)</script>'


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("served")
    (place / "secret.txt").write_text(SECRET)
    folder = write_attention(place / "quick", items=4, layers=2, heads=2, label=f"model {EVIL}", token=EVIL)
    (folder / "secret.txt").write_text(SECRET)
    return folder


@pytest.fixture(scope="module")
def client(stored: Path) -> Iterator[TestClient]:
    with TestClient(make_app(Folders([stored]), TOKEN), base_url="http://127.0.0.1:8123") as made:
        yield made


@pytest.fixture(scope="module")
def running(stored: Path) -> Iterator[Running]:
    made = mless.show(stored, browser=False)
    yield made
    made.stop()


def ask(running: Running, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """A request exactly as written: no library tidies its path."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        sent = {"Host": f"127.0.0.1:{running.port}"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        for name, value in sent.items():
            connection.putheader(name, value)
        connection.endheaders()
        reply = connection.getresponse()
        return reply.status, {key.lower(): value for key, value in reply.getheaders()}, reply.read()
    finally:
        connection.close()


# ---- what it serves --------------------------------------------------------------------------------------------------


def test_the_page_its_files_and_its_data(client: TestClient) -> None:
    page = client.get(f"/{TOKEN}/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    for name in page_files():
        assert client.get(f"/{TOKEN}/page/{name}").status_code == 200
    found = client.get(f"/{TOKEN}/api/start").json()
    assert found["folders"][0]["model"] == f"model {EVIL}"


def test_headers_keep_the_page_in_its_bounds(client: TestClient) -> None:
    for path in (f"/{TOKEN}/", f"/{TOKEN}/api/start", "/elsewhere"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers


def test_the_page_has_no_inline_script_and_nothing_from_elsewhere() -> None:
    files = {name: content.decode() for name, content in page_files().items()}
    assert "<script>" not in files["index.html"]
    for name, text in files.items():
        allowed = text.replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in allowed, name
        assert "https:" not in allowed, name
        assert "innerHTML" not in text, name
        assert "eval(" not in text, name


def test_faults_are_json_with_the_way_out(client: TestClient) -> None:
    lost = client.get(f"/{TOKEN}/api/map?folder=7")
    assert lost.status_code == 404
    assert "from 1 to 1" in lost.json()["error"]
    assert client.get("/elsewhere").json()["error"].startswith("there is nothing")


@pytest.mark.parametrize("number", ["0000000000019999", "1e0", "٣", "-1", "0", "9" * 400])
def test_a_number_out_of_range_is_not_there(client: TestClient, number: str) -> None:
    assert client.get(f"/{TOKEN}/api/map", params={"folder": number}).status_code == 404


def test_a_damaged_table_is_an_answer_not_a_crash(tmp_path: Path) -> None:
    folder = write_attention(tmp_path / "broken", items=4, layers=1, heads=2)
    (folder / "retained.parquet").write_bytes(b"PAR1 nothing PAR1")
    with TestClient(make_app(Folders([folder]), TOKEN), base_url="http://127.0.0.1:8123") as client:
        reply = client.get(f"/{TOKEN}/api/map")
    assert reply.status_code == 422
    assert "retained.parquet" in reply.json()["error"]


def test_a_folder_without_its_study_is_said_beside_the_others(stored: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("nothing measured")
    folders = Folders([stored, tmp_path / "notes"])
    with TestClient(make_app(folders, TOKEN), base_url="http://127.0.0.1:8123") as client:
        first, second = client.get(f"/{TOKEN}/api/start").json()["folders"]
        assert client.get(f"/{TOKEN}/api/map").status_code == 200
        assert "no study.json" in client.get(f"/{TOKEN}/api/map?folder=2").json()["error"]
    assert (first["state"], second["state"]) == ("finished", "refused")
    assert "holds no study.json, so it is no result folder; give a folder that `mless run` made" in second["why"]
    assert folders.lacking == (second["why"],)
    # A file that is sent to others is made of what was asked for, or not at all.
    with pytest.raises(BadFolder, match=r"notes holds no study\.json"):
        exporting.compose([stored, tmp_path / "notes"])


# ---- what it refuses -------------------------------------------------------------------------------------------------


def hostile_paths(token: str) -> list[str]:
    """Ways out of a folder, in many spellings."""
    outs = [
        "../secret.txt", "..%2fsecret.txt", "%2e%2e/secret.txt", "%2e%2e%2fsecret.txt", "..%5csecret.txt", "....//secret.txt", "..;/secret.txt",
        "..%252fsecret.txt", "%c0%ae%c0%ae/secret.txt", "/etc/passwd", "//etc/passwd", "%2fetc%2fpasswd", "file:///etc/passwd", "secret.txt",
        "study.json", "attention.parquet", ".lock", "index.html%00.js", "main.js/../../secret.txt", "main.js%00", "~root/.ssh/id_rsa", "con", "*",
        "..%2f..%2fsecret.txt", "%", "%zz", "\\..\\secret.txt",
    ]  # fmt: skip
    places = [
        f"/{token}/page/",
        f"/{token}/api/",
        f"/{token}/api/strip?item=",
        f"/{token}/api/map?folder=",
        f"/{token}/",
        "/",
    ]
    return [place + out for place, out in itertools.product(places, outs)]


def test_hostile_requests_get_nothing(running: Running) -> None:
    """Over 200 of them: paths in many spellings, other hosts, other origins, other methods, no token."""
    good = f"/{running.token}/api/start"
    tried = [(path, "GET", {}) for path in hostile_paths(running.token)]
    port = running.port
    hosts = [
        "evil.example", f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1", f"0.0.0.0:{port}", f"127.0.0.1.evil.example:{port}", "",
        f"[::1]:{port}", f"localhost.:{port}", f"user@127.0.0.1:{port}",
    ]  # fmt: skip
    tried += [(good, "GET", {"Host": host}) for host in hosts]
    origins = [
        "http://evil.example", "null", "https://127.0.0.1", f"https://127.0.0.1:{port}", "http://127.0.0.1:1", "file://", "http://localhost:8888",
        f"http://127.0.0.1:{port}.evil.example", f"http://evil.example:{port}",
    ]  # fmt: skip
    tried += [(good, "GET", {"Origin": origin}) for origin in origins]
    tried += [(good, "GET", {"Sec_Fetch_Site": site}) for site in ("cross-site", "same-site", "x")]
    tried += [
        (good, method, {})
        for method in ("POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "GETX")
    ]
    tokens = [
        "",
        "x",
        running.token[:-1],
        running.token + "x",
        running.token.swapcase(),
        "%00",
        "..",
        "null",
        "é".encode().hex(),
    ]
    tried += [(f"/{token}/api/start", "GET", {}) for token in tokens]
    tried += [(f"/{token}/", "GET", {}) for token in tokens]
    assert len(tried) >= 200
    for path, method, headers in tried:
        status, sent, content = ask(running, path, method, **headers)
        assert status >= 400, (path, method, headers)
        assert SECRET.encode() not in content
        assert b"root:" not in content
        assert b"verdict" not in content
        # What the HTTP library itself refuses has no headers of ours.
        assert status == 400 or sent["content-security-policy"], (path, method)
    assert ask(running, good)[0] == 200  # and it still serves


def test_its_own_page_may_ask(running: Running) -> None:
    good = f"/{running.token}/api/start"
    own = f"127.0.0.1:{running.port}"
    assert ask(running, good, Origin=f"http://{own}", Sec_Fetch_Site="same-origin")[0] == 200
    assert ask(running, good, Host=f"localhost:{running.port}")[0] == 200
    # A link from a notebook opens the page, which holds no data; its data it asks for itself.
    assert ask(running, f"/{running.token}/", Sec_Fetch_Site="same-site")[0] == 200


def test_two_hosts_are_refused(running: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=20)
    connection.putrequest("GET", f"/{running.token}/api/start", skip_host=True)
    connection.putheader("Host", f"127.0.0.1:{running.port}")
    connection.putheader("Host", "evil.example")
    connection.endheaders()
    assert connection.getresponse().status >= 400
    connection.close()


def test_it_listens_on_loopback_only_with_a_new_token_each_time(stored: Path, running: Running) -> None:
    assert running.address.startswith("http://127.0.0.1:")
    assert len(running.token) >= 20
    other = mless.show([stored], browser=False)
    try:
        assert other.token != running.token
        assert ask(other, f"/{running.token}/api/start")[0] == 404
    finally:
        other.stop()
    with pytest.raises(OSError, match=r"refused|reset|closed"):
        ask(other, "/")


def test_ctrl_c_while_it_waits_does_not_end_it_by_half(stored: Path) -> None:
    """It serves until `stop`, and whoever waits for its end waits till then."""
    other = mless.show(stored, browser=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    pressed = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            (pressed.start(), other.wait())
    finally:
        signal.signal(signal.SIGINT, before)
    waiting = threading.Thread(target=other.wait)
    waiting.start()
    assert ask(other, f"/{other.token}/api/start")[0] == 200
    assert waiting.is_alive()
    other.stop()
    waiting.join()


def test_a_port_that_is_taken_is_said(stored: Path, running: Running) -> None:
    with pytest.raises(EngineFault, match=r"cannot be had .*choose another --port"):
        mless.show(stored, port=running.port, browser=False)


def test_without_the_server_the_cure_is_named(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(EngineFault, match=r'uvicorn is not installed; install them: pip install "mless\[show\]"'):
        mless.show(stored, browser=False)


def test_a_browser_is_opened_unless_it_is_not_wanted(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import webbrowser

    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    for browser in (True, False):
        made = mless.show(stored, browser=browser)
        made.stop()
    assert len(opened) == 1
    assert opened[0].startswith("http://127.0.0.1:")


def test_the_folder_is_not_changed(running: Running, stored: Path) -> None:
    before = {file.name: file.read_bytes() for file in stored.iterdir() if file.is_file()}
    for path in (
        "start",
        "map?folder=1",
        "map/mass?folder=1",
        "head?condition=mless&folder=1&head=1&layer=1",
        "proof?folder=1",
    ):
        status, _, content = ask(running, f"/{running.token}/api/{path}")
        assert status == 200
        assert json.loads(content)
    assert {file.name: file.read_bytes() for file in stored.iterdir() if file.is_file()} == before
