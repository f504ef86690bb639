"""Files of any number of channels, of 8 or 16 bits, are read as stored, but upright."""

import sys

import cv2
import numpy as np
import pytest
from PIL import Image

from vitkit.apps.datasets.image_groups import read_shown
from vitkit.apps.datasets.writing import link_image
from vitkit.errors import DataError
from vitkit.io.channel_files import as_rgb, read_channels
from vitkit.io.image_files import is_rotated, pillow_to_array, read_image, upright_size

RNG = np.random.default_rng(0)
BITS = pytest.mark.parametrize("dtype", [np.uint8, np.uint16])


def image_of(channels, dtype):
    return RNG.integers(0, np.iinfo(dtype).max + 1, (7, 9, channels)).astype(dtype)


def in_16_bits(image):
    return image.astype(np.uint16) * (257 if image.dtype == np.uint8 else 1)


@BITS
@pytest.mark.parametrize("suffix", [".png", ".tiff"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_png_and_tiff_keep_the_order_of_channels(tmp_path, channels, suffix, dtype):
    image = image_of(channels, dtype)
    # OpenCV writes blue first.
    cv2.imwrite(f"{tmp_path}/a{suffix}", image if channels == 1 else image[:, :, [2, 1, 0, *range(3, channels)]])
    np.testing.assert_array_equal(read_channels(f"{tmp_path}/a{suffix}", channels), in_16_bits(image))


def test_gray_with_alpha_has_two_channels(tmp_path):
    image = image_of(2, np.uint8)
    Image.fromarray(image, "LA").save(tmp_path / "a.png")
    np.testing.assert_array_equal(read_channels(tmp_path / "a.png", 2), in_16_bits(image))


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright(tmp_path, suffix, orientation):
    image, exif = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 12)), Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / f"a.{suffix}", exif=exif)
    expected = read_image(tmp_path / f"a.{suffix}")[:, :, :1]
    np.testing.assert_array_equal(read_channels(tmp_path / f"a.{suffix}", 1), expected * np.uint16(257))
    assert upright_size(tmp_path / f"a.{suffix}") == expected.shape[1::-1]


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_colors_are_not_multiplied_by_the_fourth_channel(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)  # lower than max_pixels, which holds
    image = image_of(4, np.uint8)
    Image.fromarray(image, "RGBA").save(tmp_path / f"a.{suffix}")
    np.testing.assert_array_equal(read_channels(tmp_path / f"a.{suffix}", 4), in_16_bits(image))
    np.testing.assert_array_equal(read_image(tmp_path / f"a.{suffix}"), image[:, :, :3])


def test_pages_in_a_loop_are_damaged(tmp_path):
    cv2.imwritemulti(f"{tmp_path}/a.tif", list(np.moveaxis(image_of(2, np.uint8), 2, 0)))
    data = bytearray((tmp_path / "a.tif").read_bytes())
    start = int.from_bytes(data[4:8], "little")
    end = start + 2 + 12 * int.from_bytes(data[start : start + 2], "little")
    data[end : end + 4] = data[4:8]  # the first page is followed by itself
    (tmp_path / "a.tif").write_bytes(data)
    with pytest.raises(DataError, match="it is truncated or damaged: a page leads back to an earlier one"):
        read_channels(tmp_path / "a.tif", 2)


@BITS
@pytest.mark.parametrize("channels", [1, 2, 7])
def test_pages_and_arrays_have_any_number_of_channels(tmp_path, channels, dtype):
    image = image_of(channels, dtype)
    cv2.imwritemulti(f"{tmp_path}/pages.tif", list(np.moveaxis(image, 2, 0)))
    np.save(f"{tmp_path}/a.npy", image)
    np.save(f"{tmp_path}/big.npy", image.astype(image.dtype.newbyteorder(">")))
    np.save(f"{tmp_path}/fortran.npy", np.asfortranarray(image))
    for name in ("pages.tif", "a.npy", "big.npy", "fortran.npy"):
        np.testing.assert_array_equal(read_channels(f"{tmp_path}/{name}", channels), in_16_bits(image))


