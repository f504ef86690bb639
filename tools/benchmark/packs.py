"""Time reading images from a pack, on a disk and on a server of this machine, against loose files."""

import multiprocessing
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

from vitkit.apps.datasets.packing import write_pack
from vitkit.errors import DataError
from vitkit.io.image_files import read_image
from vitkit.io.packs import mount
from vitkit.tools.benchmark.loader import draw_photos
from vitkit.tools.benchmark.timing import Call, Measurement, Options, compare

_NUM_IMAGES = 256
_SETTINGS = ("VITKIT_CACHE", "VITKIT_CACHE_GB")


def measure(part: str, options: Options) -> list[Measurement]:
    """Read and decode images (at most 256) in random order in one process; seconds are per image.

    All files are in the system's memory before, as are those of the server. "first epoch" begins with an empty cache.

    Raises:
        DataError: there is no JPEG in the folder.
    """
    before = {name: os.environ.get(name) for name in _SETTINGS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        names = _write_images(options.images, folder / "data")
        write_pack(folder / "data", folder / "served/pack")
        os.environ["VITKIT_CACHE"] = str(folder / "cache")
        try:
            with _server(folder / "served") as port:
                os.environ["VITKIT_CACHE_GB"] = "20"
                roots = {
                    "files": str(folder / "data"),
                    "pack on a disk": mount(str(folder / "served/pack")),
                    "pack on a server, first epoch": mount(f"http://127.0.0.1:{port}/pack"),
                    "pack on a server, later epochs": mount(f"http://127.0.0.1:{port}/pack"),
                    "pack on a server, without a cache": mount(f"http://localhost:{port}/pack"),
                }
                builders = {name: partial(_reader, name, root, names, folder) for name, root in roots.items()}
                rows = compare("reading and decoding an image", builders, options, memory=False)
        finally:
            for setting, value in before.items():
                os.environ.pop(setting, None)
                if value is not None:
                    os.environ[setting] = value
    return [row._replace(seconds=row.seconds / len(names)) for row in rows]


def _reader(name: str, root: str, names: list[str], folder: Path) -> Call:
    """Return what reads all images; it opens the pack anew, with the cache that the row's name says."""
    os.environ["VITKIT_CACHE_GB"] = "0" if name.endswith("without a cache") else "20"
    read_image(Path(root, names[0]))

    def read() -> None:
        if name.endswith("first epoch"):
            shutil.rmtree(folder / "cache/blocks", ignore_errors=True)
        for image in names:
            read_image(Path(root, image))

    return read


def _write_images(photos: Path | None, folder: Path) -> list[str]:
    """Fill a folder with JPEGs, or with copies of drawn ones; return their names in random order."""
    if photos and not any(photos.glob("*.jpg")):
        raise DataError(f"--images: no *.jpg in '{photos}'. Name a folder of JPEGs, or leave it out to draw some.")
    folder.mkdir()
    with tempfile.TemporaryDirectory() as drawn:
        sources = sorted(photos.glob("*.jpg"))[:_NUM_IMAGES] if photos else draw_photos(Path(drawn))
        names = [f"{number:06d}.jpg" for number in range(len(sources) if photos else _NUM_IMAGES)]
        for number, name in enumerate(names):
            shutil.copyfile(sources[number % len(sources)], folder / name)
    random.Random(0).shuffle(names)
    return names


@contextmanager
def _server(folder: Path) -> Iterator[int]:
    """Serve a folder with ranges from another process; yield the port."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(str(folder), theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def _serve(folder: str, pipe: Connection) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Ranges, folder)) as server:
        pipe.send(server.server_port)
        server.serve_forever()


class _Ranges(BaseHTTPRequestHandler):
    """Answers requests for a file or a range of it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, folder: str, *arguments: object):
        self.folder = folder
        super().__init__(*arguments)

    def do_GET(self) -> None:
        path = os.path.join(self.folder, self.path.lstrip("/"))
        size = os.path.getsize(path)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(asked[1]), min(int(asked[2]), size - 1)) if asked else (0, size - 1)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        with open(path, "rb") as file:
            file.seek(first)
            self.wfile.write(file.read(last + 1 - first))

    log_message: Callable[..., None] = staticmethod(lambda *_: None)
