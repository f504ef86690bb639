"""RT-DETR's configs: the original's settings, and a run of a small one from training to an evaluated checkpoint."""

import pytest
import torch

import vitkit
from vitkit import build_model
from vitkit.config import load_config
from vitkit.engine.optimizers import parameter_groups
from vitkit.registry import CRITERIA, TRANSFORMS

NAMES = [f"rtdetr{version}_r{depth}" for version in ("", "v2") for depth in (18, 34, 50, 101)]
EPOCHS = {"rtdetrv2_r18": 120, "rtdetrv2_r34": 120}
BACKBONE_LR = {"rtdetr_r101": 1e-6, "rtdetrv2_r18": 1e-4, "rtdetrv2_r34": 5e-5, "rtdetrv2_r101": 1e-6}
AUGMENTED_UNTIL = {"rtdetrv2_r18": 117, "rtdetrv2_r34": 117, "rtdetrv2_r50": 71, "rtdetrv2_r101": 71}


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_those_of_the_original(name):
    cfg = load_config(name)
    assert cfg["train"]["epochs"] == EPOCHS.get(name, 72) and cfg["train"]["ema_decay"] == 0.9999
    assert cfg["data"]["squares"].get("until_epoch", 117) == AUGMENTED_UNTIL.get(name, 72)
    assert len(cfg["data"]["squares"]["sizes"]) == (1 if name == "rtdetrv2_r18" else 13)
    assert TRANSFORMS.build(cfg["data"]["val"]["transforms"]).size == (640, 640)
    with torch.device("meta"):
        model = build_model(cfg["model"])
    statistics = {tuple(model.backbone.pixel_mean), tuple(model.backbone.pixel_std)}
    assert statistics == {(0, 0, 0), (1, 1, 1)} and model.num_detections == 300
    groups = parameter_groups(model, **{key: value for key, value in cfg["optimizer"].items() if key != "type"})
    settings = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    of = {key: settings[id(value)] for key, value in model.named_parameters() if id(value) in settings}
    backbone_lr = pytest.approx(BACKBONE_LR.get(name, 1e-5))
    assert of["backbone.layer1.0.conv1.weight"] == (backbone_lr, 1e-4)
    norm_decay = 1e-4 if name == "rtdetr_r101" else 0
    assert of["neck.pan_blocks.0.conv1.1.weight"] == of["head.decoder.layers.0.norm1.bias"] == (1e-4, norm_decay)
    # Biases have no decay either in the first version's other sizes and in the second one's R34.
    without = name in ("rtdetr_r18", "rtdetr_r34", "rtdetr_r50", "rtdetrv2_r34")
    assert of["head.class_embed.0.bias"] == (1e-4, 0 if without else 1e-4)
    is_small = name.endswith(("r18", "r34"))  # stem and norms of the others are frozen
    assert of.get("backbone.conv1.0.weight") == ((backbone_lr, 1e-4) if is_small else None)
    assert of.get("backbone.bn1.weight") == ((backbone_lr, 0) if is_small else None)


def small(name):
    """Return a published config with a small neck and decoder, on images of shapes."""
    cfg = load_config(name)
    model, world = cfg["model"], dict(type="ShapesDetection", image_size=64, max_objects=3, min_size=0.2, max_size=0.5)
    model["num_queries"] = 10
    model["backbone"].update(pretrained=False, norm="bn")
    model["neck"].update(out_channels=32, num_heads=2, d_ffn=32, num_blocks=1)
    model["head"].update(d_model=32, num_heads=2, d_ffn=32, num_decoder_layers=2)
    model["training_queries"][0]["num_queries"] = 6
    cfg["data"]["train"] = dict(world, num_images=4, transforms=cfg["data"]["train"]["transforms"])
    cfg["data"]["val"] = dict(world, num_images=3, transforms=dict(type="EvalResize", size=[64, 96]))
    cfg["data"] |= dict(images_per_gpu=2, num_workers=0, squares=dict(sizes=[64, 96]))
    cfg["train"] |= dict(epochs=1, reference_batch_size=2, best_metric="loss", precision="fp32")
    return cfg


@pytest.mark.parametrize("name", ["rtdetr_r18", "rtdetrv2_r50"])
def test_a_run_trains_evaluates_and_loads(name, tmp_path, capsys):
    run = vitkit.train(small(name), run_dir=tmp_path / "run", device="cpu")
    assert {"loss", "bbox/AP50"} <= run.metrics.keys()
    line = "are resized for the model: to 96x64 pixels (width x height), whatever their proportions (stored: "
    assert line in capsys.readouterr().out
    predictor = vitkit.load(tmp_path / "run")
    assert predictor.transforms.size == (64, 96) and tuple(predictor.model.backbone.pixel_std) == (1, 1, 1)
    image = torch.randint(0, 255, (50, 40, 3), dtype=torch.uint8).numpy()
    assert predictor.prepare([image]).inputs["images"].shape == (1, 3, 64, 96)
    boxes = predictor(image, threshold=0.0).boxes
    assert len(boxes) and boxes[:, 0::2].max() <= 40 and boxes[:, 1::2].max() <= 50  # in pixels of the image itself


def test_a_few_images_are_learned_with_denoising():
    cfg = small("rtdetrv2_r18")
    torch.manual_seed(0)
    model, criterion = build_model(cfg["model"], classes=["circle", "square"]).train(), CRITERIA.build(cfg["criterion"])
    targets = [
        {"labels": torch.tensor([0, 1]), "boxes_cxcywh": torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.6, 0.6, 0.4, 0.3]])},
        {"labels": torch.tensor([1]), "boxes_cxcywh": torch.tensor([[0.5, 0.5, 0.9, 0.8]])},
    ]
    images = torch.randn(2, 3, 64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    totals = []
    for _ in range(32):
        losses = criterion(model(images, None, targets), targets)
        assert {"dn_labels", "dn_aux0_giou", "enc_l1"} <= losses.keys()
        totals.append((losses["l1"] + losses["giou"]).item())
        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
    assert totals[-1] < 0.5 * totals[0]
