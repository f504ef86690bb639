"""vitkit doctor: every issue that it looks for, made on purpose, and correct data of every kind."""

import json
import logging
import re
import shlex
import threading
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
from pycocotools import mask as coco_mask

import vitkit
from vitkit import load_config
from vitkit.apps.doctor import CHECKS, VERDICTS, DoctorCase, DoctorOptions, Issue, run_checks
from vitkit.apps.doctor.training_checks import memory
from vitkit.data.loading.settings import DataSettings
from vitkit.engine.build import build_criterion
from vitkit.tools import doctor

DETECTION = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    cfg = quickstart()
    cfg["model"]["neck"]["out_channels"] = 32
    cfg["model"]["head"].update(d_model=32, num_heads=2, d_ffn=64, num_encoder_layers=1, num_decoder_layers=2)
    cfg["data"] = dict(num_workers=0, images_per_gpu=2, **{
        name: dict(type="CocoDetection", images=f"{name}", annotations=f"{name}.json") for name in ("train", "val")
    })
    cfg["train"] = dict(epochs=3, reference_batch_size=2)
    return cfg
"""
DATA_CHECKS = ["annotations", "images", "same_classes", "class_balance", "empty_images", "train_val_leakage", "text"]


def write_coco(name, *, seed, num_images=6, categories=((1, "cat"), (2, "dog")), **changes):
    """Write a valid dataset: two objects in each image, with polygons that fit their boxes; `changes` replace parts."""
    rng = np.random.default_rng(seed)
    Path(name).mkdir(exist_ok=True)
    images, annotations = [], []
    for k in range(num_images):
        photo = cv2.resize(rng.integers(0, 255, (6, 8, 3), dtype=np.uint8), (64, 48), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(f"{name}/{seed}_image{k}.png", photo)
        images.append({"id": k + 1, "file_name": f"{seed}_image{k}.png", "height": 48, "width": 64})
        for j, (raw, _) in enumerate(categories[:2]):
            x, y, w, h = 4 + 20 * j, 6 + k, 16, 20
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=k + 1,
                    category_id=raw,
                    bbox=[x, y, w, h],
                    area=w * h,
                    iscrowd=0,
                    segmentation=[[x, y, x + w, y, x + w, y + h, x, y + h]],
                )
            )
    content = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": raw, "name": label} for raw, label in categories],
    } | changes
    Path(f"{name}.json").write_text(json.dumps(content))
    return content


@pytest.fixture
def coco(tmp_path, monkeypatch):
    """Write valid train and val data, and a config; return the training file's content."""
    monkeypatch.chdir(tmp_path)
    Path("config.py").write_text(DETECTION)
    write_coco("val", seed=1)
    return write_coco("train", seed=0, num_images=12)


def check_config(*overrides, checks=DATA_CHECKS, config="config.py", **options):
    options = DoctorOptions(overfit_seconds=20, **options)
    return list(run_checks(load_config(config, overrides), options, checks=checks))


def worst(issues, check, *, where="data.train"):
    """Return (verdict, message) of the worst issue of a check."""
    matching = [issue for issue in issues if issue.check == check and issue.where == where]
    assert matching, f"no issue {check!r} among {sorted({issue.check for issue in issues})}"
    issue = max(matching, key=lambda issue: VERDICTS.index(issue.verdict))
    return issue.verdict, issue.message


def rewrite(content, **changes):
    Path("train.json").write_text(json.dumps(content | changes))


def change(content, position=0, **changes):
    """Write the file again, with one annotation changed."""
    annotations = [dict(a) for a in content["annotations"]]
    annotations[position] |= changes
    rewrite(content, annotations=annotations)


def test_valid_data_causes_at_most_notes(coco):
    issues = check_config()
    assert {f.verdict for f in issues} <= {"ok", "note"}, [f for f in issues if f.verdict not in ("ok", "note")]
    for check in ("category ids", "fields", "degenerate boxes", "duplicate boxes", "masks against boxes"):
        assert worst(issues, check)[0] == "ok"
    assert worst(issues, "leakage", where="data.train, data.val")[0] == "ok"


