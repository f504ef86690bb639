"""Video files, and the lists of videos with their classes."""

import json
import random
import struct
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from fuzz.formats import Format, naming
from fuzz.mutate import mutate_bytes, mutate_json
from helpers.video_files import write_video

from vitkit.data.datasets.clip_sampling import ClipSampling
from vitkit.data.datasets.video import SomethingSomething, VideoList
from vitkit.errors import DataError
from vitkit.io.image_files import MAX_PIXELS
from vitkit.io.video_files import open_video

try:
    import av
except ImportError:
    av = None

_SOUND = {
    "b_frames.mp4": dict(bf="3"),
    "variable_rate.mp4": dict(durations=[100, 30, 250]),
    "variable_rate.mkv": dict(durations=[100, 30, 250]),
    "b_frames.avi": dict(bf="3"),
    "stream.ts": dict(bf="3"),
    "mpeg4.avi": dict(codec="mpeg4"),
}
_MP4_BOXES = b"tkhd mvhd mdhd stts ctts stsz stco stsc stss elst stsd avcC hdlr moov trak mdat".split()
_NUMBERS = (0, 1, 2, 255, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
_PLAYLISTS = (
    b"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nsound.ts\n#EXT-X-ENDLIST\n",
    b"ffconcat version 1.0\nfile 'sound.mp4'\n",
    b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nc=IN IP4 127.0.0.1\r\nm=video 5000 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\n",
)
_LABELS = ("0", "1", "2", "cat", "a dog", "-1", "1.5", "²", "999999999", "9" * 5000, "", "\0")
_PATHS = ("images", "maps", "labels", "a b", "../images", "/dev/zero", "/images", ".", "images/../..", "\0", "é", "C:x")


@cache
def sound_videos() -> dict[str, bytes]:
    """The content of small video files by their names."""
    with tempfile.TemporaryDirectory() as folder:
        return {name: write_video(Path(folder, name), 16, **kind).read_bytes() for name, kind in _SOUND.items()}


def _write_video(rng: random.Random, folder: Path, world: Path) -> None:
    name = rng.choice(list(_SOUND))
    data = sound_videos()[name]
    for _ in range(rng.choice([1, 1, 2, 4])):
        action = rng.choice(["bytes", "number", "number", "box", "box", "cut", "join"])
        if action == "bytes":
            data = mutate_bytes(data, rng)
        elif action == "cut":
            data = data[: rng.randrange(len(data) + 1)]
        elif action == "join":
            data += sound_videos()[rng.choice(list(_SOUND))]
        else:
            data = _with_other_number(data, rng, in_box=action == "box")
    if rng.random() < 0.03:
        data = rng.choice([*_PLAYLISTS, (world / "images" / "0.jpg").read_bytes()])
    (folder / rng.choice([name, "video.mp4", "video.avi", "video.webm"])).write_bytes(data)


def _with_other_number(data: bytes, rng: random.Random, *, in_box: bool) -> bytes:
    """Write an extreme number into the first or the last bytes, where headers are, or into a box of an MP4."""
    data = bytearray(data)
    start = rng.choice([0, max(0, len(data) - 2000)]) + rng.randrange(min(2000, len(data) or 1))
    starts = [data.find(box) for box in _MP4_BOXES if box in data]
    if in_box and starts:
        start = rng.choice(starts) + 4 * rng.randrange(-1, 20)
    form = rng.choice([">I", "<I", ">H", "<H", "B"])
    size = struct.calcsize(form)
    start = max(0, start)
    data[start : start + size] = struct.pack(form, rng.choice(_NUMBERS) % 256**size)
    return bytes(data)


def check_video(folder: Path, world: Path) -> None:
    """Check that an accepted video's frames have ascending times and one size, and are equal when read again."""
    path = next(path for path in folder.iterdir() if path.suffix in (".mp4", ".mkv", ".avi", ".ts", ".webm"))
    with naming(str(path)), open_video(path) as video:
        times, info = video.times, video.info
        count = len(times)
        assert times.dtype == np.float64 and times.shape == (info.num_frames,) and count >= 1
        assert times[0] == 0 and np.isfinite(times).all() and (np.diff(times) >= 0).all()
        assert np.isfinite(info.seconds) and info.seconds > 0 and 1 <= info.height * info.width <= MAX_PIXELS
        numbers = sorted({0, count // 2, count - 1})
        frames = list(video.frames(numbers))
        assert len(frames) == len(numbers)
        assert all(frame.shape == (info.height, info.width, 3) and frame.dtype == np.uint8 for frame in frames)
        again = list(video.frames(numbers))
        clips = ClipSampling(num_clips=2).numbers(times, np.random.default_rng(0), path.name)
        assert clips.min() >= 0 and clips.max() < count
    assert all(np.array_equal(first, second) for first, second in zip(frames, again, strict=True))
    assert not path.read_bytes().startswith((b"#EXTM3U", b"ffconcat", b"v=0")), "a playlist was opened"


def _write_list(rng: random.Random, folder: Path, world: Path) -> None:
    (folder / "classes.txt").write_bytes(rng.choice(["cat\na dog\nsky\n", "x\n" * 3, "", "", ""]).encode())
    if rng.random() < 0.5:
        lines = [f"{path} {label}" for label, path in enumerate(("images", "maps", "labels"))]
        for _ in range(rng.choice([0, 1, 1, 2])):
            lines.insert(rng.randrange(4), rng.choice(_PATHS) + rng.choice([" ", "\t", ",", ""]) + rng.choice(_LABELS))
        data = "\n".join(lines).encode()
        (folder / "list.txt").write_bytes(mutate_bytes(data, rng) if rng.random() < 0.2 else data)
        return
    names = ("images", "maps", "labels")
    entries = [{"id": name, "template": f"Holding [{k}]"} for k, name in enumerate(names)]
    labels = {f"Holding {k}": str(k) for k in range(3)}
    first = rng.random() < 0.5
    (folder / "videos.json").write_bytes(mutate_json(entries, rng) if first else json.dumps(entries).encode())
    (folder / "classes.json").write_bytes(json.dumps(labels).encode() if first else mutate_json(labels, rng))


def check_list(folder: Path, world: Path) -> None:
    """Check that each accepted video is in the folder, has one of the classes, and opens or is refused by name."""
    if (folder / "list.txt").exists():
        class_file = str(folder / "classes.txt") if (folder / "classes.txt").stat().st_size else None
        dataset = VideoList(str(folder / "list.txt"), str(world), class_file=class_file)
    else:
        dataset = SomethingSomething(str(folder / "videos.json"), str(folder / "classes.json"), str(world))
    assert len(dataset) >= 1
    for index in range(len(dataset)):
        assert 0 <= dataset.label(index) < len(dataset.classes)
        path = dataset.image_path(index)
        assert path.resolve().is_relative_to(world.resolve()), path
        with naming(str(path)), dataset.open(index) as video:
            assert len(video.times) == 3


FORMATS = [Format("video_lists", _write_list, check_list, DataError, 2)]
if av is not None:
    FORMATS.append(Format("videos", _write_video, check_video, DataError, 4, lambda *_: sound_videos()))
