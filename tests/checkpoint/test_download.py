import hashlib
import http.server
import threading

import pytest

from vitkit.checkpoint.download import cached_file
from vitkit.errors import CheckpointError

CONTENT = bytes(range(256)) * 5000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class _Server(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT with byte ranges; each address named in `broken` is cut short once."""

    broken: set = set()
    ranges: list = []

    def do_GET(self):
        start = 0
        asked = self.headers.get("Range")
        self.ranges.append(asked)
        if asked:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
        body = CONTENT[start:]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.path in self.broken:
            self.broken.remove(self.path)
            body = body[: len(body) // 3]
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def address():
    server = http.server.HTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    _Server.broken, _Server.ranges = set(), []
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_file_is_downloaded_once_and_then_taken_from_the_cache(address, tmp_path):
    path = cached_file(f"{address}/weights.pth", sha256_prefix=DIGEST[:8], folder=tmp_path)
    assert path.read_bytes() == CONTENT
    assert cached_file(f"{address}/weights.pth", sha256_prefix=DIGEST[:8], folder=tmp_path) == path
    assert len(_Server.ranges) == 1


def test_a_broken_download_goes_on_where_it_stopped(address, tmp_path):
    _Server.broken.add("/weights.pth")
    with pytest.raises(CheckpointError, match="cannot download .*kept in weights.pth.part"):
        cached_file(f"{address}/weights.pth", sha256_prefix=DIGEST[:8], folder=tmp_path)
    have = (tmp_path / "weights.pth.part").stat().st_size
    assert 0 < have < len(CONTENT)
    path = cached_file(f"{address}/weights.pth", sha256_prefix=DIGEST[:8], folder=tmp_path)
    assert path.read_bytes() == CONTENT
    assert _Server.ranges == [None, f"bytes={have}-"]


def test_a_wrong_checksum_is_an_error_and_leaves_nothing_in_the_cache(address, tmp_path):
    with pytest.raises(CheckpointError, match="sha256 begins"):
        cached_file(f"{address}/weights.pth", sha256_prefix="00000000", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_address_out_of_reach_says_where_to_put_the_file(tmp_path):
    with pytest.raises(CheckpointError, match="Put the file at .*weights.pth"):
        cached_file("http://127.0.0.1:9/weights.pth", folder=tmp_path)
