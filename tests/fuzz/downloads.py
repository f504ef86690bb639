"""Downloads from a server that breaks the rules."""

import contextlib
import hashlib
import http.server
import random
import socket
import threading
from pathlib import Path
from typing import Any

from fuzz.formats import Format, write_options
from fuzz.guard import guarded

from vitkit.errors import CheckpointError
from vitkit.weights.download import fetch_file

CONTENT = bytes(range(256)) * 300
_DIGEST = hashlib.sha256(CONTENT).hexdigest()
_ENDLESS = 8 << 20
"""Bytes of a body that has no length."""
_STATUSES = (200, 200, 200, 206, 206, 204, 301, 302, 304, 400, 403, 404, 416, 416, 429, 500, 503, 999)
_LENGTHS = ("right", "right", "right", "none", "-1", "0", "x", "1e3", "", "9" * 30, "+5", "less", "more", "twice")
_BODIES = ("rest", "rest", "rest", "all", "short", "long", "empty", "endless", "chunked", "chunks broken", "garbage")
_RANGES = ("right", "right", "none", "start", "total", "bytes */*", "bytes x-y/z", "bytes 5-2/3", "items 0-1/2", "")
_RAW = ("", "", "", "", "", "", "HTTP/1.1 abc\r\n\r\n", "\0\0\0", "x" * 70_000, "HTTP/9.9 200 OK\r\n")
_HEADERS = [["Location", "file:///etc/passwd"], ["Location", "/next"], ["ETag", '"1"'], ["X", "\x1b[31m"]]
_HEADERS += [["Content-Type", "text/html"], ["Content-Encoding", "gzip"], ["Location", "http://127.0.0.1:1/x"]]
_HEADERS += [["Content-Disposition", "attachment; filename=../../victim/new.jpg"], ["X" * 40, "y" * 70_000]]
_PATHS = ("/weights.pth",) * 3 + ("/a%2Fb", "/..", "/", "/x?y=1") + ("/weights.pth",) * 8 + ("/w\x01", "/é.pth")
_STARTS = (b"", b"", CONTENT[:1000], CONTENT[:-1], CONTENT, CONTENT + b"x", b"\0" * 500, b"\0" * len(CONTENT))


def _write(rng: random.Random, folder: Path, world: Path) -> None:
    answers = [
        {
            "status": rng.choice(_STATUSES),
            "length": rng.choice(_LENGTHS),
            "body": rng.choice(_BODIES),
            "range": rng.choice(_RANGES),
            "honest": rng.random() < 0.3,
            "headers": rng.sample(_HEADERS, rng.choice([0, 0, 0, 1, 2])),
            "raw": rng.choice(_RAW),
        }
        for _ in range(3)
    ]
    write_options(
        folder,
        answers=answers,
        part=rng.choice(_STARTS).hex(),
        checksum=rng.choice([f"sha256:{_DIGEST[:8]}", f"sha256:{_DIGEST}", "", None]),
        name=rng.choice(["weights.pth", None, None]),
        path=rng.choice(_PATHS),
        twice=rng.random() < 0.5,
    )