def test_a_run_is_named_by_its_folder(tmp_path):
    config = load_config("quickstart/dino", ["data.train.num_images=4", "data.val.num_images=2"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert [issue.verdict for issue in vitkit.diagnose(tmp_path, only=["images"])] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("changes", "check", "verdict", "message"),
    [
        (
            {"category_id": 9},
            "wrong category_id",
            "fail",
            "1 in 'annotations': annotation 1 (image '0_image0.png') has",
        ),
        (
            {"image_id": 99},
            "wrong image_id",
            "fail",
            "annotation 1 (image 99) has image_id 99; expected one of the 12 ids",
        ),
        ({"bbox": [4, 6, 0, 20]}, "degenerate boxes", "fail", "1 x no width or height (annotation 1)"),
        ({"bbox": [4, 6, -3, 20]}, "wrong bbox", "fail", "has bbox [4, 6, -3, 20]; expected four finite numbers"),
        ({"bbox": [100, 6, 5, 5]}, "degenerate boxes", "fail", "1 x outside the image"),
        (
            {"bbox": [4, 6, float("nan"), 5]},
            "wrong bbox",
            "fail",
            "has bbox [4, 6, nan, 5]; expected four finite numbers",
        ),
        ({"bbox": "box"}, "wrong bbox", "fail", "has bbox 'box'; expected four finite numbers"),
        ({"area": None}, "wrong area", "fail", "has area None; expected a finite number"),
        ({"iscrowd": "0"}, "wrong iscrowd", "fail", "has iscrowd '0'; expected 0 or 1"),
        ({"bbox": [50, 6, 26, 20]}, "boxes out of image", "warn", "at most 12 pixels (annotation 1); they are clipped"),
        ({"category_id": 2, "bbox": [24, 6, 16, 20]}, "duplicate boxes", "warn", "1 box occurs twice with one cl"),
        ({"bbox": [24, 6, 16, 20]}, "duplicate boxes", "note", "twice with different classes"),
        ({"category_id": 2, "bbox": [24, 6, 16, 19]}, "duplicate boxes", "warn", "IoU above 0.8"),
        ({"bbox": [4, 6, 16, 28]}, "masks against boxes", "note", "1 of 24 masks differs (4.2 %) by over 2 pixels fr"),
        ({"bbox": [40, 20, 16, 20]}, "masks against boxes", "warn", "1 mask lies elsewhere than the box"),
        (
            {"segmentation": [[1, 2, 3]]},
            "wrong segmentation",
            "warn",
            "has segmentation [[1, 2, 3]]; expected polygons",
        ),
        ({"segmentation": None}, "masks", "warn", "1 annotation has none"),
        (
            {"segmentation": [[4, 6, 20, 6, 20, 26, 4, 26], [8, 10, 16, 10, 16, 20, 8, 20]]},
            "nested polygons",
            "note",
            "1 mask has a polygon within another one, as a hole is drawn (annotation 1)",
        ),
        ({"ignore": 1}, "annotations", "note", "`vitkit data convert --fix ignored` makes them crowd regions: 1"),
        ({"id": 2}, "annotation ids", "warn", "1 occur twice, such as 2"),
        ({"id": 2**40}, "annotation ids", "note", "1 do not fit 32 bits"),
    ],
)
def test_annotation_issues_are_reported(coco, changes, check, verdict, message):
    change(coco, **changes)
    issues = worst(check_config(checks=["annotations"]), check)
    assert issues[0] == verdict and message in issues[1]


def test_dropped_boxes_are_only_a_warning(coco):
    change(coco, bbox=[4, 6, 0, 20])
    issues = check_config("data.train.bad_boxes=drop", checks=["annotations"])
    verdict, message = worst(issues, "degenerate boxes")
    assert verdict == "warn" and "they are left out" in message


def test_everything_wrong_is_reported_at_once(coco):
    annotations = [dict(a) for a in coco["annotations"]]
    annotations[0]["category_id"] = 9
    annotations[1]["bbox"] = [0, 0, 0, 0]
    rewrite(coco, annotations=annotations)
    issues = check_config(checks=["annotations"])
    assert {f.check for f in issues if f.verdict == "fail"} == {"builds", "wrong category_id", "degenerate boxes"}


def test_class_gaps_and_imbalance_are_reported(coco):
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}, {"id": 9, "name": "cow"}]
    rewrite(coco, categories=categories, annotations=coco["annotations"][:13])
    issues = check_config()
    assert worst(issues, "category ids") == (
        "note",
        "3 classes, category ids 1 to 9 with 6 gaps (mapped to 0 to 2 without them; results are written in raw ids)",
    )
    assert worst(issues, "absent classes")[1] == "1 class has no object to learn from: cow"
    assert worst(issues, "rare classes")[1].endswith("cat, dog")
    assert worst(issues, "empty images") == ("note", "5 of 12 images have no object: 8, 9, 10, 11, 12")
    assert worst(issues, "classes", where="data.val") == ("note", "has nothing of 1 class of data.train: cow")
    assert worst(issues, "same classes", where="data.train, data.val")[0] == "ok"


