"""A web server in the test's own process that serves ranges of files, and fails as it is told."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class RangeServer:
    """Serves a folder below `url`.

    Attributes:
        faults: what the next requests of a file do in place of answering: "stall", "truncate", "endless" or a
            status such as 500.
        num_sent: bytes of the last endless answer.
        serves_ranges: whether a range is answered, or the file as a whole.
        requests: (path, first byte or None) of each request with a body.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.faults: dict[str, list[str | int]] = {}
        self.serves_ranges = True
        self.requests: list[tuple[str, int | None]] = []
        self.is_closing = threading.Event()
        self.num_sent = 0
        self.url = ""

    def answer(self, handler: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        name = handler.path.lstrip("/")
        path = self.folder / name
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        fault = None
        if with_body:
            self.requests.append((name, int(asked[1]) if asked else None))
            if self.faults.get(name):
                fault = self.faults[name].pop(0)
        if isinstance(fault, int) or not path.is_file():
            handler.send_error(fault or 404)
            return
        content, size = path.read_bytes(), path.stat().st_size
        first, last = (int(asked[1]), min(int(asked[2]), size - 1)) if asked and self.serves_ranges else (0, size - 1)
        if first >= size:
            handler.send_error(416)
            return
        handler.send_response(206 if asked and self.serves_ranges else 200)
        if asked and self.serves_ranges:
            handler.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        if fault != "endless":
            handler.send_header("Content-Length", str(last + 1 - first))
        handler.send_header("ETag", f'"{hash(content):x}"')
        handler.end_headers()
        if not with_body:
            return
        body = content[first : last + 1]
        if fault == "endless":
            handler.close_connection = True
            self.num_sent = 0
            with suppress(OSError):  # the other side has enough of it
                while self.num_sent < 1 << 30:
                    self.num_sent += handler.wfile.write(bytes(1 << 16))
            return
        if fault is not None:
            handler.wfile.write(body[: len(body) // 2])
            handler.wfile.flush()
            handler.close_connection = True
            if fault == "stall":
                self.is_closing.wait(20)
            return
        handler.wfile.write(body)


@contextmanager
def serve(folder: Path) -> Iterator[RangeServer]:
    """Serve a folder on a free port of this machine."""
    server = RangeServer(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # a body would wait for the confirmation of its headers

        def do_GET(self):
            server.answer(self, with_body=True)

        def do_HEAD(self):
            server.answer(self, with_body=False)

        def log_message(self, *_):
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_):
            pass  # a client that gives up closes its connection

    with Quiet(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.is_closing.set()
            http.shutdown()
