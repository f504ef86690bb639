"""Test-time augmentation of semantic segmentation."""

import pytest
import torch
from torch import nn

from vitkit.apps.training.tta import MultiScaleFlip
from vitkit.engine.build import build_model
from vitkit.errors import ConfigError
from vitkit.ops.mask_postprocess import resize
from vitkit.protocols.model import Model

SMALL = dict(
    type="MaskFormer",
    num_classes=4,
    num_queries=6,
    tasks=["semantic"],
    backbone=dict(type="ResNet", depth=18, out_features=["res2", "res3"], pretrained=False),
    neck=dict(type="FPNPixelDecoder", out_channels=32, mask_channels=32),
    head=dict(type="MaskFormerHead", d_model=32, num_heads=4, d_ffn=32, num_decoder_layers=1),
)


class Reds(Model):
    """A model of two classes: the first one's score is a pixel's red value times the input's width, the second one's
    is 1000 minus that."""

    tasks = ("semantic",)

    def forward(self, images):
        return dict(scores=images[:, :1].float() * images.shape[-1])

    def semantic_scores(self, outputs, index, original, *, within):
        red = resize(outputs["scores"][index], original)[:, within.start : within.stop]
        for row in range(red.shape[1]):
            yield range(within.start + row, within.start + row + 1), torch.cat([red, 1000 - red])[:, row : row + 1]


def image(height=24, width=40):
    torch.manual_seed(0)
    return torch.randint(0, 256, (1, 3, height, width), dtype=torch.uint8)


PER_PIXEL = dict(
    type="PerPixelClassification",
    num_classes=4,
    backbone=SMALL["backbone"],
    neck=SMALL["neck"],
    head="PerPixelBaselineHead",
)


def small_model(spec=SMALL):
    torch.manual_seed(0)
    return build_model(spec).eval()


def test_scores_are_summed_over_sizes_and_flips():
    images = torch.zeros(1, 3, 4, 4, dtype=torch.uint8)
    images[..., 2:] = 100
    model = MultiScaleFlip(Reds(), scales=(1.0, 2.0))
    (view, larger) = model(images)["views"][0]
    assert view["scores"].shape == (2, 1, 4, 4) and larger["scores"].shape == (2, 1, 8, 8)
    # Red is 0 and 100 far from the edge; at 4 pixels it counts 4 times, at 8 pixels 8 times, each twice.
    scores = sum(model._scores(v, (4, 4), range(4)) for v in (view, larger))
    assert scores[0, :, 0].tolist() == [0.0] * 4
    assert scores[0, :, 3].tolist() == [2 * (4 + 8) * 100.0] * 4
    assert model.postprocess(dict(views=[[view, larger]]), [(4, 4)])[0]["semantic"][0].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("spec", [SMALL, PER_PIXEL])
def test_the_mirrored_image_gives_the_mirrored_scores(spec):
    # At these scales, a resized pixel is a sum without rounding error; otherwise it may be rounded differently when
    # mirrored.
    model = MultiScaleFlip(small_model(spec), scales=(0.5, 1.0, 2.0))
    with torch.no_grad():
        outputs = [model(x)["views"][0] for x in (image(), image().flip(-1))]
        a, b = (sum(model._scores(view, (50, 70), range(9, 30)) for view in views) for views in outputs)
    assert a.shape == (4, 21, 70) and (a - a.flip(-1)).abs().max() > 1e-3
    torch.testing.assert_close(a, b.flip(-1))


@pytest.mark.parametrize("spec", [SMALL, PER_PIXEL])
def test_one_size_without_flip_equals_the_model(spec):
    model = small_model(spec)
    with torch.no_grad():
        expected = model.postprocess(model(image()), [(100, 70)])[0]["semantic"]
        augmented = MultiScaleFlip(model, scales=(1.0,), flip=False)
        got = augmented.postprocess(augmented(image()), [(100, 70)])[0]
    assert list(got) == ["semantic"]
    assert (got["semantic"] == expected).float().mean() > 0.999


def test_images_of_a_batch_are_augmented_separately():
    model = MultiScaleFlip(small_model(), scales=(0.5, 1.0))
    small, large = image(16, 24), image(24, 40)
    images = torch.zeros(2, 3, 24, 40, dtype=torch.uint8)
    images[0, :, :16, :24], images[1] = small[0], large[0]
    padding = torch.ones(2, 24, 40, dtype=torch.bool)
    padding[0, :16, :24], padding[1] = False, False
    sizes = [(16, 24), (24, 40)]
    with torch.no_grad():
        together = model.postprocess(model(images, padding), sizes)
        alone = [model.postprocess(model(x), [size])[0] for x, size in zip((small, large), sizes)]
    for a, b in zip(together, alone):
        torch.testing.assert_close(a["semantic"], b["semantic"])


def test_unsupported_models_are_an_error():
    with pytest.raises(ConfigError, match=r"not defined for MaskFormer of task instance.*tasks=\['semantic'\]"):
        MultiScaleFlip(build_model(dict(SMALL, tasks=["instance"])))
    detector = dict(type="ChannelProjection", out_channels=32), dict(type="DETRHead", d_model=32, num_heads=4)
    spec = dict(type="DETR", num_classes=4, num_queries=6, backbone=SMALL["backbone"])
    with pytest.raises(ConfigError, match=r"not defined for DETR: it averages .* Evaluate without it\.$"):
        MultiScaleFlip(build_model(spec | dict(zip(("neck", "head"), detector))))
    with pytest.raises(ConfigError, match="Identity"):
        MultiScaleFlip(nn.Identity())
    with pytest.raises(ConfigError, match=r"got scales \[0, 1\]; expected numbers above 0"):
        MultiScaleFlip(Reds(), scales=(0, 1))
