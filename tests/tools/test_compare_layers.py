"""The AP of each decoder layer, with and without non-maximum suppression."""

import pytest
import torch

from vitkit.config import load_config
from vitkit.models import build_model
from vitkit.structures import Detections
from vitkit.tools import compare_layers


def test_layers_of_a_detector_are_scored_and_drawn(tmp_path, capsys):
    overrides = ["data.val.num_images=2", "model.head.num_decoder_layers=2"]
    config = load_config("quickstart/detr", overrides)
    names = compare_layers.DataSettings(**config["data"]).dataset("val").classes
    torch.save({"model": build_model(config["model"], classes=names).state_dict()}, tmp_path / "detr.pth")
    out = tmp_path / "drawn" / "layers.png"
    compare_layers.main(
        ["quickstart/detr", str(tmp_path / "detr.pth"), *overrides, "--out", str(out), "--device", "cpu"]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4].split() == ["layer", "bbox/AP", "with", "NMS", "bbox/AP50", "with", "NMS"]
    assert [line.split()[0] for line in lines[-3:-1]] == ["1", "2"] and out.stat().st_size > 1000


def test_suppression_is_by_class():
    boxes = torch.tensor([[0, 0, 10, 10], [0, 0, 10, 9], [0, 0, 10, 9], [20, 20, 30, 30]]).float()
    detections = Detections(
        scores=torch.tensor([0.9, 0.8, 0.7, 0.6]), labels=torch.tensor([1, 1, 2, 1]), boxes_xyxy=boxes
    )
    kept = compare_layers.suppress(detections, 0.5)
    assert kept["scores"].tolist() == pytest.approx([0.9, 0.7, 0.6]) and kept["labels"].tolist() == [1, 2, 1]
    assert len(compare_layers.suppress(detections, 0.95)["scores"]) == 4


def test_a_model_without_boxes_is_refused(tmp_path):
    (tmp_path / "any.pth").touch()
    with pytest.raises(SystemExit, match="Classifier has no decoder layers that predict boxes; expected a DETR"):
        compare_layers.main(["quickstart/classifier", str(tmp_path / "any.pth"), "--device", "cpu"])


@pytest.mark.parametrize("iou", ["-0.1", "50", "nan"])
def test_invalid_iou_is_named(iou, capsys):
    with pytest.raises(SystemExit):
        compare_layers.main(["quickstart/detr", "any.pth", "--iou", iou])
    assert f"--iou {float(iou)}: expected 0 to 1" in capsys.readouterr().err