def test_remedies_for_an_imbalance_are_overrides_that_work(coco):
    cat, dog = ([a for a in coco["annotations"] if a["category_id"] == raw] for raw in (1, 2))
    many = [{**a, "id": 100 + 12 * k + j} for k in range(12) for j, a in enumerate(cat)]
    rewrite(coco, annotations=[*many, *dog[:3]])
    verdict, message = worst(check_config(checks=["class_balance"]), "class balance")
    assert verdict == "note" and message.endswith(
        "; the most frequent is 48 times as frequent as the rarest; data.sampler=repeat_factor "
        "data.repeat_threshold=0.625 shows images of dog 1.6 times in an epoch, "
        "criterion.class_weights=\"{'dog': 6.9}\" raises its weight in the loss"
    )
    overrides = shlex.split(message[message.index("data.sampler=") :])
    overrides = [override.rstrip(",") for override in overrides if "=" in override]
    config = load_config("config.py", overrides)
    criterion = build_criterion(config["criterion"], ["cat", "dog"])
    assert criterion.class_weights.tolist() == pytest.approx([1.0, 6.9])
    data = DataSettings(**config["data"])
    order = [index for batch in data.train_loader(data.dataset("train"), seed=0).batches for index, _ in batch]
    assert Counter(Counter(order).values()) == {1: 9 + 1, 2: 2}
    # A class that every image shows cannot be repeated, but it can be weighed.
    rewrite(coco, annotations=[*many, *dog])
    assert "sampler" not in worst(check_config(checks=["class_balance"]), "class balance")[1]


def test_categories_with_the_same_name_are_reported(coco):
    rewrite(coco, categories=[{"id": 1, "name": "cat"}, {"id": 2, "name": "cat"}])
    assert worst(check_config(checks=["annotations"]), "class names")[0] == "warn"


def test_unreadable_and_non_rgb_images_are_reported(coco):
    Path("train/0_image3.png").write_bytes(b"nothing")
    cv2.imwrite("train/0_image4.png", np.zeros((20, 64, 3), np.uint8))
    cv2.imwrite("train/0_image5.png", cv2.imread("train/0_image5.png", cv2.IMREAD_GRAYSCALE))
    issues = check_config(checks=["images"])
    verdict, message = worst(issues, "images")
    assert verdict == "fail" and "2 of 12 images cannot be read" in message and "0_image3.png" in message
    assert worst(issues, "color formats")[1].startswith("1 gray")


def test_leakage_by_file_pixels_and_appearance_is_reported(coco):
    where = "data.train, data.val"
    val = json.loads(Path("val.json").read_text())
    image = cv2.imread("train/0_image2.png")
    cv2.imwrite("val/1_image0.png", image)
    assert "1 val image has the pixels of one of train: 3 = 1" in worst(check_config(), "leakage", where=where)[1]
    cv2.imwrite("val/1_image0.png", cv2.convertScaleAbs(image, beta=1))
    verdict, message = worst(check_config(), "near leakage", where=where)
    assert verdict == "warn" and "3 ~ 1" in message
    issues = check_config("data.val.images=train", "data.val.annotations=train.json")
    assert any("12 files are in both (100 % of val)" in f.message and f.verdict == "fail" for f in issues)
    assert len(val["images"]) == 6


