import contextlib
import errno
import hashlib
import http.server
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.processes import run_forked

from vitkit.errors import CheckpointError
from vitkit.weights import download
from vitkit.weights.download import fetch_file

CONTENT = bytes(range(256)) * 5000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class _Server(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT with byte ranges; each URL named in `broken` is cut short once."""

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
        self.send_header("Content-Type", "text/html" if self.path.endswith(".html") else "application/octet-stream")
        self.end_headers()
        if self.path in self.broken:
            self.broken.remove(self.path)
            body = body[: len(body) // 3]
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    server = http.server.HTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    _Server.broken, _Server.ranges = set(), []
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_file_is_downloaded_once_and_then_taken_from_the_cache(url, tmp_path):
    path = fetch_file(f"{url}/weights.pth", checksum=f"sha256:{DIGEST[:8]}", folder=tmp_path)
    assert path.read_bytes() == CONTENT
    assert fetch_file(f"{url}/weights.pth", checksum=f"sha256:{DIGEST[:8]}", folder=tmp_path) == path
    assert len(_Server.ranges) == 1


def test_interrupted_download_continues_where_it_stopped(url, tmp_path):
    _Server.broken.add("/weights.pth")
    with pytest.raises(CheckpointError, match="cannot download .*kept in weights.pth.part"):
        fetch_file(f"{url}/weights.pth", checksum=f"sha256:{DIGEST[:8]}", folder=tmp_path)
    have = (tmp_path / "weights.pth.part").stat().st_size
    assert 0 < have < len(CONTENT)
    path = fetch_file(f"{url}/weights.pth", checksum=f"sha256:{DIGEST[:8]}", folder=tmp_path)
    assert path.read_bytes() == CONTENT
    assert _Server.ranges == [None, f"bytes={have}-"]


def test_simultaneous_downloads_share_one_request(tmp_path):
    class Slow(_Server):
        def do_GET(self):
            time.sleep(0.3)
            super().do_GET()

    _Server.broken, _Server.ranges = set(), []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/weights.pth"
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: fetch_file(url, folder=tmp_path), range(4)))
    server.shutdown()
    server.server_close()
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert len(_Server.ranges) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["weights.pth"]


def test_a_part_that_another_process_removes_while_it_is_looked_at_is_begun_again(url, tmp_path, monkeypatch):
    fstat, part = os.fstat, tmp_path / "weights.pth.part"

    def look(descriptor):
        if part.exists() and not looked:
            looked.append(part.unlink())
        return fstat(descriptor)

    looked = []
    monkeypatch.setattr(download.os, "fstat", look)
    assert fetch_file(f"{url}/weights.pth", folder=tmp_path).read_bytes() == CONTENT
    assert looked


def fetch_half(url, folder):
    """Kill this process in the middle of a download."""

    def half(response, part, done):
        part.write_bytes(response.read(1000))
        os.kill(os.getpid(), signal.SIGKILL)

    download._receive = half
    fetch_file(f"{url}/weights.pth", checksum=f"sha256:{DIGEST[:8]}", folder=folder)


def test_download_of_a_killed_process_is_continued(url, tmp_path):
    assert run_forked(fetch_half, url, tmp_path)[0] == -signal.SIGKILL
    path = fetch_file(f"{url}/weights.pth", checksum=f"sha256:{DIGEST[:8]}", folder=tmp_path)
    assert path.read_bytes() == CONTENT
    assert _Server.ranges == [None, "bytes=1000-"]


def test_a_wrong_checksum_is_an_error_and_leaves_nothing_in_the_cache(url, tmp_path):
    with pytest.raises(CheckpointError, match="sha256 begins"):
        fetch_file(f"{url}/weights.pth", checksum="sha256:00000000", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("body", [b"<!DOCTYPE html><html>Sign in</html>", b"\n <html lang='en'>Quota exceeded</html>"])
def test_a_web_page_in_place_of_a_file_leaves_nothing_whatever_its_content_type(body, url, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "CONTENT", body)
    for path in ("page.html", "weights.pth"):
        with pytest.raises(CheckpointError, match=r"leads to a web page: open it in a browser.* or try again\.$"):
            fetch_file(f"{url}/{path}", checksum="", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_an_error_before_anything_is_written(url, tmp_path, monkeypatch):
    usage = download.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: usage._replace(free=len(CONTENT) - 1))
    with pytest.raises(CheckpointError, match="needs 0.00 GiB more, and .* free: free some space, or set TORCH"):
        fetch_file(f"{url}/weights.pth", checksum=f"sha256:{DIGEST}", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: usage._replace(free=len(CONTENT)))
    assert fetch_file(f"{url}/weights.pth", checksum=f"sha256:{DIGEST}", folder=tmp_path).read_bytes() == CONTENT


def test_error_for_an_unreachable_url_says_where_to_put_the_file(tmp_path):
    with pytest.raises(CheckpointError, match="Put the file at .*weights.pth"):
        fetch_file("http://127.0.0.1:9/weights.pth", folder=tmp_path)


def test_first_download_records_an_unpublished_checksum(url, tmp_path, caplog):
    caplog.set_level("INFO", logger="vitkit")
    path = fetch_file(f"{url}/weights.pth", checksum="", folder=tmp_path)
    assert (tmp_path / "weights.pth.sha256").read_text() == f"{DIGEST}  weights.pth\n"
    assert f"sha256 {DIGEST} is recorded" in caplog.text
    caplog.clear()
    assert fetch_file(f"{url}/weights.pth", checksum="", folder=tmp_path) == path
    path.unlink()
    fetch_file(f"{url}/weights.pth", checksum="", folder=tmp_path)
    assert caplog.text == ""
    assert sorted(file.name for file in tmp_path.iterdir()) == ["weights.pth", "weights.pth.sha256"]


def test_later_downloads_must_match_the_recorded_checksum(url, tmp_path):
    (tmp_path / "weights.pth.sha256").write_text("0" * 64 + "  weights.pth\n")
    with pytest.raises(
        CheckpointError, match=f"sha256 is {DIGEST}, but {'0' * 64} was recorded .* delete weights.pth.sha256"
    ):
        fetch_file(f"{url}/weights.pth", checksum="", folder=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["weights.pth.sha256"]


def test_published_md5_sums_are_checked(url, tmp_path):
    digest = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
    fetch_file(f"{url}/weights.pth", checksum=f"md5:{digest[:6]}", folder=tmp_path)
    assert not (tmp_path / "weights.pth.sha256").exists()
    with pytest.raises(CheckpointError, match=f"md5 begins {digest[:6]}, expected 000000"):
        fetch_file(f"{url}/weights.pth", checksum="md5:000000", folder=tmp_path)


def test_file_name_may_differ_from_the_url(url, tmp_path):
    assert fetch_file(f"{url}/download?id=7", name="a.pth", folder=tmp_path).name == "a.pth"


def test_web_page_instead_of_a_file_is_an_error(url, tmp_path):
    with pytest.raises(CheckpointError, match="cannot download .*leads to a web page"):
        fetch_file(f"{url}/page.html", folder=tmp_path)


def test_full_or_unwritable_cache_is_a_one_line_error(url, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "weights.pth.part"))

    monkeypatch.setattr("vitkit.weights.download._fetch", full)
    with pytest.raises(CheckpointError, match="weights.pth.part: cannot be written .No space left.*set TORCH_HOME"):
        fetch_file(f"{url}/weights.pth", folder=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        fetch_file(f"{url}/weights.pth", folder=tmp_path / "file" / "below")


class _Hostile(http.server.BaseHTTPRequestHandler):
    """Answers each request with the next of `answers`: status, headers, body."""

    answers: list = []
    asked: list = []
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        type(self).asked.append(dict(self.headers))
        status, headers, body = self.answers.pop(0)
        self.send_response(status)
        for name, value in {"Connection": "close", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def hostile():
    server = http.server.HTTPServer(("127.0.0.1", 0), _Hostile)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    _Hostile.asked = []

    def answers(*given):
        _Hostile.answers = list(given)
        return f"http://127.0.0.1:{server.server_port}/a.pth"

    yield answers
    server.shutdown()
    server.server_close()


WHOLE = (200, {"Content-Length": "6", "ETag": '"new"'}, b"abcdef")
CUT = (200, {"Content-Length": "6", "ETag": '"old"'}, b"abc")


@pytest.mark.parametrize(
    "continued",
    [
        [WHOLE],  # the file has changed, so the server ignores the range
        [(206, {"Content-Length": "3", "Content-Range": "bytes 3-5/6"}, b"def")],
        [(416, {"Content-Length": "0", "Content-Range": "bytes */2"}, b""), WHOLE],
        [(416, {"Content-Length": "0"}, b""), WHOLE],
        [(206, {"Content-Length": "3", "Content-Range": "bytes 1-3/6"}, b"xyz"), WHOLE],
        [(206, {"Content-Length": "3"}, b"xyz"), WHOLE],
    ],
)
def test_continued_download_is_the_whole_file(hostile, tmp_path, continued):
    url = hostile(CUT)
    with pytest.raises(CheckpointError, match="broke after 3 of 6 bytes"):
        fetch_file(url, checksum="", folder=tmp_path)
    hostile(*continued)
    assert fetch_file(url, checksum="", folder=tmp_path).read_bytes() == b"abcdef"
    assert _Hostile.asked[1]["Range"] == "bytes=3-" and _Hostile.asked[1]["If-Range"] == '"old"'
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.pth", "a.pth.sha256"]


def test_a_part_of_an_unknown_version_is_downloaded_again(hostile, tmp_path):
    url = hostile((200, {"Content-Length": "6"}, b"old"), WHOLE)
    with pytest.raises(CheckpointError, match="broke after 3 of 6 bytes"):
        fetch_file(url, checksum="", folder=tmp_path)
    assert fetch_file(url, checksum="", folder=tmp_path).read_bytes() == b"abcdef"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, {"Content-Length": "-5"}, b"abc"), "states the length '-5'"),
        ((200, {"Content-Length": "1e3"}, b"abc"), "states the length '1e3'"),
        ((200, {}, b"abc"), "states the length ''"),
        ((200, {"Content-Length": "0"}, b""), "sends an empty file"),
        ((200, {"Content-Length": "9" * 17}, b"abc"), "expected at most"),
        ((200, {"Content-Length": "9" * 5000}, b"abc"), "states the length"),
        ((200, {"Transfer-Encoding": "chunked"}, b"zz\r\nabc"), "cannot download"),
        ((200, {"Transfer-Encoding": "chunked"}, b"3\r\nabc\r\n5\r\nab"), "cannot download"),
        ((404, {"Content-Length": "0"}, b""), "404"),
    ],
)
def test_wrong_answers_are_errors_of_one_line_and_nothing_is_recorded(hostile, tmp_path, answer, message):
    with pytest.raises(CheckpointError, match=message) as raised:
        fetch_file(hostile(answer), checksum="", folder=tmp_path)
    assert "\n" not in str(raised.value)
    assert not {"a.pth", "a.pth.sha256"} & {file.name for file in tmp_path.iterdir()}


def test_endless_and_slow_answers_end(hostile, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "_MAX_BYTES", 5)
    with pytest.raises(CheckpointError, match="more than 5 bytes"):
        chunks = (200, {"Transfer-Encoding": "chunked"}, b"6\r\nabcdef\r\n" * 9)
        fetch_file(hostile(chunks), checksum="", folder=tmp_path)
    monkeypatch.setattr(download, "_MAX_BYTES", 100)
    monkeypatch.setattr(download, "_GRACE", -1.0)
    monkeypatch.setattr(download, "_MIN_RATE", 1e12)
    with pytest.raises(CheckpointError, match=r"only 6 bytes arrived in \d+ s"):
        fetch_file(hostile(WHOLE), checksum="", folder=tmp_path)


@pytest.mark.parametrize("url", ["http://", "http://a/..", "http://[a/b.pth", "nonsense", "http://127.0.0.1:99999/a"])
def test_wrong_urls_are_errors_of_one_line(url, tmp_path):
    with pytest.raises(CheckpointError, match="cannot download"):
        fetch_file(url, folder=tmp_path)
