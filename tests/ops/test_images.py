import pytest
import torch

from vitkit.errors import DataError
from vitkit.ops.images import normalize_images


def test_clip_frames_are_normalized_like_images():
    clips = torch.randint(256, (2, 3, 4, 6, 5), dtype=torch.uint8)
    padding_mask = torch.zeros(2, 6, 5, dtype=torch.bool)
    padding_mask[1, :, 3:] = True
    found = normalize_images(clips, padding_mask)
    for t in range(4):
        torch.testing.assert_close(found[:, :, t], normalize_images(clips[:, :, t], padding_mask), rtol=0, atol=0)
    assert not found[1, :, :, :, 3:].any() and normalize_images(found) is found


def test_padding_of_normalized_images_is_zero_whatever_it_holds():
    images, padding_mask = torch.full((1, 3, 2, 4), torch.nan), torch.zeros(1, 2, 4, dtype=torch.bool)
    images[..., :3], padding_mask[..., 3:] = 1.0, True
    found = normalize_images(images, padding_mask, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    assert found[..., :3].isfinite().all() and (found[..., 3:] == 0).all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 4, 3, 6, 5), r"clips of shape \(2, 4, 3, 6, 5\): expected \(B, 3, T, H, W\).*clips.transpose\(1, 2\)"),
        ((2, 1, 4, 6, 5), r"clips of shape \(2, 1, 4, 6, 5\): expected \(B, 3, T, H, W\), RGB. Convert them"),
        ((2, 3, 6), r"shape \(2, 3, 6\): expected \(B, 3, H, W\), or \(B, 3, T, H, W\) of clips"),
        ((2, 1, 6, 5), r"1 channels \(gray\); expected \(B, 3, H, W\)"),
    ],
)
def test_other_shapes_are_named(shape, message):
    with pytest.raises(DataError, match=message):
        normalize_images(torch.zeros(shape, dtype=torch.uint8))


def test_half_precision_images_keep_their_dtype_whatever_the_pixel_statistics():
    images = torch.full((1, 3, 2, 2), 0.25, dtype=torch.float16)

    normalized = normalize_images(images, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))

    assert normalized.dtype == torch.float16
