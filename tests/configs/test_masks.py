"""Families of detectors whose config adds masks: each trains from files with polygons, predicts, and is resumed."""

import numpy as np
import pytest
import torch

import vitkit
from vitkit import EVALUATORS
from vitkit.apps.datasets.synthetic import write_shapes
from vitkit.apps.inference import Predictor
from vitkit.config import load_config
from vitkit.data.loading.settings import DataSettings
from vitkit.engine import build
from vitkit.errors import ConfigError
from vitkit.protocols.learning import Hook
from vitkit.weights import read_checkpoint, state_dict_of

RESNET = (
    "model.backbone=dict(type='ResNet', depth=18, norm='bn', pretrained=False, out_features=['res3','res4','res5'])"
)
ONE_LAYER = ["model.head.num_encoder_layers=1", "model.head.d_ffn=64"]
SMALL = {  # name -> overrides for few layers without weights
    "deim_dfine_s_masks_coco": ["model.backbone.pretrained=false"],
    "deimv2_s_masks_coco": [RESNET],
    "rtdetr_r50_masks": [RESNET, "model.neck.num_blocks=1"],
    "rtdetrv2_r50_masks": [RESNET, "model.neck.num_blocks=1"],
    "dino_r50_4scale_masks": [RESNET, *ONE_LAYER],
    "deformable_detr_r50_masks": [RESNET, *ONE_LAYER],
    "dfine_seg_s_coco": ["model.backbone.pretrained=false"],
    "ecseg_s_coco": ["model.backbone.pretrained=false", "model.backbone.depth=2"],
}
FLIP = "dict(type='ComposedTransforms', transforms=[dict(type='HorizontalFlip')])"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    write_shapes(folder, num_train=2, num_val=1, image_size=64, max_objects=3)
    return folder


def small_config(name, shapes, epochs=1):
    overrides = [
        *(f"data.root={shapes}", "data.images_per_gpu=2", "data.num_workers=0", f"data.train.transforms={FLIP}"),
        *("data.val.transforms=dict(type='EvalResize', size=[64, 64])", f"train.epochs={epochs}"),
        *("model.num_queries=10", "model.head.num_decoder_layers=2", *SMALL[name]),
    ]
    cfg = load_config(name)
    overrides += ["data.squares=dict(sizes=[64])"] * ("squares" in cfg["data"])
    overrides.append("schedule=dict(type='ConstantLR')")
    overrides += ["train.restart_epoch=None"] * ("restart_epoch" in cfg["train"])
    return load_config(name, overrides)


@pytest.mark.parametrize("name", SMALL)
def test_each_family_learns_masks_from_polygons_and_predicts_them(name, shapes):
    cfg = small_config(name, shapes)
    train_set, val_set = build.build_datasets(DataSettings(**cfg["data"]))
    torch.manual_seed(0)
    model = build.build_model_for(cfg, train_set, {}).train()
    criterion = build.build_criterion_for(cfg, model, train_set)
    assert criterion.matcher.compares_masks and {"mask", "dice"} <= criterion.weights.keys()
    batch = next(iter(DataSettings(**cfg["data"]).train_loader(train_set, 0)))
    targets = batch.targets if model.uses_targets else None
    losses = criterion(model(**batch.inputs, **({"targets": targets} if targets else {})), batch.targets)
    assert losses["mask"] > 0 and losses["dice"] > 0
    sum(losses.values()).backward()
    assert all(p.grad.isfinite().all() for p in model.mask_head.parameters())

    evaluator = EVALUATORS.build(cfg["evaluator"], dataset=val_set)
    predictor = Predictor(model.eval(), train_set.classes, transforms=cfg["data"]["val"]["transforms"])
    (prediction,) = predictor([np.zeros((50, 70, 3), np.uint8)])
    assert prediction.masks.shape[1:] == (50, 70) and list(evaluator.iou_types) == ["segm", "bbox"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ecseg_s_coco", "deim_dfine_s_masks_coco"])
def test_killed_runs_with_masks_continue_bit_for_bit(name, shapes, tmp_path):
    class Kill(Hook):
        def before_epoch(self, run):
            if run.progress.epoch == 1:
                raise RuntimeError("killed")

    cfg = small_config(name, shapes, epochs=2)
    vitkit.train(cfg, run_dir=tmp_path / "whole", device="cpu")
    with pytest.raises(RuntimeError, match="killed"):
        vitkit.train(cfg, run_dir=tmp_path / "parts", device="cpu", hooks=[Kill()])
    vitkit.train(resume=tmp_path / "parts", device="cpu")
    whole, parts = (read_checkpoint(tmp_path / run / "last.pth") for run in ("whole", "parts"))
    assert whole["progress"]["step"] == parts["progress"]["step"] == 2
    for state in ("model", "ema"):
        ours, theirs = (state_dict_of({state: one[state]}, "last.pth") for one in (whole, parts))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_masks_are_refused_where_the_criterion_has_none():
    with pytest.raises(ConfigError, match=r"masks are those of data=coco"):
        load_config("dino:data=lvis,masks=true")