def test_samples_that_are_no_colors_are_read_by_tifffile(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    image = image_of(6, np.uint16)
    settings = dict(photometric="minisblack")
    tifffile.imwrite(tmp_path / "contiguous.tif", image, planarconfig="contig", **settings)
    tifffile.imwrite(tmp_path / "planar.tif", np.moveaxis(image, 2, 0), planarconfig="separate", **settings)
    tifffile.imwrite(tmp_path / "big.tif", image, planarconfig="contig", bigtiff=True, **settings)
    for name in ("contiguous", "planar", "big"):
        np.testing.assert_array_equal(read_channels(tmp_path / f"{name}.tif", 6), image)
    tifffile.imwrite(tmp_path / "four.tif", image[:, :, :4], planarconfig="contig", **settings)
    np.testing.assert_array_equal(read_channels(tmp_path / "four.tif", 4), image[:, :, :4])
    np.testing.assert_array_equal(read_shown(tmp_path / "four.tif"), as_rgb(image[:, :, :4]))
    colors = dict(photometric="rgb", planarconfig="separate")
    tifffile.imwrite(tmp_path / "planar_rgb.tif", np.moveaxis(image[:, :, :3], 2, 0), **colors)
    np.testing.assert_array_equal(read_channels(tmp_path / "planar_rgb.tif", 3), image[:, :, :3])
    with pytest.raises(ValueError, match="16 bits in separate uncompressed channels, which Pillow misreads"):
        pillow_to_array(Image.open(tmp_path / "planar_rgb.tif"))
    colors["extrasamples"] = ["unassalpha"]
    tifffile.imwrite(tmp_path / "planar_rgba.tif", np.moveaxis(image[:, :, :4], 2, 0), **colors)
    with pytest.raises(DataError, match=r"planar_rgba.tif'.*16 bits in separate uncompressed channels"):
        read_image(tmp_path / "planar_rgba.tif")
    np.testing.assert_array_equal(read_shown(tmp_path / "planar_rgba.tif"), as_rgb(image[:, :, :4]))
    turned = dict(planarconfig="contig", extratags=[(274, "H", 1, 6, True)], **settings)
    tifffile.imwrite(tmp_path / "turned.tif", image, **turned)
    np.testing.assert_array_equal(read_channels(tmp_path / "turned.tif", 6), np.rot90(image, -1))


def tiff_of(image, *, photometric=1, planar=1):
    """Return an uncompressed little-endian TIFF, by default with samples that are not colors."""
    height, width, channels = image.shape
    data, start = image.tobytes(), 8
    bits = np.full(channels, 8 * image.itemsize, "<u2").tobytes()
    tags = [(256, width), (257, height), (258, start + len(data)), (259, 1), (262, photometric)]
    tags += [(273, start), (277, channels), (278, height), (279, len(data)), (284, planar)]
    entries = b"".join(
        np.array([tag, 3 if tag == 258 else 4], "<u2").tobytes()
        + np.array([channels if tag == 258 else 1, value], "<u4").tobytes()
        for tag, value in tags
    )
    directory = np.array([len(tags)], "<u2").tobytes() + entries + bytes(4)
    return b"II*\0" + np.array([start + len(data) + len(bits)], "<u4").tobytes() + data + bits + directory


def test_images_whose_samples_are_no_colors_are_measured_and_linked(tmp_path):
    path = tmp_path / "a.tif"
    path.write_bytes(tiff_of(image_of(5, np.uint16)))
    assert upright_size(path) == (9, 7) and not is_rotated(path)
    assert link_image(path, tmp_path / "out", "b.tif").read_bytes() == path.read_bytes()
    with pytest.raises(DataError, match=r"a.tif'.*too large: its header gives 9x7 pixels"):
        upright_size(path, max_pixels=62)
    path.write_bytes(path.read_bytes()[:300])  # without its directory
    with pytest.raises(DataError, match=r"cannot decode '.*a.tif'"):
        link_image(path, tmp_path / "out", "c.tif")


def test_without_tifffile_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tifffile", None)
    (tmp_path / "a.tif").write_bytes(tiff_of(image_of(5, np.uint16)))
    with pytest.raises(DataError, match=r"a.tif'.*5 samples that are not RGB, which needs the package tifffile \(pip"):
        read_channels(tmp_path / "a.tif", 5)
    with pytest.raises(DataError, match=r"a.tif'.*which needs the package tifffile"):
        read_shown(tmp_path / "a.tif")
    (tmp_path / "b.tif").write_bytes(tiff_of(image_of(3, np.uint16), photometric=2, planar=2))
    with pytest.raises(DataError, match=r"3 samples of 16 bits in separate channels, which needs the package tifffile"):
        read_channels(tmp_path / "b.tif", 3)
    with pytest.raises(DataError, match=r"a.tif': has 5 channels \(height 7, width 9\); expected 6"):
        read_channels(tmp_path / "a.tif", 6)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 5, 2), np.uint8), "has 2 channels (height 4, width 5); expected 3"),
        (np.zeros((3, 40, 50), np.uint8), "It seems to be (C, H, W): store it as (H, W, C)."),
        (np.zeros((4, 5, 3), np.float32), "got float32 of shape (4, 5, 3); expected uint8 or uint16"),
        (np.array([[[{}]]], object), "an array of object of shape (1, 1, 1)"),
        (np.zeros((4, 5, 3, 1), np.uint8), "of shape (4, 5, 3, 1); expected uint8 or uint16 of shape (H, W, C)"),
        (np.zeros((300, 300, 3), np.uint8), "too large: its header gives 300x300 pixels"),
        (np.zeros((0, 5, 3), np.uint8), "has no pixels"),
    ],
)
def test_wrong_arrays_are_named(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(DataError) as error:
        read_channels(tmp_path / "a.npy", 3, max_pixels=10_000)
    assert message in str(error.value) and "a.npy'" in str(error.value)


@pytest.mark.parametrize("suffix", [".png", ".tiff", ".npy"])
def test_truncated_and_other_files_are_errors(tmp_path, suffix):
    path, image = tmp_path / f"a{suffix}", image_of(4, np.uint16)
    np.save(path, image) if suffix == ".npy" else cv2.imwrite(str(path), image)
    data = path.read_bytes()
    for count in (0, 4, 20, 60, len(data) - 40):
        path.write_bytes(data[:count])
        with pytest.raises(DataError, match=f"images: cannot decode '.*a{suffix}'|has 1 channels"):
            read_channels(path, 4)
    with pytest.raises(DataError, match=r"too large: its header gives 9x7 pixels"):
        path.write_bytes(data)
        read_channels(path, 4, max_pixels=60)
    with pytest.raises(DataError, match=r"images: cannot read '.*none.png'"):
        read_channels(tmp_path / "none.png", 4)


def test_hundreds_of_channels_are_read(tmp_path):
    image = image_of(224, np.uint16)
    np.save(tmp_path / "a.npy", image)
    np.testing.assert_array_equal(read_channels(tmp_path / "a.npy", 224), image)


def test_images_of_unknown_channels_are_read_to_be_shown(tmp_path):
    image = image_of(5, np.uint16)
    for array in (image, image[:, :, :1], image[:, :, 0]):
        np.save(tmp_path / "a.npy", array)
        np.testing.assert_array_equal(read_shown(tmp_path / "a.npy"), as_rgb(np.atleast_3d(array)))
    rgb = image_of(3, np.uint8)
    cv2.imwrite(str(tmp_path / "a.png"), rgb[:, :, ::-1])
    np.testing.assert_array_equal(read_shown(tmp_path / "a.png"), rgb)
    for wrong in (np.zeros(4), np.zeros((4, 5, 3), np.float32)):
        np.save(tmp_path / "a.npy", wrong)
        with pytest.raises(DataError, match=r"images.*a.npy'.*expected uint8 or uint16"):
            read_shown(tmp_path / "a.npy")


def test_a_file_is_not_read_beyond_what_it_may_hold(tmp_path):
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY" + bytes(1 << 21))
    with pytest.raises(DataError, match=r"larger than 100 pixels of 2 channels can be"):
        read_channels(tmp_path / "a.npy", 2, max_pixels=100)


def test_images_are_drawn_stretched_from_their_first_channels():
    rgb = image_of(3, np.uint8)
    assert as_rgb(rgb) is rgb
    dark = np.zeros((10, 10, 5), np.uint16)
    dark[:, :, 1] = np.arange(100).reshape(10, 10) + 300  # a sensor of few levels
    dark[:, :, 4] = 65535
    drawn = as_rgb(dark)
    assert drawn.shape == (10, 10, 3) and not drawn[:, :, [0, 2]].any()
    assert drawn[0, 0, 1] == 0 and drawn[-1, -1, 1] == 255 and 120 < drawn[5, 0, 1] < 136
    gray = as_rgb(dark[:, :, 1:3])
    np.testing.assert_array_equal(gray, np.repeat(drawn[:, :, 1:2], 3, axis=2))
