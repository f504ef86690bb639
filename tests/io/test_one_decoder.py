"""What is reported of an image file is what its pixels are: size, orientation and brightness, as Pillow reads them."""

import io
import warnings

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from vitkit.errors import DataError
from vitkit.io.channel_files import read_channels
from vitkit.io.image_files import is_rotated, read_image, read_label_map, upright_size

PIXELS = np.stack(np.meshgrid(np.arange(10) * 25, np.arange(6) * 40, [90]), axis=-1)[:, :, 0].astype(np.uint8)
PHOTO = Image.fromarray(PIXELS)


def exif_of(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def xmp_of(orientation):
    return f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()


def raw_profile(orientation, *, compress):
    data, info = exif_of(orientation).tobytes(), PngInfo()
    info.add_text("Raw profile type exif", f"\nexif\n{len(data):8}\n{data.hex()}\n", zip=compress)
    return info


def xmp_text(orientation):
    info = PngInfo()
    info.add_itxt("XML:com.adobe.xmp", xmp_of(orientation).decode())
    return info


def tiff_tags(**tags):
    directory = ImageFileDirectory_v2()
    for tag, value in tags.items():
        directory[int(tag[1:])] = value
    return directory


ANIMATED = dict(save_all=True, append_images=[ImageOps.invert(PHOTO)], duration=50)
SAVED = {
    "jpeg_exif": lambda o: dict(format="JPEG", exif=exif_of(o)),
    "jpeg_xmp": lambda o: dict(format="JPEG", xmp=xmp_of(o)),
    "png_exif": lambda o: dict(format="PNG", exif=exif_of(o)),
    "png_profile": lambda o: dict(format="PNG", pnginfo=raw_profile(o, compress=False)),
    "png_compressed_profile": lambda o: dict(format="PNG", pnginfo=raw_profile(o, compress=True)),
    "png_xmp": lambda o: dict(format="PNG", pnginfo=xmp_text(o)),
    "webp_exif": lambda o: dict(format="WEBP", exif=exif_of(o)),
    "animated_webp_exif": lambda o: dict(format="WEBP", exif=exif_of(o), **ANIMATED),
    "tiff_tag": lambda o: dict(format="TIFF", tiffinfo=tiff_tags(_274=o)),
    "tiff_xmp": lambda o: dict(format="TIFF", tiffinfo=tiff_tags(_700=xmp_of(o))),
    "tiff_both": lambda o: dict(format="TIFF", tiffinfo=tiff_tags(_274=3, _700=xmp_of(o))),
}


@pytest.mark.parametrize("kind", SAVED)
@pytest.mark.parametrize("orientation", [0, 1, 2, 3, 5, 6, 8, 9])
def test_pixels_are_turned_by_the_orientation_that_is_reported(tmp_path, kind, orientation):
    path = tmp_path / "a.img"
    PHOTO.save(path, **SAVED[kind](orientation))
    with Image.open(path) as image:
        expected = np.array(ImageOps.exif_transpose(image).convert("RGB"))
    np.testing.assert_array_equal(read_image(path), expected)
    assert upright_size(path) == expected.shape[1::-1]
    assert is_rotated(path) == (kind == "tiff_both" or 2 <= orientation <= 8)
    if orientation in (6, 8) and kind != "tiff_both":
        assert upright_size(path) == (6, 10)
    channels = read_channels(path, 3)
    np.testing.assert_array_equal(channels, expected * np.uint16(257))


@pytest.mark.parametrize("exif", [b"Exif\0\0damaged", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0"])
def test_an_image_with_damaged_tags_is_taken_as_stored(tmp_path, exif):
    PHOTO.save(tmp_path / "a.png", exif=exif)
    np.testing.assert_array_equal(read_image(tmp_path / "a.png"), PIXELS)
    assert upright_size(tmp_path / "a.png") == (10, 6) and not is_rotated(tmp_path / "a.png")


@pytest.mark.parametrize("maximum", [1, 15, 100, 254, 256, 4095, 65535])
@pytest.mark.parametrize("kind", ["P2", "P3", "P5", "P6"])
def test_gray_and_color_files_are_scaled_by_their_maximum(tmp_path, kind, maximum):
    channels = 1 if kind in ("P2", "P5") else 3
    values = np.linspace(0, maximum, 4 * 5 * channels).astype(int).reshape(4, 5, channels)
    if kind in ("P2", "P3"):
        body = b" ".join(b"%d" % value for value in values.ravel())
    else:
        body = values.astype(">u2" if maximum > 255 else np.uint8).tobytes()
    path = tmp_path / "a.pnm"
    path.write_bytes(b"%s\n# 7 by 7\n5 4\n%d\n%s" % (kind.encode(), maximum, body))
    read = read_image(path).astype(int)
    assert np.abs(read - values * 255 / maximum).max() <= 1
    deep = read_channels(path, channels)
    assert np.abs(deep - values * 65535 / maximum).max() <= 257
    if channels == 1 and maximum not in (1, 255, 65535):
        with pytest.raises(DataError, match=rf"a.pnm': a PGM whose largest value is {maximum}.*Save it as PNG"):
            read_label_map(path)


def test_colors_of_16_bits_keep_their_lower_half_as_channels(tmp_path):
    values = np.arange(300, 348, dtype=">u2").reshape(4, 4, 3)
    (tmp_path / "a.ppm").write_bytes(b"P6 4 4 65535\n" + values.tobytes())
    np.testing.assert_array_equal(read_channels(tmp_path / "a.ppm", 3), values)


def test_a_bitmap_has_one_channel(tmp_path):
    bits = Image.fromarray((PIXELS[:, :, 0] > 100).astype(np.uint8) * 255).convert("1")
    for name, form in (("a.pbm", "PPM"), ("a.bmp", "BMP")):
        bits.save(tmp_path / name, format=form)
        np.testing.assert_array_equal(read_channels(tmp_path / name, 1)[:, :, 0] > 0, PIXELS[:, :, 0] > 100)


def test_transparent_pixels_keep_their_color(tmp_path):
    indices = np.array([[0, 1, 2, 3], [3, 2, 1, 0]], np.uint8)
    colors = np.array([[200, 0, 0], [0, 200, 0], [0, 0, 200], [9, 9, 9]], np.uint8)
    image = Image.fromarray(indices)
    image.putpalette(colors.tobytes())
    for name, settings in (("a.gif", {}), ("b.gif", dict(save_all=True, append_images=[image.rotate(180)]))):
        image.save(tmp_path / name, transparency=1, **settings)
        np.testing.assert_array_equal(read_image(tmp_path / name), colors[indices])
    image.save(tmp_path / "a.png", transparency=bytes([255, 0, 128, 255]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(read_image(tmp_path / "a.png"), colors[indices])


def test_associated_alpha_is_divided_out(tmp_path):
    rgba = np.zeros((4, 4, 4), np.uint8)
    rgba[..., 0], rgba[..., 3] = 60, 128
    buffer = io.BytesIO()
    Image.fromarray(rgba).save(buffer, "TIFF")
    data = bytearray(buffer.getvalue())
    at = data.index(b"\x52\x01\x03\x00\x01\x00\x00\x00")
    data[at + 8] = 1  # ExtraSamples: the colors are multiplied by the alpha
    (tmp_path / "a.tif").write_bytes(data)
    assert (read_image(tmp_path / "a.tif") == [119, 0, 0]).all()
