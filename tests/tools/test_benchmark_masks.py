import pytest
import torch

pytest.importorskip("vitkit.tools", reason="vitkit is not installed (pip install -e .)")
from vitkit.tools import benchmark_masks, benchmark_models, benchmark_postprocess
from vitkit.tools.benchmark_models import Case


@pytest.mark.parametrize("contestants", benchmark_masks.FAMILIES.values(), ids=benchmark_masks.FAMILIES)
@pytest.mark.parametrize("training", [False, True])
def test_contestants_run(contestants, training):
    pytest.importorskip("transformers")
    case = Case(64, 96, batch_size=1, training=training)
    rows = benchmark_models.measure(contestants, [case], build=benchmark_masks.step, repeats=1, memory=False)
    assert tuple(row.name for row in rows) == contestants
    assert rows[0].ratio == 1
    assert all(row.seconds > 0 for row in rows)


@pytest.mark.parametrize("contestants", benchmark_masks.FAMILIES.values(), ids=benchmark_masks.FAMILIES)
def test_both_forms_of_a_model_train_the_same_number_of_parameters_by_the_same_loss(contestants):
    pytest.importorskip("transformers")
    case = Case(64, 96, training=True)
    trained, losses = [], []
    for name in contestants:
        model, loss, _ = benchmark_masks.BUILDERS[name](case, benchmark_masks.random_batch(case))
        trained.append(sum(p.numel() for p in model.parameters() if p.requires_grad))
        losses.append(loss().item())
    assert trained[0] == trained[1]
    # Of random weights: a layer more or less would change it by a sixth or a tenth, another weight by more.
    assert losses[0] == pytest.approx(losses[1], rel=0.5)


def test_masks_are_rectangles_of_a_tenth_to_half_of_the_sides():
    batch = benchmark_masks.random_batch(Case(40, 60, batch_size=2))
    assert batch.masks.shape == (2, benchmark_masks.TARGETS_PER_IMAGE, 40, 60)
    for mask in batch.masks.flatten(0, 1):
        rows, columns = mask.any(1), mask.any(0)
        assert torch.equal(mask, rows[:, None] & columns)
        assert 3 <= rows.sum() <= 21
        assert 5 <= columns.sum() <= 31


@pytest.mark.parametrize(("family", "task"), benchmark_postprocess.CASES)
def test_post_processing_gives_what_the_task_wants(family, task):
    (result,) = benchmark_postprocess.postprocessing(family, task, 64)()
    if task == "instance":
        assert result["masks"].shape == (benchmark_postprocess.NUM_QUERIES, 64, 64)
    else:
        assert result[task].shape == (64, 64)
        assert len(result[task].unique()) > 1


def test_post_processing_has_a_row_for_each_family_and_task():
    rows = benchmark_postprocess.measure(64, repeats=1, memory=False)
    assert [row.what for row in rows] == [
        "post-processing, Mask2Former, instance, 64x64, 100 queries, 80 classes",
        "post-processing, Mask2Former, panoptic, 64x64, 100 queries, 133 classes",
        "post-processing, Mask2Former, semantic, 64x64, 100 queries, 150 classes",
        "post-processing, DETR, instance, 64x64, 100 queries, 80 classes",
        "post-processing, DETR, panoptic, 64x64, 100 queries, 133 classes",
    ]
    assert all(row.seconds > 0 for row in rows)


def test_cases_by_device():
    assert benchmark_masks.cases("cpu", "fp32") == list(benchmark_models.CASES)
    assert str(benchmark_masks.cases("cuda", "bf16")[-1]) == "training step, 1024x1024, batch 2"
