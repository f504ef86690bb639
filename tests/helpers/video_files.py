"""Videos for tests: each frame shows its number, so that a wrong frame is noticed."""

from fractions import Fraction
from pathlib import Path

import numpy as np

_BITS = 8


def numbered_frame(number: int, height: int, width: int) -> np.ndarray:
    """Return (H, W, 3) uint8: the number's bits from left to right, white for 1, brighter towards the bottom."""
    bits = np.repeat([(number >> bit) & 1 for bit in range(_BITS)], -(-width // _BITS))[:width]
    frame = np.broadcast_to(bits[None, :, None] * 160, (height, width, 3))
    return (frame + np.linspace(0, 80, height)[:, None, None]).astype(np.uint8)


def number_of(frame: np.ndarray) -> int:
    """Read the number from a frame, whatever it was resized to."""
    width = frame.shape[1]
    columns = [int((bit + 0.5) * width / _BITS) for bit in range(_BITS)]
    return sum(int(frame[: frame.shape[0] // 4, x].mean() > 95) << bit for bit, x in enumerate(columns))


def write_video(
    path: Path, num_frames: int = 40, *, size: tuple[int, int] = (48, 64), durations: list[int] | None = None,
    rate: int = 30, codec: str = "libx264", pix_fmt: str = "yuv420p", **options: str,
) -> Path:  # fmt: skip
    """Write a video of numbered frames through PyAV.

    Args:
        size: (height, width).
        durations: durations of the frames in hundredths of 1 / rate, repeated; None: all equal.
        options: options of the codec, such as g="12" (frames between key frames).
    """
    import av

    parts = 1 if path.suffix == ".avi" else 100  # AVI's frames are at multiples of its unit
    unit = Fraction(1, parts * rate)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, options={"g": "12", **options})
        stream.height, stream.width, stream.pix_fmt = *size, pix_fmt
        stream.codec_context.time_base = stream.time_base = unit
        pts = 0
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(numbered_frame(number, *size), format="rgb24")
            frame.pts, frame.time_base = pts, unit
            container.mux(stream.encode(frame))
            pts += parts if durations is None else durations[number % len(durations)]
        container.mux(stream.encode(None))
    return path


def rotate(path: Path, matrix: tuple[int, int, int, int]) -> Path:
    """Write a rotation into an MP4 file, as telephones do: a, b, c, d of the matrix of its track's header."""
    data = bytearray(path.read_bytes())
    start = data.index(b"tkhd") + 44  # the type, then 40 bytes of a version-0 header before the matrix
    a, b, c, d = (value << 16 for value in matrix)
    values = (a, b, 0, c, d, 0, 0, 0, 1 << 30)
    data[start : start + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in values)
    path.write_bytes(data)
    return path