def test_recordings_in_both_splits_are_reported(coco):
    """Frames that are different images are recognized by their names."""
    for split, names in (("train", "ab"), ("val", "bc")):
        content = json.loads(Path(f"{split}.json").read_text())
        for k, image in enumerate(content["images"]):
            new = f"{names[k % 2]}_{k:03d}.png"
            Path(split, image["file_name"]).rename(Path(split, new))
            image["file_name"] = new
        Path(f"{split}.json").write_text(json.dumps(content))
    issues = [f for f in check_config(checks=["train_val_leakage"]) if f.verdict == "warn"]
    assert [f.details["series"] for f in issues] == [["b_"]]


def test_duplicate_images_are_reported(coco):
    Path("train/0_image3.png").write_bytes(Path("train/0_image4.png").read_bytes())
    verdict, message = worst(check_config(checks=["images"]), "repeated images")
    assert verdict == "warn" and "2 images have the pixels of another one: 4, 5" in message


def test_more_objects_than_queries_are_reported(coco):
    checks = ["queries"]
    assert worst(check_config(checks=checks), "queries") == ("ok", "at most 2 objects in an image, 10 queries")
    verdict, message = worst(check_config("model.num_queries=1", checks=checks), "queries")
    assert verdict == "fail" and "in 12 images some can never be found; set model.num_queries=10" in message
    assert worst(check_config("model.num_queries=2", checks=checks), "queries")[0] == "note"


