"""Image files: which formats are opened, how large they may be, and where they may be."""

import json
import os
import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image

from vitkit import build_dataset
from vitkit.data.datasets.captions import CocoCaptions
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.datasets.panoptic import CocoPanoptic
from vitkit.errors import DataError
from vitkit.io.image_files import (
    FORMATS,
    check_inside,
    is_rotated,
    read_header,
    read_image,
    read_label_map,
    upright_size,
)

BLACK = np.zeros((6, 8, 3), np.uint8)


def png_header(width: int, height: int) -> bytes:
    """Return a PNG whose header has this size, without any pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def jpeg_header(width: int, height: int, path) -> bytes:
    """Write a small JPEG whose header is changed to another size."""
    Image.fromarray(BLACK).save(path, format="JPEG")
    data = bytearray(path.read_bytes())
    start = data.index(b"\xff\xc0") + 5
    data[start : start + 4] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_read(kind, tmp_path):
    pixels = np.kron(np.arange(0, 240, 20, dtype=np.uint8).reshape(3, 4), np.ones((8, 8), np.uint8))
    Image.fromarray(pixels).save(tmp_path / "a.img", format=kind, quality=95)
    assert np.abs(read_image(tmp_path / "a.img").mean(axis=2) - pixels).mean() < 2
    header = read_header(tmp_path / "a.img")
    assert (header.height, header.width) == pixels.shape


def test_an_eps_file_is_not_opened(tmp_path, monkeypatch):
    program = tmp_path / "gs"  # the program that Pillow would start to render it
    program.write_text(f"#!/bin/sh\necho ran > {tmp_path / 'ran'}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "a.jpg").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 6\n%%EndComments\nshowpage\n%%EOF\n"
    )
    for read in (read_image, read_label_map, read_header, is_rotated):
        with pytest.raises(DataError, match=r"a\.jpg' \(\d+ bytes\): not an image of a known format \(JPEG, PNG"):
            read(tmp_path / "a.jpg")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("read", [read_image, read_label_map, read_header])
def test_file_with_too_many_pixels_is_refused_before_decoding(read, tmp_path, monkeypatch):
    monkeypatch.setattr(cv2, "imdecode", lambda *_: pytest.fail("decoded"))
    path = tmp_path / "a.img"
    for data in (png_header(40000, 30000), png_header(2**31 - 1, 2**31 - 1), jpeg_header(30000, 30000, path)):
        path.write_bytes(data)
        with pytest.raises(
            DataError, match=r"a\.img' .*: too large: .* set data\.max_image_pixels \(default: 178956970\)"
        ):
            read(path)


def test_pixel_limit_can_be_set_for_a_dataset(tmp_path):
    Image.fromarray(BLACK).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png", max_pixels=48).shape == BLACK.shape
    with pytest.raises(DataError, match="too large: its header gives 8x6 pixels"):
        read_image(tmp_path / "a.png", max_pixels=47)
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes() + bytes(8 * 48))
    with pytest.raises(DataError, match="too large: it has more than 8 bytes for each pixel allowed. If"):
        read_image(tmp_path / "b.png", max_pixels=48)
    spec = dict(type="CocoDetection", images=str(tmp_path), annotations=detection_file(tmp_path, "a.png"))
    assert build_dataset(spec, max_image_pixels=48)[0]["image"].shape == (3, 6, 8)
    with pytest.raises(DataError, match="too large"):
        build_dataset(spec, max_image_pixels=47)[0]


def test_size_of_a_png_is_read_without_decoding_and_follows_exif_after_the_pixels(tmp_path, monkeypatch):
    exif = Image.Exif()
    exif[0x112] = 6
    path = tmp_path / "a.png"
    Image.fromarray(BLACK).save(path, exif=exif)
    data = path.read_bytes()
    at = data.index(b"eXIf") - 4
    end = at + 12 + struct.unpack(">I", data[at : at + 4])[0]
    path.write_bytes(data[:at] + data[end:-12] + data[at:end] + data[-12:])
    assert upright_size(path) == read_image(path).shape[1::-1] == (6, 8)

    def load(image):
        raise AssertionError("decoded")

    Image.fromarray(BLACK).save(path)
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", load)
    assert upright_size(path) == (8, 6) and not is_rotated(path)


def test_decoder_errors_become_data_errors(tmp_path, monkeypatch):
    def fail(*_):
        raise cv2.error("OpenCV: (-215:Assertion failed) pixels <= CV_IO_MAX_IMAGE_PIXELS")

    monkeypatch.setattr(cv2, "imdecode", fail)
    Image.fromarray(BLACK).save(tmp_path / "a.png")
    assert (read_image(tmp_path / "a.png") == 0).all()  # Pillow reads it
    (tmp_path / "b.png").write_bytes(png_header(8, 6))
    with pytest.raises(DataError, match=r"images: cannot decode '.*b\.png'"):
        read_image(tmp_path / "b.png")


@pytest.mark.parametrize("read", [read_image, read_label_map])
def test_a_png_whose_pixels_have_a_wrong_checksum_is_an_error(read, tmp_path):
    path = tmp_path / "a.png"
    Image.fromarray(BLACK[:, :, 0]).save(path)
    assert (read(path) == 0).all()
    data = bytearray(path.read_bytes())
    data[data.index(b"IEND") - 5] ^= 1  # the last byte of the checksum of the pixels
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"cannot decode '.*a\.png' .*IDAT"):
        read(path)


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    for name in ("pipe.jpg", "zero.jpg"):
        with pytest.raises(DataError, match=rf"cannot read '.*{name}' \(it is a device or a pipe\)"):
            read_image(tmp_path / name)
    with pytest.raises(DataError, match="it is a folder"):
        read_image(tmp_path)


def detection_file(folder, name: str) -> str:
    content = {
        "images": [{"id": 1, "file_name": name, "height": 6, "width": 8}],
        "annotations": [],
        "categories": [{"id": 1, "name": "cat", "isthing": 1}],
    }
    (folder / "detection.json").write_text(json.dumps(content))
    return str(folder / "detection.json")


@pytest.mark.parametrize("name", ["../a.png", "deep/../../a.png", "{root}/a.png"])
def test_a_file_name_that_leads_outside_its_folder_is_an_error(name, tmp_path):
    Image.fromarray(BLACK).save(tmp_path / "a.png")
    images = tmp_path / "images"
    (images / "deep").mkdir(parents=True)
    name = name.format(root=tmp_path)
    file = detection_file(tmp_path, name)
    with pytest.raises(DataError, match=r"detection\.json: file_name '.*a\.png' lies outside .* allow_outside=true"):
        CocoDetection(str(images), file)
    assert CocoDetection(str(images), file, allow_outside=True)[0]["image"].shape == (3, 6, 8)

    content = json.loads((tmp_path / "detection.json").read_text())
    captions = {**content, "annotations": [{"id": 1, "image_id": 1, "caption": "a cat"}]}
    (tmp_path / "captions.json").write_text(json.dumps(captions))
    with pytest.raises(DataError, match="lies outside the folder"):
        CocoCaptions(str(images), str(tmp_path / "captions.json"))
    Image.fromarray(BLACK).save(images / "b.png")
    content["images"][0]["file_name"] = "b.png"
    maps = {**content, "annotations": [{"image_id": 1, "file_name": name, "segments_info": []}]}
    (tmp_path / "panoptic.json").write_text(json.dumps(maps))
    with pytest.raises(DataError, match="lies outside the folder"):
        CocoPanoptic(str(images), str(images), str(tmp_path / "panoptic.json"))


def test_names_and_links_inside_the_folder_are_read(tmp_path):
    images = tmp_path / "images"
    (images / "deep").mkdir(parents=True)
    Image.fromarray(BLACK).save(tmp_path / "elsewhere.png")
    (images / "a..b.png").symlink_to(tmp_path / "elsewhere.png")
    check_inside(images, ["a..b.png", "deep/../a..b.png", str(images / "a..b.png"), "c:d.png"], "file")
    dataset = CocoDetection(str(images), detection_file(tmp_path, "deep/../a..b.png"))
    assert dataset[0]["image"].shape == (3, 6, 8)
