"""Images, and maps whose pixels are classes or segments."""

import io
import random
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
from fuzz.formats import Format, naming
from fuzz.mutate import mutate_bytes
from PIL import Image, PngImagePlugin

from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.datasets.panoptic import CocoPanoptic
from vitkit.data.datasets.semantic import SemanticFolder
from vitkit.errors import DataError
from vitkit.io.image_files import MAX_PIXELS, is_rotated, read_header, read_image

_MODES = ("L", "1", "RGBA", "LA", "CMYK", "F", "P", "I;16", "I")
_PNG_START = b"\x89PNG\r\n\x1a\n"
_OTHERS = (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 32\n%%EndComments\nshowpage\n", b"", b"GIF89a", b"<svg/>")
_OTHERS += (b"\0" * 4096, b"BM" + b"\xff" * 60, b"P6 40 32 255\n")
_SIDES = (0, 1, 7, 31, 33, 2**15, 2**16 - 1, 30_000, 2**31 - 1, 2**32 - 1)


def odd_image(path: Path, rng: random.Random) -> bytes:
    """The image in another format, mode or size, with changed parts, or damaged."""
    data = path.read_bytes()
    if rng.random() < 0.5:
        data = resaved(path, rng)
    action = rng.choice(["bytes", "bytes", "bytes", "structure", "structure", "structure", "nothing", "other"])
    if action == "bytes":
        return mutate_bytes(data, rng)
    if action == "structure":
        return mutate_png(data, rng) if data.startswith(_PNG_START) else mutate_sizes(data, rng)
    if action == "other":
        return rng.choice([*_OTHERS, data * 2])
    return data


def resaved(path: Path, rng: random.Random) -> bytes:
    """The image in another format, mode or size."""
    photo, data = Image.open(path), io.BytesIO()
    change = rng.choice(["mode", "size", "format", "format", "rotated"])
    if change == "mode":
        mode = rng.choice(_MODES)
        photo = (photo.convert("L") if mode == "I;16" else photo).convert(mode)
    elif change == "size":
        photo = photo.resize((rng.choice([1, 39, 40, 41]), rng.choice([1, 31, 32, 33])), Image.Resampling.NEAREST)
    formats = {"1": "PNG", "CMYK": "TIFF", "F": "TIFF", "I;16": "PNG", "I": "TIFF", "LA": "PNG"}
    choice = rng.choice(["PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "JPEG2000", "TGA", "ICO"])
    exif = Image.Exif()
    if change == "rotated":
        exif[0x0112] = rng.choice([0, 1, 3, 6, 8, 9, 2**16 - 1])
        photo.convert("RGB").save(data, format=rng.choice(["JPEG", "PNG", "WEBP", "TIFF"]), exif=exif)
    else:
        photo.save(data, format=formats.get(photo.mode) or (choice if change == "format" else "PNG"))
    return data.getvalue()


def mutate_png(data: bytes, rng: random.Random) -> bytes:
    """Change, remove, repeat or swap chunks of a PNG; every checksum is right again."""
    chunks, place = [], len(_PNG_START)
    while place < len(data):
        length = struct.unpack(">I", data[place : place + 4])[0]
        chunks.append((data[place + 4 : place + 8], data[place + 8 : place + 8 + length]))
        place += 12 + length
    action = rng.choice(["size", "size", "depth", "body", "pixels", "remove", "repeat", "swap", "new"])
    k = rng.randrange(len(chunks))
    kind, body = chunks[k]
    if action in ("size", "depth"):
        header = list(struct.unpack(">IIBBBBB", chunks[0][1]))
        number = rng.choice(_SIDES if action == "size" else (0, 1, 2, 3, 4, 6, 8, 16, 255))
        header[rng.randrange(2) if action == "size" else rng.randrange(2, 7)] = number
        chunks[0] = (b"IHDR", struct.pack(">IIBBBBB", *header))
    elif action == "body" and body:
        chunks[k] = (kind, mutate_bytes(body, rng))
    elif action == "pixels":
        pixels = b"".join(zlib.decompress(body) for kind, body in chunks if kind == b"IDAT")
        chunks = [chunk for chunk in chunks if chunk[0] not in (b"IDAT", b"IEND")]
        chunks += [(b"IDAT", zlib.compress(mutate_bytes(pixels, rng))), (b"IEND", b"")]
    elif action == "remove":
        del chunks[k]
    elif action == "repeat":
        chunks.insert(rng.randrange(len(chunks) + 1), chunks[k])
    elif action == "swap":
        other = rng.randrange(len(chunks))
        chunks[k], chunks[other] = chunks[other], chunks[k]
    else:
        extra = rng.choice([b"tRNS", b"PLTE", b"gAMA", b"zTXt", b"iCCP", b"eXIf", b"acTL", b"fcTL", b"fdAT", b"abcd"])
        chunks.insert(rng.randrange(len(chunks) + 1), (extra, rng.randbytes(rng.choice([0, 1, 6, 26, 768]))))
    parts = [struct.pack(">I", len(b)) + kind + b + struct.pack(">I", zlib.crc32(kind + b)) for kind, b in chunks]
    return _PNG_START + b"".join(parts)


def mutate_sizes(data: bytes, rng: random.Random) -> bytes:
    """Replace the image's height or width, wherever its number occurs in the file."""
    data = bytearray(data)
    for form in rng.sample((">H", "<H", ">I", "<I"), 4):
        number = struct.pack(form, rng.choice([32, 40]))
        place = data.find(number)
        if place >= 0:
            highest = 2 ** (8 * len(number)) - 1
            data[place : place + len(number)] = struct.pack(form, min(rng.choice(_SIDES), highest))
            break
    return bytes(data)


def strictly_read(data: bytes) -> np.ndarray | None:
    """Return an image's pixels if Pillow finds no error in it, including every checksum of a PNG; otherwise None."""
    try:
        with Image.open(io.BytesIO(data)) as photo:
            if isinstance(photo, PngImagePlugin.PngImageFile):
                photo.verify()
        with Image.open(io.BytesIO(data)) as photo:
            return np.asarray(photo)
    except Exception:
        return None


def _write_image(rng: random.Random, folder: Path, world: Path) -> None:
    (folder / "1.jpg").write_bytes(odd_image(world / "images" / "1.jpg", rng))


def _write_map(rng: random.Random, folder: Path, world: Path) -> None:
    kind = rng.choice(["maps", "labels"])
    (folder / kind).mkdir()
    (folder / kind / "1.png").write_bytes(odd_image(world / kind / "1.png", rng))


def check_image(folder: Path, world: Path) -> None:
    """Check that every reader reads an image with the size of its header, or refuses it by name."""
    path = folder / "1.jpg"
    with naming(str(path)):
        header = read_header(path)
        image = read_image(path)
        rotated = is_rotated(path)
    assert image.dtype == np.uint8 and image.shape[2:] == (3,) and header.height * header.width <= MAX_PIXELS
    sizes = [(header.height, header.width)] + [(header.width, header.height)] * rotated
    assert image.shape[:2] in sizes, (image.shape, header)
    copy = _copy_of(world, folder / "world")
    shutil.copy(path, copy / "images" / "1.jpg")
    assert CocoDetection(str(copy / "images"), str(copy / "instances.json"))[1]["image"].shape == (3, 32, 40)


def check_map(folder: Path, world: Path) -> None:
    """Check that damage does not change a label or a segment unnoticed."""
    copy = _copy_of(world, folder / "world")
    kind = "maps" if (folder / "maps").exists() else "labels"
    path = copy / kind / "1.png"
    shutil.copy(folder / kind / "1.png", path)
    with naming(str(path)):
        if kind == "labels":
            dataset = SemanticFolder(str(copy / "images"), str(copy / "labels"), classes=["cat", "sky"])
            loaded, whole = dataset.load_semantic(1), dataset.load_semantic(0)
            assert set(np.unique(loaded).tolist()) <= {0, 1, 255}
            dataset.image_size(1)
        else:
            dataset = CocoPanoptic(str(copy / "images"), str(copy / "maps"), str(copy / "panoptic.json"))
            loaded, whole = dataset.load_panoptic(1).panoptic, dataset.load_panoptic(0).panoptic
            assert set(np.unique(loaded).tolist()) <= {0, 1, 2}
        dataset[1]
    # A PNG has checksums, by which damage can always be noticed.
    if strictly_read(path.read_bytes()) is None:
        assert np.array_equal(loaded, whole), "a damaged map was read as another one"


def _copy_of(world: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(world, folder))


FORMATS = [
    Format("images", _write_image, check_image, DataError, 5),
    Format("maps", _write_map, check_map, DataError, 4),
]
