import pytest
import torch

from vitkit.errors import ConfigError
from vitkit.necks.pyramid_projection import PyramidProjection
from vitkit.structures import FeatureInfo

INFO = {"res3": FeatureInfo(8, 8), "res4": FeatureInfo(12, 16), "res5": FeatureInfo(16, 32)}


def maps(height, width, batch_size=2):
    return {
        name: torch.randn(batch_size, info.channels, -(-height // info.stride), -(-width // info.stride))
        for name, info in INFO.items()
    }


def test_additional_levels_halve_the_raw_coarsest_map():
    neck = PyramidProjection(INFO, 32, num_levels=5, num_groups=4)
    strides = {"res3": 8, "res4": 16, "res5": 32, "res6": 64, "res7": 128}
    assert neck.feature_info == {name: FeatureInfo(32, stride) for name, stride in strides.items()}
    features = maps(203, 181)
    levels = neck(features)
    assert [tuple(x.shape[-2:]) for x in levels.values()] == [(26, 23), (13, 12), (7, 6), (4, 3), (2, 2)]
    torch.testing.assert_close(levels["res6"], neck.levels[3](features["res5"]))
    torch.testing.assert_close(levels["res7"], neck.levels[4](levels["res6"]))


def test_additional_levels_never_take_the_name_of_a_feature_map():
    dilated = {"res4": FeatureInfo(8, 16), "res5": FeatureInfo(12, 16)}
    neck = PyramidProjection(dilated, 32, num_levels=4)
    assert list(neck.feature_info) == ["res4", "res5", "res6", "res7"]
    assert [info.stride for info in neck.feature_info.values()] == [16, 16, 32, 64]
    patches_of_14 = PyramidProjection({"res4": FeatureInfo(8, 14)}, 32, num_levels=3)
    assert list(patches_of_14.feature_info) == ["res4", "res5", "res6"]


def test_only_the_chosen_maps_are_projected():
    neck = PyramidProjection(INFO, 32, in_features=["res4"])
    assert neck.feature_info == {"res4": FeatureInfo(32, 16)} and len(neck.levels) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(in_features=["res33"]), "no feature 'res33'. Did you mean 'res3'"),
        (dict(num_levels=2), r"num_levels=2, but there are 3 maps \(res3, res4, res5\)"),
        (dict(num_groups=5), "num_groups=5 must divide out_channels=32"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        PyramidProjection(INFO, 32, **options)
