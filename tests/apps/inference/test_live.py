"""Streams on a network: the newest frame, breaks, addresses that cannot be reached; a server here sends motion JPEG."""

import itertools
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import cv2
import numpy as np
import pytest

from vitkit.apps.inference import find_images, inputs, live
from vitkit.apps.inference.inputs import find_files, is_camera, is_live, open_frames
from vitkit.apps.inference.live import LiveFrames, live_source, stream_name
from vitkit.errors import CheckpointError, DataError


def jpeg(value):
    return cv2.imencode(".jpg", np.full((48, 64, 3), value, np.uint8))[1].tobytes()


@contextmanager
def serving(*, frames, seconds, connections=10**6):
    """Serve motion JPEG whose frames get brighter by 4 from one to the next, anew at each connection."""
    opened = itertools.count()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

        def do_GET(self):
            if self.path == "/photo":
                self.send_response(200)
                self.send_header("Content-Type", "image/jpeg")
                self.send_header("Content-Length", str(len(jpeg(80))))
                self.end_headers()
                self.wfile.write(jpeg(80))
                return
            if next(opened) >= connections:
                self.send_error(503)
                return
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            self.end_headers()
            try:
                for k in range(frames):
                    data = jpeg(4 * k)
                    head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(data)}\r\n\r\n"
                    self.wfile.write(head.encode() + data + b"\r\n")
                    time.sleep(seconds)
            except OSError:  # nobody reads any more
                pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_the_newest_frame_is_read_and_those_before_are_passed_over():
    with serving(frames=60, seconds=0.02) as address, open_frames(live_source(f"{address}/video")) as stream:
        assert stream.num_frames is None
        number, frame = next(stream.frames)
        time.sleep(0.4)  # a model that is slower than the stream
        later, frame_later = next(stream.frames)
        assert int(later) >= int(number) + 3
        for name, array in ((number, frame), (later, frame_later)):
            assert array.shape == (48, 64, 3) and abs(int(array.mean()) - 4 * int(name)) <= 3
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("frames of")]


def test_every_nth_frame_of_a_stream():
    with serving(frames=60, seconds=0.01) as address, open_frames(live_source(f"{address}/video"), every=5) as stream:
        numbers = [int(name) for name, _ in itertools.islice(stream.frames, 4)]
        assert all(b - a >= 5 for a, b in itertools.pairwise(numbers))


def test_a_stream_that_breaks_off_is_opened_again_and_at_last_given_up(monkeypatch, caplog):
    monkeypatch.setattr(live, "_LONGEST_WAIT", 0.05)
    monkeypatch.setattr(live, "_MAX_ATTEMPTS", 3)
    with serving(frames=6, seconds=0.03, connections=3) as address:  # one of which looks at its type
        seen = []
        with pytest.raises(DataError, match=rf"^input: the stream {address}/video broke off, and cannot be opened"):
            for name, frame in find_images(f"{address}/video").named:
                seen.append((int(name), round(float(frame.mean()))))
    numbers = [number for number, _ in seen]
    assert numbers == sorted(numbers) and 6 <= numbers[-1] < 12  # numbered on after the break
    assert all(abs(value - 4 * (number % 6)) <= 3 for number, value in seen)
    waits = [record.getMessage() for record in caplog.records if "opened again in" in record.getMessage()]
    assert waits[0] == f"{address}/video: no frame after number 5; opened again in 0.05 s" and len(waits) == 1 + 3


def test_waits_between_attempts_double_up_to_the_longest(monkeypatch):
    class Broken:
        def __init__(self, *arguments):
            self.is_first = not waits

        def isOpened(self):
            return True

        def read(self):
            return False, None

        def get(self, key):
            return 0.0

        def release(self):
            pass

    waits = []
    monkeypatch.setattr(live.cv2, "VideoCapture", Broken)
    monkeypatch.setattr(live.threading.Event, "wait", lambda self, seconds=None: waits.append(seconds))
    stream = LiveFrames(live_source("rtsp://camera/1"))
    with pytest.raises(DataError, match="rtsp://camera/1 broke off"):
        next(stream.frames())
    assert [wait for wait in waits if wait] == [1, 2, 4, 8, 16] + [30] * 15


def test_an_address_that_cannot_be_reached_is_a_line_without_its_password(tmp_path):
    message = r"^input: the stream rtsp://127\.0\.0\.1:1/door cannot be opened. Is the address right, .*reached\?$"
    with pytest.raises(DataError, match=message):
        list(find_images("rtsp://me:secret@127.0.0.1:1/door").named)
    with pytest.raises(CheckpointError, match="cannot download http://127.0.0.1:1/door"):
        inputs.to_array("http://127.0.0.1:1/door")


def test_streams_are_told_from_images_and_numbered_cameras(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with serving(frames=1, seconds=0) as address:
        images, videos = find_files([f"{address}/photo", "rtsp://me:secret@10.0.0.3:554//live/101", f"{address}/video"])
        assert [name for _, name in images] == ["photo"] and np.asarray(inputs.to_array(images[0][0])).mean() == 80
        (path, name), (_, other) = videos
        assert str(path) == "rtsp://10.0.0.3:554//live/101" and path.address.startswith("rtsp://me:secret@")
        assert name == stream_name(path) == "10_0_0_3_live_101" and other == "127_0_0_1_video"
        assert is_live(path) and not is_camera(path)
        monkeypatch.setattr(inputs, "live_source", None)
        find_images(f"{address}/photo")  # once downloaded, nobody is asked
