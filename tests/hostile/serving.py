"""A server on the loopback that sends a spoiled reply, from a process of its own: what is forked afterwards must have no threads."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import struct
import time
from collections.abc import Generator
from pathlib import Path

#: More than any answer may have.
_GIANT = 80 << 20
#: The server ends by itself, should nobody end it.
_LIFE = 300


@contextlib.contextmanager
def serving(reply: Path) -> Generator[str]:
    """The address of a server that answers every request with the reply in that file."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(_LIFE)
                _serve(listener, *_sent(reply))
            finally:
                os._exit(0)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _sent(reply: Path) -> tuple[str, bytes, bytes]:
    """How a reply is sent, its head and its body."""
    about = json.loads(reply.read_text())
    head, body = "".join(f"{line}\r\n" for line in about["head"]), about["text"].encode()
    if about["how"] == "giant":
        body += b" " * _GIANT
    if not re.search("content-length|transfer-encoding", head, re.IGNORECASE):
        head += f"Content-Length: {len(body)}\r\n"
    return about["how"], f"{head}\r\n".encode("latin-1", "replace"), body


def _serve(listener: socket.socket, how: str, head: bytes, body: bytes) -> None:
    """One connection after another has a process: a slow one must not hold up the rest."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.alarm(_LIFE)
            with contextlib.suppress(OSError):
                while _asked(connection):
                    _answer(connection, how, head, body)
            os._exit(0)
        connection.close()


def _asked(connection: socket.socket) -> bool:
    """Read a request; False where there is none any more."""
    got = b""
    while b"\r\n\r\n" not in got:
        part = connection.recv(1 << 16)
        if not part:
            return False
        got += part
    before, _, after = got.partition(b"\r\n\r\n")
    said = re.search(rb"content-length: *(\d+)", before, re.IGNORECASE)
    left = int(said[1]) - len(after) if said else 0
    while left > 0:
        left -= len(connection.recv(1 << 16))
    return True


def _answer(connection: socket.socket, how: str, head: bytes, body: bytes) -> None:
    if how == "silent":
        select.select([connection], [], [], _LIFE)
    elif how in ("trickle", "trickle-body"):
        connection.sendall(b"" if how == "trickle" else head)
        for byte in (head + body) if how == "trickle" else body:
            connection.sendall(bytes([byte]))
            time.sleep(0.1)
    elif how == "continue":
        while True:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    elif how == "flood":
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(b" " * (1 << 20))
    elif how == "cut":
        connection.sendall((head + body)[:-20])
        connection.shutdown(socket.SHUT_RDWR)
    elif how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    else:
        connection.sendall((head + body) * (2 if how == "twice" else 1))