def test_more_objects_than_detections_are_reported(coco):
    box = dict(category_id=1, area=16, iscrowd=0, segmentation=[])
    annotations = [dict(box, id=k, image_id=1, bbox=[k % 50, k // 50, 4, 4]) for k in range(1, 121)]
    write_coco("val", seed=1, annotations=annotations)
    assert check_config("evaluator.max_dets=120", checks=["detections"]) == []
    assert worst(check_config(checks=["detections"]), "detections", where="data.val") == (
        "warn",
        "at most 120 objects of a class in an image, of which the evaluation counts 100: set evaluator.max_dets=160",
    )
    combined = "evaluator=dict(type='CombinedEvaluator', evaluator=['CocoEvaluator'])"
    message = worst(check_config(combined, checks=["detections"]), "detections", where="data.val")[1]
    assert message.endswith("set evaluator.evaluator.0.max_dets=160")


def test_more_objects_than_the_model_returns_are_reported(coco):
    overrides = ("model.type=DeformableDETR", "model.num_detections=1", "evaluator.max_dets=500")
    issues = check_config(*overrides, checks=["detections"])
    assert worst(issues, "detections", where="data.val") == (
        "warn",
        "at most 2 objects in an image, of which the model returns 1: set model.num_detections=10",
    )


def test_learning_rate_is_checked_against_the_batch_size(coco):
    checks = ["learning_rate"]
    assert worst(check_config(checks=checks), "learning rate", where="optimizer")[0] == "ok"
    verdict, message = worst(check_config(checks=checks, gpus=8), "learning rate", where="optimizer")
    assert verdict == "warn" and "is meant for 2 images per step, this run has 16: multiply it" in message
    assert worst(check_config("train.accumulate=2", checks=checks), "learning rate", where="optimizer")[0] == "note"
    issues = check_config("optimizer.lr=0.1", checks=checks)
    assert "is high for AdamW" in worst(issues, "learning rate", where="optimizer")[1]


@pytest.mark.parametrize(
    "precision, flags, verdict, message",
    [
        ("bf16", "avx512f", "warn", "no fast instructions"),
        ("bf16", "amx_bf16", "ok", "bf16 on cpu"),
        ("auto", "avx512f", "ok", "fp32 on cpu"),
    ],
)
def test_slow_precision_is_reported_with_the_override_that_helps(coco, monkeypatch, precision, flags, verdict, message):
    monkeypatch.setattr("vitkit.devices._processor_flags", lambda: {flags})
    issue = worst(check_config(f"train.precision={precision}", checks=["precision"]), "precision", where="train")
    assert issue[0] == verdict and message in issue[1] and ("train.precision=fp32" in issue[1]) == (verdict == "warn")


def test_step_budget_is_checked(coco):
    checks = ["step_budget"]
    verdict, message = worst(check_config(checks=checks), "step budget", where="train")
    assert verdict == "warn" and message.startswith("18 steps: 3 epochs of 12 samples") and "--init" in message
    message = worst(check_config("data.train.fraction=0.5", checks=checks), "step budget", where="train")[1]
    assert message.startswith("9 steps: 3 epochs of 6 samples")
    assert worst(check_config("train.epochs=1000", checks=checks), "step budget", where="train")[0] == "note"
    assert worst(check_config(checks=checks, init="detr_r50"), "step budget", where="train")[0] == "ok"


def test_object_sizes_after_resizing_are_reported(coco):
    checks = ["weights", "sizes_after_resizing"]
    verdict, message = worst(check_config(checks=checks), "sizes after resizing")
    assert verdict == "ok" and "16 to 16 pixels (5 to 95 %), median 16" in message and "stride 8" in message
    small = "data.train.transforms={'type': 'EvalResize', 'short_side': 16, 'max_size': 64}"
    verdict, message = worst(check_config(small, checks=checks), "sizes after resizing")
    assert verdict == "warn" and "100 % are smaller than a location of the finest map" in message
    squares = "data.squares={'sizes': [16]}"
    verdict, message = worst(check_config(squares, checks=checks), "sizes after resizing")
    assert verdict == "warn" and "in images of about 16x16" in message


def test_random_transforms_of_validation_are_reported(coco):
    checks = ["random_evaluation"]
    assert worst(check_config(checks=checks), "random evaluation", where="data.val")[0] == "ok"
    flipped = "data.val.transforms={'type': 'DETRTrainTransforms', 'scales': [48], 'crop_probability': 0.0}"
    verdict, message = worst(check_config(flipped, checks=checks), "random evaluation", where="data.val")
    assert verdict == "fail" and "use EvalResize" in message


def test_memory_is_checked_against_the_device(coco):
    verdict, message = worst(check_config(checks=["memory"], memory_gib=1000), "memory", where="train")
    assert verdict == "ok" and "the device has 1e+03 GiB" in message
    verdict, message = worst(check_config(checks=["memory"], memory_gib=0.001), "memory", where="train")
    assert verdict == "fail" and "data.images_per_gpu" in message


def test_memory_estimate_includes_batch_and_optimizer(coco):
    def details(*overrides, gpus=1):
        case = DoctorCase(load_config("config.py", overrides), DoctorOptions(gpus=gpus))
        (issue,) = memory(case)
        model, _ = case.initial_model
        return issue.details, sum(4 * p.numel() for p in model.parameters())

    two, weights = details()
    four, _ = details("data.images_per_gpu=4")
    assert four["activations"] == pytest.approx(2 * two["activations"])
    assert two["fixed"] == 4 * weights == four["fixed"]  # weights, gradients, two states of AdamW
    sharded, _ = details("train.strategy=fsdp", gpus=64)
    assert sharded["fixed"] < 3.5 * weights and sharded["activations"] == two["activations"]
    lora, same = details("train.lora={'layers': 'backbone.*', 'rank': 1, 'train': 'head.class_embed'}")
    assert same == weights and lora["fixed"] < 1.3 * weights  # of the base there are only weights


def test_a_model_that_fails_is_an_issue(coco, monkeypatch):
    def forward(self, *_, **__):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr("vitkit.models.detr.DETR.forward", forward)
    (issue,) = check_config(checks=["overfit"])
    assert (issue.verdict, issue.message) == ("fail", "ends with RuntimeError: shapes do not fit")


def test_overfit_check_reports_a_model_that_cannot_learn(coco):
    checks = ["overfit"]
    issues = check_config("train.clip_grad_norm=0.1", "data.images_per_gpu=1", checks=checks, overfit_steps=120)
    (learned,) = issues
    assert learned.verdict in ("ok", "note") and learned.details["last"] < 0.5 * learned.details["first"]
    (stuck,) = check_config("optimizer.lr=0.0", checks=checks, overfit_steps=25)
    assert stuck.verdict == "fail" and "it does not fall" in stuck.message
    (exploded,) = check_config("optimizer.lr=1e30", checks=checks, overfit_steps=25)
    assert exploded.verdict == "fail"


def test_missing_weights_fail(coco):
    issues = check_config("model.backbone.pretrained=none.pth", checks=["weights"])
    assert issues[0].verdict == "fail" and "none.pth" in issues[0].message
    assert worst(check_config(checks=["weights"]), "weights", where="") == ("note", "random weights throughout")


SHAPES = "def config():\n    return dict(data=dict({}))\n"


@pytest.mark.parametrize("kind", ["ShapesDetection", "ShapesClassification", "ShapesSegmentation", "ShapesCaptions"])
def test_synthetic_data_has_no_issues(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    splits = (f'{name}=dict(type="{kind}", num_images=30, image_size=48, split="{name}")' for name in ("train", "val"))
    Path("config.py").write_text(SHAPES.format(", ".join(splits)))
    issues = check_config()
    assert {f.verdict for f in issues} <= {"ok", "note", "warn"}
    assert {f.check for f in issues if f.verdict == "warn"} <= {"rare classes", "absent classes"}
    assert worst(issues, "images")[1].startswith("30 images read: 48x48")


def test_label_images_are_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for folder in ("images", "labels"):
        Path(folder).mkdir()
    for k in range(4):
        cv2.imwrite(f"images/{k}.png", rng.integers(0, 255, (20, 30, 3), dtype=np.uint8))
        labels = np.zeros((20, 30), np.uint8)
        labels[:5], labels[10:] = 1, 255
        cv2.imwrite(f"labels/{k}.png", labels)
    folder = 'type="SemanticFolder", images="images", labels="labels", classes=["sky", "sea", "tree"]'
    Path("config.py").write_text(SHAPES.format(f'train=dict({folder}, image_suffix=".png")'))
    issues = check_config()
    assert worst(issues, "void") == ("note", "50 % of the pixels are of no class and ignored")
    assert "pixels of 2 of 3 classes: sky 25 %, sea 25 %" in worst(issues, "pixels of classes")[1]
    labels[0, 0] = 7
    cv2.imwrite("labels/3.png", labels)
    cv2.imwrite("labels/2.png", labels[:10] * 0)
    verdict, message = worst(check_config(), "maps")
    assert verdict == "fail" and message.startswith("2 maps are wrong")


def test_panoptic_maps_that_contradict_their_annotations_are_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("images", "maps"):
        Path(folder).mkdir()
    cv2.imwrite("images/1.png", np.zeros((20, 30, 3), np.uint8))
    ids = np.zeros((20, 30, 3), np.uint8)
    ids[5:10, 2:12, 2] = 7  # red
    cv2.imwrite("maps/1.png", ids)
    segment = {"id": 7, "category_id": 3, "area": 50, "bbox": [2, 5, 10, 5], "iscrowd": 0}

    def write(**changes):
        annotations = [{"image_id": 1, "file_name": "1.png", "segments_info": [segment | changes]}]
        content = {
            "images": [{"id": 1, "file_name": "1.png", "height": 20, "width": 30}],
            "annotations": annotations,
            "categories": [{"id": 3, "name": "cat", "isthing": 1}],
        }
        Path("panoptic.json").write_text(json.dumps(content))

    dataset = 'type="CocoPanoptic", images="images", maps="maps", annotations="panoptic.json"'
    Path("config.py").write_text(SHAPES.format(f"train=dict({dataset})"))
    write()
    assert worst(check_config(), "maps")[0] == "ok"
    write(area=51)
    assert "has area 51 in the JSON and 50 pixels in the map" in worst(check_config(), "maps")[1]
    write(bbox=[2, 5, 11, 5])
    assert "has bbox [2, 5, 11, 5] in the JSON" in worst(check_config(), "maps")[1]
    write(id=8)
    assert "segment id 7 (50 pixels) is not in" in worst(check_config(), "maps")[1]


def test_unusual_text_is_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.en").write_text("a cat\na dog \na cat\n", encoding="utf-8")
    Path("a.de").write_text("eine\u00a0Katze\nein Hund\nnoch eine\n", encoding="utf-8")
    Path("b.en").write_text("a cat\n", encoding="utf-8")
    Path("b.de").write_text("noch eine\n", encoding="utf-8")
    train = 'train=dict(type="ParallelText", source="a.en", target="a.de", vocabulary=dict(kind="word"))'
    val = 'val=dict(type="ParallelText", source="b.en", target="b.de")'
    Path("config.py").write_text(SHAPES.format(f"{train}, {val}"))
    issues = check_config()
    messages = "\n".join(f.message for f in issues)
    assert "a.en: 1 occur more than once, 1 begin or end with blanks" in messages
    assert "a.de: 1 no-break spaces" in messages
    verdict, message = worst(issues, "leakage", where="data.train, data.val")
    assert verdict == "fail" and message == "1 of 1 val line is also in train: 1"


def test_report_has_json_and_an_exit_status(coco, capsys):
    arguments = ["config.py", "--only", "queries", "learning_rate", "step_budget", "--device", "cpu"]
    assert doctor.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "  warn  step budget    18 steps" in printed and printed.strip().endswith("0 fail, 1 warn, 0 note, 3 ok")
    assert doctor.main([*arguments, "--strict"]) == 1
    capsys.readouterr()
    assert doctor.main([*arguments[:2], "queries", "--json", "model.num_queries=1"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["issues"][0]["verdict"] == "fail" and report["issues"][0]["details"] == {"most": 2, "queries": 1}


def test_slow_checks_and_the_steps_of_overfitting_are_shown_beside_the_report(coco, capsys, monkeypatch):
    shown, info = threading.Event(), logging.getLogger("vitkit.apps.doctor").info

    def show(message, *values):
        info(message, *values)
        if message == "checking slow check":
            shown.set()

    def slow(case):
        assert shown.wait(60)
        yield Issue("slow", "ok", "has run")

    monkeypatch.setattr(logging.getLogger("vitkit.apps.doctor"), "info", show)
    monkeypatch.setitem(CHECKS, "slow_check", slow)
    monkeypatch.setattr("vitkit.apps.doctor.training_checks._LOG_SECONDS", 0.0)
    arguments = ["--only", "queries", "slow_check", "overfit", "--json", "--overfit-steps", "2", "--device", "cpu"]
    doctor.main(["config.py", *arguments])
    printed, errors = capsys.readouterr()
    assert {issue["check"] for issue in json.loads(printed)["issues"]} == {"queries", "slow", "overfit"}
    assert "checking slow check\n" in errors and "checking queries" not in errors
    lines = [line for line in errors.splitlines() if "overfit: step" in line]
    assert len(lines) == 3 and re.search(
        r"step 1 of at most 2, \d+ s of 120, loss [\d.]+ \(at first [\d.]+\)$", lines[1]
    )


def test_names_in_the_optimizer_without_a_parameter_are_a_warning(coco):
    names = "optimizer.no_weight_decay=[vectors,norms,cls_token]", "optimizer.lr_multipliers={'head': 2.0, 'heda': 3.0}"
    issues = check_config(*names, checks=["parameter_names"])
    assert [(issue.verdict, issue.where) for issue in issues] == [("warn", "optimizer")] * 2
    assert "optimizer.no_weight_decay" in issues[0].message and "contains 'cls_token'" in issues[0].message
    assert "optimizer.lr_multipliers" in issues[1].message and "Did you mean 'head'" in issues[1].message
    assert check_config(names[0].replace(",cls_token", ""), checks=["parameter_names"]) == []


def test_diagnose_is_a_function_of_a_program(coco):
    how = dict(overrides=["model.num_queries=1"], device="cpu")
    issues = vitkit.diagnose("config.py", only=["queries", "step_budget"], skip=["step_budget"], **how)
    assert {issue.check for issue in issues} == {"queries"} and issues[0].verdict == "fail"
    config = load_config("config.py", how["overrides"])
    assert vitkit.diagnose(config, only=["queries"], device="cpu") == issues


def test_checks_are_listed(capsys):
    assert doctor.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS) and lines[0].startswith("annotations ")


def test_wrong_arguments_are_helpful_errors(coco, capsys):
    for arguments, message in (
        (["none.py"], "no config file 'none.py'"),
        (["config.py", "--only", "querys"], "no check 'querys'. Did you mean 'queries'"),
        (["config.py", "--gpus", "0"], "expected an integer of at least 1"),
        (["config.py", "data.train.imags=x"], "Did you mean 'images'"),
    ):
        with pytest.raises(SystemExit) as error:
            doctor.main([*arguments, "--device", "cpu"])
        assert message in f"{error.value.code}\n{capsys.readouterr().err}"


def test_a_missing_dataset_is_an_issue(coco):
    issues = check_config("data.train.annotations=none.json", checks=list(CHECKS))
    assert worst(issues, "builds")[0] == "fail" and "no file 'none.json'" in worst(issues, "builds")[1]
    issues = check_config("data.train={'type':'CocoDetection','images':'train'}", checks=["annotations"])
    assert worst(issues, "builds") == ("fail", "dataset CocoDetection: missing argument annotations.")


EXPECTED = {  # what the README of each dataset says
    "bccd": [
        ("data.train", "annotations", "205 images, 2805 objects, 0 crowd regions"),
        ("data.train", "class balance", "RBC 2,382, WBC 214, Platelets 209"),
        ("data.val", "class balance", "RBC 968, WBC 87, Platelets 83"),
        ("data.train", "object sizes", "1 below 16 (annotation 4005)"),
        ("data.val", "object sizes", "1 below 16 (annotation 3951)"),
        ("data.train", "duplicate boxes", "5 pairs of boxes of one class"),
        ("data.val", "duplicate boxes", "2 pairs of boxes of one class"),
        ("data.train", "masks", "no annotation has a segmentation"),
    ],
    "coco_tiny": [
        ("data.train", "annotations", "50 images, 465 objects, 5 crowd regions"),
        ("data.val", "annotations", "24 images, 195 objects, 2 crowd regions"),
        ("data.train", "category ids", "80 classes, category ids 1 to 90 with 10 gaps"),
        ("data.train", "class balance", "49 of 80 classes occur"),
        ("data.val", "class balance", "35 of 80 classes occur"),
        ("data.train", "empty images", "1 of 50 images has no object: 262284"),
        ("data.val", "empty images", "2 of 24 images have no object: 226111, 58636"),
        ("data.train", "annotation ids", "up to 908400223648"),
        ("data.train", "masks against boxes", "at most 6.68 pixels"),
        ("data.val", "object sizes", "areas of 4.537 to"),
    ],
    "camvid": [
        ("data.train", "void", "3.9 % of the pixels"),
        ("data.val", "void", "1.7 % of the pixels"),
        ("data.train", "pixels of classes", "Road 32 %, Building 23 %, Sky 17 %"),
        ("data.train, data.val", "leakage", "0016E5_* (204 and 101 images)"),
    ],
}
PARTS = {
    "bccd": "from vitkit.configs.bccd.detr import config as whole\n\n\ndef data():\n    return whole()['data']\n",
    "coco_tiny": "from vitkit.configs.parts.coco_instance import coco_instance as data\n",
    "camvid": "from vitkit.configs.parts.camvid import camvid as data\n",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_real_data_is_as_described_in_its_readme(tmp_path, monkeypatch, shared_data, name):
    monkeypatch.chdir(tmp_path)
    Path("config.py").write_text(PARTS[name] + "\n\ndef config():\n    return dict(data=data())\n")
    if not (shared_data / name).is_dir():
        pytest.skip(f"no {name}")
    issues = check_config(f"data.root={shared_data / name}")
    for where, check, text in EXPECTED[name]:
        assert text in worst(issues, check, where=where)[1]
    assert "fail" not in {f.verdict for f in issues}


def test_every_run_length_format_is_compared_with_boxes(coco):
    mask = np.zeros((48, 64), np.uint8, order="F")
    mask[10:20, 30:40] = 1
    rle = coco_mask.encode(mask)
    compressed = {"size": [48, 64], "counts": rle["counts"].decode()}
    runs = [30 * 48 + 10, *[10, 38] * 9, 10]
    uncompressed = {"size": [48, 64], "counts": [*runs, 48 * 64 - sum(runs)]}
    for segmentation, kind in ((compressed, "compressed run lengths"), (uncompressed, "uncompressed run lengths")):
        change(coco, segmentation=segmentation, bbox=[30, 10, 10, 10])
        issues = check_config(checks=["annotations"])
        assert f"1 {kind}" in worst(issues, "masks")[1] and worst(issues, "masks against boxes")[0] == "ok"
