"""ECDet, ECSeg and ECPose beside libreyolo's (https://github.com/LibreYOLO/libreyolo, 1.6.0), which has the
originals' names."""

import pytest
import torch
from helpers.random_weights import randomize

from vitkit.config import load_config
from vitkit.configs import ecdet, ecseg
from vitkit.configs.ecpose import ecpose_model
from vitkit.engine.build import build_model
from vitkit.model_zoo.converters import ecpose
from vitkit.model_zoo.converters.ecdet import OFFICIAL
from vitkit.ops.masks import mask_logits

pytestmark = pytest.mark.peers
peer = pytest.importorskip("libreyolo.models.ec.nn")
MODELS = [
    *(("LibreECModel", name, arguments["size"]) for name, (arguments, _) in ecdet.VARIANTS.items()),
    *(("LibreECSegModel", name, arguments["size"]) for name, (arguments, _) in ecseg.VARIANTS.items()),
]


@pytest.mark.parametrize(("their_class", "name", "size"), MODELS)
def test_outputs_are_the_same(their_class, name, size):
    spec = load_config(name)["model"]
    model = build_model(spec | dict(num_classes=80, backbone=spec["backbone"] | dict(pretrained=False)))
    randomize(model)
    theirs = getattr(peer, their_class)(size, nb_classes=80, eval_spatial_size=(640, 640))
    missing, unexpected = theirs.load_state_dict(OFFICIAL[0].table.write(model.state_dict(), model), strict=False)
    assert not missing and not unexpected
    images = torch.randn(1, 3, 640, 640, dtype=torch.float64)
    with torch.no_grad():
        outputs, expected = model.double().eval()(images), theirs.double().eval()(images)
    for field in ("pred_logits", "pred_boxes"):
        torch.testing.assert_close(outputs[field].double(), expected[field], atol=1e-3, rtol=1e-4)
    if their_class == "LibreECSegModel":
        masks, expected_masks = mask_logits(outputs["mask_embed"], outputs["mask_features"]), expected["pred_masks"]
        difference = (masks.double() - expected_masks).abs().amax() / expected_masks.std()
        assert masks.shape == expected_masks.shape == (1, 300, 160, 160) and difference < 1e-3


@pytest.mark.parametrize("size", ["s", "m", "l", "x"])
def test_poses_are_the_same(size):
    spec = ecpose_model(size)
    model = build_model(spec | dict(num_classes=2, backbone=spec["backbone"] | dict(pretrained=False)))
    randomize(model)
    theirs = peer.LibreECPoseModel(size, eval_spatial_size=(640, 640))
    written = ecpose.OFFICIAL[0].table.write(model.state_dict(), model)
    assert theirs.load_state_dict(written, strict=False) == ([], [])
    images = torch.randn(1, 3, 640, 640, dtype=torch.float64)
    with torch.no_grad():
        outputs, expected = model.double().eval()(images), theirs.double().eval()(images)
    torch.testing.assert_close(outputs["pred_logits"].double(), expected["pred_logits"], atol=2e-3, rtol=1e-4)
    points = outputs["pred_keypoints"].flatten(2).double()
    torch.testing.assert_close(points, expected["pred_keypoints"], atol=1e-4, rtol=1e-4)
