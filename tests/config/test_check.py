"""What the check of a config finds: in the dataset of every split, and in numbers."""

import pytest

from vitkit.config import check_config, load_config
from vitkit.errors import ConfigError
from vitkit.registry import BACKBONES


@pytest.mark.parametrize(
    ("override", "least"),
    [
        ("model.head.num_decoder_layers=0", 1),
        ("model.head.num_encoder_layers=-1", 0),
        ("model.head.num_heads=0", 1),
        ("model.head.d_ffn=-3", 0),
        ("model.num_queries=-2", 1),
        ("data.train.num_images=-5", 0),
    ],
)
def test_numbers_that_no_part_can_have_are_found(override, least):
    key, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=rf"{key}: got {value}; expected at least {least}\.$"):
        load_config("quickstart/detr", [override])
    load_config("quickstart/detr", ["model.head.num_encoder_layers=0"])


@pytest.mark.parametrize("key", ["model.head.num_encoder_layers", "model.backbone.depth"])
def test_numbers_of_layers_that_no_machine_can_build_are_found(key):
    with pytest.raises(ConfigError, match=rf"{key}: got 2147483648; expected at most 1000\.$"):
        load_config("quickstart/detr", [f"{key}=2147483648"])


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_typos_in_the_dataset_of_a_split_are_found(split):
    wrong_type = f"data.{split}=dict(type='ShapesDetectio', num_images=3)"
    with pytest.raises(ConfigError, match=rf"data\.{split}: unknown dataset 'ShapesDetectio'. Did you mean 'ShapesDet"):
        load_config("quickstart/detr", [wrong_type], check=True)
    wrong_argument = f"data.{split}=dict(type='ShapesDetection', num_images=3, imag_size=64)"
    with pytest.raises(ConfigError, match=rf"data\.{split}\.imag_size: ShapesDetection has no argument 'imag_size'"):
        load_config("quickstart/detr", [wrong_argument], check=True)


def test_every_name_of_a_backbone_can_stand_in_a_config():
    # These need another argument: the name of timm's model, a size, a transformer.
    for name in set(BACKBONES.names()) - {"TimmBackbone", "SmallHGNetV2", "SpatialAdapter"}:
        check_config({"model": {"type": "Classifier", "backbone": name}})