def _body(kind: str, start: int) -> bytes:
    """Return the bytes of an answer to a request for the bytes from `start` on."""
    rest = CONTENT[start:]
    if kind.startswith("chunk"):
        parts = [rest[:100], rest[100:]]
        data = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts if part) + b"0\r\n\r\n"
        return data if kind == "chunked" else data[:60] + b"zz\r\n" + data[60:]
    garbage = bytes(reversed(rest))
    sizes = {"rest": rest, "all": CONTENT, "short": rest[:-9], "long": rest + b"more", "garbage": garbage}
    return sizes.get(kind, b"")


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answers: list[dict[str, Any]] = []
    served: list[tuple[dict[str, Any], int]] = []

    def do_GET(self) -> None:
        kind = type(self)
        answer = kind.answers.pop(0) if kind.answers else {"honest": True}
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0] or 0)
        kind.served = [*kind.served, (answer, start)]
        with contextlib.suppress(OSError):  # the other side has enough of it
            self._serve(answer, start)
        self.close_connection = True

    def _serve(self, answer: dict[str, Any], start: int) -> None:
        if answer["honest"]:
            if start >= len(CONTENT):
                self.send_response(416)
                self._end({"Content-Range": f"bytes */{len(CONTENT)}", "Content-Length": "0"})
                return
            self.send_response(206 if start else 200)
            partly = {"Content-Range": f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"} if start else {}
            self._end({"Content-Length": str(len(CONTENT) - start), **partly})
            self.wfile.write(CONTENT[start:])
            return
        if answer["raw"]:
            self.wfile.write(answer["raw"].encode("latin-1"))
            return
        body = _body(answer["body"], start)
        self.send_response(answer["status"])
        lengths = {"right": len(body), "less": max(0, len(body) - 7), "more": len(body) + 7}
        length = lengths.get(answer["length"], answer["length"])
        headers = {} if length == "none" else {"Content-Length": str(5 if length == "twice" else length)}
        last, total = len(CONTENT) - 1, len(CONTENT)
        ranges = {"right": f"bytes {start}-{last}/{total}", "start": f"bytes 7-{last}/{total}"}
        ranges["total"] = f"bytes {start}-{last}/{total + 9}"
        if answer["range"] != "none":
            headers["Content-Range"] = ranges.get(answer["range"], answer["range"])
        if length == "twice":
            self.send_header("Content-Length", str(len(body)))
        if answer["body"].startswith("chunk"):
            headers.pop("Content-Length", None)
            headers["Transfer-Encoding"] = "chunked"
        self._end(headers | dict(answer["headers"]))
        self.wfile.write(body)
        if answer["body"] == "endless":
            for _ in range(_ENDLESS >> 16):
                self.wfile.write(bytes(1 << 16))

    def _end(self, headers: dict[str, str]) -> None:
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        socket.socket.bind(self.socket, self.server_address)
        self.server_name, self.server_port = self.socket.getsockname()[:2]


def check(folder: Path, world: Path) -> None:
    """Check that what a download returns is what the server has, and that a file that is refused is not kept."""
    with guarded(folder, world, connects=True) as options:
        _Handler.answers = list(options["answers"])
        server = _Server(("127.0.0.1", 0), _Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}{options['path']}"
        if part := bytes.fromhex(options["part"]):
            Path("out", "weights.pth.part").write_bytes(part)
        arguments = dict(checksum=options["checksum"], name=options["name"], folder=Path("out"))
        try:
            path = fetch_file(url, **arguments)
        except CheckpointError:
            kept = [path.name for path in Path("out").iterdir() if ".part" not in path.name]
            assert not kept, f"refused, but kept: {kept}"
            if options["twice"]:  # an honest server must be able to make it good, continuing what has arrived
                _Handler.answers = []
                parts = list(Path("out").glob("*.part"))
                options["part"] = parts[0].read_bytes().hex() if parts else ""
                _check_content(fetch_file(url, **arguments), options)
            raise
        assert path.parent == Path("out")
        _check_content(path, options)


def _check_content(path: Path, options: dict[str, Any]) -> None:
    content = path.read_bytes()
    if options["checksum"]:
        assert content == CONTENT, f"{len(content)} bytes against the checksum"
    else:
        begun = bytes.fromhex(options["part"])
        assert any(content in _results(*served, begun) for served in _Handler.served), f"{len(content)} bytes: not sent"
    record = path.with_name(f"{path.name}.sha256")
    if options["checksum"] == "":
        assert record.read_text().split()[0] == hashlib.sha256(content).hexdigest()


def _results(answer: dict[str, Any], start: int, begun: bytes) -> list[bytes]:
    """Return what a file may contain after an answer to a request for the bytes from `start` on."""
    if answer["honest"]:
        complete = [begun] if len(begun) == len(CONTENT) else []
        return complete if start >= len(CONTENT) else [begun[:start] + CONTENT[start:]]
    body = CONTENT[start:] if answer["body"].startswith("chunk") else _body(answer["body"], start)
    if answer["body"] == "endless":
        body = bytes(_ENDLESS)
    elif not answer["body"].startswith("chunk"):
        body = body[: {"less": max(0, len(body) - 7), "0": 0}.get(answer["length"])]
    fits = answer["range"] == "right"
    if answer["status"] == 206:
        return [begun[:start] + body] if fits or not start else []
    if answer["status"] == 416:
        return [begun] if fits and len(begun) == len(CONTENT) else []
    return [body]


FORMATS = [Format("downloads", _write, check, CheckpointError, 6)]
