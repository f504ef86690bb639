"""DEIMv2's encoders: sums where maps meet, and padding kept from the image."""

import pytest
import torch
from torch import nn

from vitkit.errors import ConfigError
from vitkit.necks.deimv2_encoder import DEIMv2Encoder
from vitkit.necks.lite_encoder import LiteEncoder
from vitkit.structures import FeatureInfo

INFO = {"res3": FeatureInfo(16, 8), "res4": FeatureInfo(16, 16), "res5": FeatureInfo(24, 32)}
LITE = {"res4": FeatureInfo(24, 16)}


def maps(info, height=64, width=96):
    torch.manual_seed(0)
    sizes = {name: (-(-height // one.stride), -(-width // one.stride)) for name, one in info.items()}
    return {name: torch.randn(2, info[name].channels, *sizes[name]) for name in info}


@pytest.mark.parametrize("block", ["deim", "dfine"])
def test_only_maps_of_another_width_are_projected(block):
    neck = DEIMv2Encoder(INFO, 16, block=block, num_blocks=1, num_heads=2, d_ffn=32)
    kinds = [isinstance(layer, nn.Identity) for layer in neck.input_proj]
    assert kinds == [True, True, False]
    assert neck.fpn_blocks[0].cv1[0].in_channels == 16  # a sum, not a concatenation
    assert ("conv" in dict(neck.pan_blocks[0].cv2.named_children())) == (block == "dfine")
    outputs = neck.eval()(maps(INFO))
    assert {name: tuple(x.shape) for name, x in outputs.items()} == {
        "res3": (2, 16, 8, 12), "res4": (2, 16, 4, 6), "res5": (2, 16, 2, 3),
    }  # fmt: skip
    assert neck.feature_info["res5"] == FeatureInfo(16, 32)


def test_lite_encoder_makes_a_second_map_that_knows_the_whole_image():
    neck = LiteEncoder(LITE, 16, num_blocks=1, expansion=1.0).eval()
    features = maps(LITE, 80, 112)  # maps of 5 x 7 and 3 x 4 locations
    outputs = neck(features)
    assert neck.feature_info == {"res4": FeatureInfo(16, 16), "res5": FeatureInfo(16, 32)}
    assert outputs["res4"].shape == (2, 16, 5, 7) and outputs["res5"].shape == (2, 16, 3, 4)
    features["res4"].requires_grad_()
    neck(features)["res4"][:, :, 0, 0].square().sum().backward()
    assert features["res4"].grad[:, :, -1, -1].any()  # farther than any kernel reaches


@pytest.mark.parametrize("make", [
    lambda: (INFO, DEIMv2Encoder(INFO, 16, num_blocks=1, num_heads=2, d_ffn=32, isolate_padding=True)),
    lambda: (LITE, LiteEncoder(LITE, 16, num_blocks=1, isolate_padding=True)),
])  # fmt: skip
def test_isolated_padding_does_not_change_the_image(make):
    info, neck = make()
    neck.eval()
    mask = torch.zeros(2, 128, 160, dtype=torch.bool)
    mask[:, 64:] = mask[:, :, 96:] = True
    padded = maps(info, 128, 160)
    cropped = {name: x[..., : 64 // info[name].stride, : 96 // info[name].stride] for name, x in padded.items()}
    expected, outputs = neck(cropped), neck(padded, mask)
    for name, x in expected.items():
        torch.testing.assert_close(outputs[name][..., : x.shape[2], : x.shape[3]], x, atol=1e-5, rtol=1e-5)


def test_wrong_settings_are_named():
    with pytest.raises(ConfigError, match="DEIMv2Encoder: block='csp': expected 'dfine' or 'deim'"):
        DEIMv2Encoder(INFO, 16, block="csp")
    with pytest.raises(ConfigError, match="LiteEncoder: expansion=0.01 of out_channels=16 leaves no channels"):
        LiteEncoder(LITE, 16, expansion=0.01)
    with pytest.raises(ConfigError, match=r"LiteEncoder: in_features=\['res3', 'res4'\]: expected the name of one map"):
        LiteEncoder(INFO, 16, in_features=["res3", "res4"])
    with pytest.raises(ConfigError, match="LiteEncoder: the backbone has no feature 'res6'. Did you mean"):
        LiteEncoder(LITE, 16, in_features=["res6"])
