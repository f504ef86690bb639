"""RF-DETR beside its own package (https://github.com/roboflow/rf-detr, rfdetr 1.11.2): all sizes, with boxes, masks and
keypoints."""

import pytest
import torch
from helpers.random_weights import randomize

from vitkit.config import load_config
from vitkit.configs.rf_detr import VARIANTS
from vitkit.engine.build import build_model
from vitkit.model_zoo.converters.rf_detr import OFFICIAL

pytestmark = pytest.mark.peers
lwdetr = pytest.importorskip("rfdetr.models.lwdetr")
settings = pytest.importorskip("rfdetr.config")
namespace = pytest.importorskip("rfdetr._namespace")
NAMES = {"n": "Nano", "s": "Small", "m": "Medium", "l": "Large", "x": "KeypointPreview"}


def build_theirs(size, masks=False, keypoints=False):
    """Return their network, without weights from their server."""
    config = getattr(settings, f"RFDETR{'Seg' * masks}{NAMES[size]}Config")
    train = settings.KeypointTrainConfig if keypoints else settings.TrainConfig
    train = settings.SegmentationTrainConfig if masks else train
    points = dict(num_keypoints_per_class=[17, *90 * [0]]) if keypoints else {}
    chosen = namespace._namespace_from_configs(
        config(pretrain_weights=None, device="cpu", **points), train(dataset_dir=".", output_dir=".")
    )
    chosen.pretrain_weights = "given"
    return lwdetr.build_model(chosen)


@pytest.mark.parametrize("name", VARIANTS)
def test_outputs_are_the_same(name):
    theirs, spec = build_theirs(**VARIANTS[name][0]), load_config(name)["model"]
    num_classes = len(theirs.class_embed.bias)
    active = theirs.state_dict()["_kp_active_mask"]
    if active.numel():
        spec["head"]["keypoint_classes"] = active.any(1).nonzero()[:, 0].tolist()
    model = build_model(spec | dict(num_classes=num_classes, backbone=spec["backbone"] | dict(pretrained=False)))
    randomize(model)
    missing, unexpected = theirs.load_state_dict(OFFICIAL[0].table.write(model.state_dict(), model), strict=False)
    assert not unexpected and set(missing) <= {"_kp_active_mask"}
    side = spec["backbone"]["image_size"]
    images = torch.randn(1, 3, side, side, dtype=torch.float64)
    with torch.no_grad():
        outputs, expected = model.double().eval()(images), theirs.double().eval()(images)
    fields = (
        "pred_logits",
        "pred_boxes",
        *(f"pred_{kind}" for kind in ("masks", "keypoints") if VARIANTS[name][0].get(kind)),
    )
    for field in fields:
        value, ours = expected[field], outputs[field].double()
        if field == "pred_keypoints":  # of the first class, without what is added to the logits
            value = value.unflatten(2, (num_classes, 17))[:, :, :1, :, :7]
        scale = value.abs().amax()
        torch.testing.assert_close(ours / scale, value / scale, atol=1e-4, rtol=0)
