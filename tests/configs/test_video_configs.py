"""Every Kinetics config: valid, of the published size, and fed with the clips that its model expects."""

import pytest
import torch

from vitkit.config import load_config
from vitkit.engine.build import build_model
from vitkit.registry import CRITERIA, OPTIMIZERS

PARAMETERS = {
    "timesformer_space_k400": 86_106_256,
    "timesformer_joint_k400": 86_112_400,
    "timesformer_divided_k400": 121_566_352,
    "timesformer_sparse_k400": 121_566_352,
    "timesformer_axial_k400": 157_020_304,
    "timesformer_hr_k400": 122_024_080,
    "timesformer_l_k400": 121_633_936,
    "mvitv1_b_16x4_k400": 36_610_672,
    "mvitv2_s_16x4_k400": 34_537_744,
    "mvitv2_b_32x3_k400": 51_230_128,
    "nonlocal_r50_c2d_k400": 31_686_096,
    "nonlocal_r50_i3d_k400": 35_401_936,
}
"""Parameters counted from the original code; the sparse and the axial scheme have those of the joint network and of its
attention again for each further step; HR and L those of the divided network with larger position tables."""
VIEWS = {"timesformer": (1, 3), "mvitv1": (5, 1), "mvitv2": (5, 1), "nonlocal": (10, 3)}
CLIPS_PER_STEP = {"timesformer": 8, "mvitv1": 16, "mvitv2": 16, "nonlocal": 64}


def load(name):
    return load_config(name)


@pytest.mark.parametrize("name", PARAMETERS)
def test_config_is_valid_and_its_model_has_the_published_size(name):
    config = load(name)  # raises if a name or a type is wrong
    with torch.device("meta"):
        model = build_model(config["model"], classes=[str(i) for i in range(400)])
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    CRITERIA.build(config["criterion"])
    optimizer = OPTIMIZERS.build(config["optimizer"], model=model)
    assert all(group["params"] for group in optimizer.param_groups)
    family = name.split("_")[0]
    assert 8 * config["data"]["images_per_gpu"] == CLIPS_PER_STEP[family]
    val = config["data"]["val"]
    assert (val["num_clips"], val["transforms"]["num_crops"]) == VIEWS[family]


@pytest.mark.parametrize("name", [name for name in PARAMETERS if not name.startswith("nonlocal")])
def test_clips_have_the_size_of_the_model_positions(name):
    config = load(name)
    with torch.device("meta"):
        backbone = build_model(config["model"], classes=["a", "b"]).backbone
        clips = torch.zeros(
            1, 3, config["data"]["train"]["num_frames"], *[config["data"]["train"]["transforms"]["size"]] * 2
        )
        if name.startswith("timesformer"):
            assert backbone.grid == (clips.shape[-1] // 16,) * 2
            assert backbone.time_embed is None or backbone.time_embed.shape[1] == clips.shape[2]
        assert backbone(clips).shape == (1, 2)
