import pickle

import pytest
import torch

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.tools.benchmark import models
from vitkit.tools.benchmark.models import FAMILIES, Case
from vitkit.tools.benchmark.timing import Options

# DINO selects 900 queries from the encoder's tokens; transformers' EoMT and MAE take squares.
SIZES = {"dino": (192, 256), "eomt": (64, 64), "mae": (64, 64)}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("training", [False, True])
def test_all_compared_models_run(name, training):
    pytest.importorskip("transformers")
    case = Case(*SIZES.get(name, (64, 96)), training=training)
    rows = models.compare_family(FAMILIES[name], case, Options(repeats=1, memory=False), what=name)
    assert [row.name for row in rows] == list(FAMILIES[name].builders)
    assert rows[0].ratio == 1
    assert all(row.seconds > 0 for row in rows)


def test_only_training_steps_are_measured_of_compiled_models(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model: compiled.append(type(model).__name__))
    family = FAMILIES["detr"]
    family = family._replace(builders={name: build for name, build in family.builders.items() if "vitkit" in name})
    options = Options(repeats=1, memory=False, compiled=True)
    assert not models.compare_family(family, Case(64, 96), options, what="inference")
    (row,) = models.compare_family(family, Case(64, 96, training=True), options, what="step")
    assert row.what == "step, compiled" and compiled == ["DETR"]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "dino"])  # which compares different models
def test_both_forms_of_a_model_train_the_same_number_of_parameters(name):
    pytest.importorskip("transformers")
    case, family = Case(*SIZES.get(name, (64, 96)), training=True), FAMILIES[name]
    trained, losses = [], []
    for build in list(family.builders.values())[:2]:
        torch.manual_seed(0)
        batch = models.random_batch(case, family.num_classes)
        contestant = build(family.num_classes, batch, case)
        trained.append(sum(p.numel() for p in contestant.model.parameters() if p.requires_grad))
        losses.append(contestant.loss().item())
    assert trained[0] == trained[1]
    if name in ("maskformer", "mask2former"):
        # Weights are random: one layer more or less would change the loss by a sixth or a tenth, another loss weight
        # by more.
        assert losses[0] == pytest.approx(losses[1], rel=0.5)


@pytest.mark.parametrize("name", models.BACKBONE_FAMILIES)
def test_both_forms_of_a_backbone_have_the_same_number_of_parameters(name):
    case, family = Case(480, 640), models.BACKBONE_FAMILIES[name]
    batch = models.random_batch(Case(32, 32), family.num_classes)
    with torch.device("meta"):
        built = [build(family.num_classes, batch, case).model for build in family.builders.values()]
    trained = [sum(p.numel() for name, p in model.named_parameters() if "pos_embed" not in name) for model in built]
    assert trained[0] == pytest.approx(trained[1], rel=0.01)


def test_calls_can_be_pickled_to_the_process_that_measures_memory():
    for family in (*FAMILIES.values(), *models.BACKBONE_FAMILIES.values()):
        pickle.dumps(family)


def test_masks_are_boxes_of_a_tenth_to_half_of_the_image_sides():
    batch = models.random_batch(Case(40, 60, batch_size=2), 91)
    assert batch.masks.shape == (2, 7, 40, 60)
    for mask, box in zip(batch.masks.flatten(0, 1), batch.boxes_cxcywh.flatten(0, 1)):
        rows, columns = mask.any(1), mask.any(0)
        assert torch.equal(mask, rows[:, None] & columns)
        assert rows.sum() == pytest.approx(40 * box[3], abs=1) and 3 <= rows.sum() <= 21
        assert columns.sum() == pytest.approx(60 * box[2], abs=1) and 5 <= columns.sum() <= 31


def test_part_has_rows_for_each_case_and_more_on_a_gpu(monkeypatch):
    monkeypatch.setattr(models, "compare_family", lambda family, case, options, what: [what])
    assert len(models.measure("maskformer", Options())) == 4
    assert models.measure("maskformer", Options(device="cuda"))[-1] == "training step, 1024x1024, batch 2"
    assert models.measure("backbones", Options())[::5] == [
        "vit_base_patch16, inference, 224x224, batch 4",
        "swin_tiny, inference, 480x640, batch 1",
        "swinv2_tiny, training step, 256x256, batch 4",
        "mvitv2_tiny, training step, 480x640, batch 1",
    ]
