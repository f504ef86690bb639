"""EoMT beyond its golden case: sizes, windows, annealing, errors, other projects' weights."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vitkit.engine.build import build_model
from vitkit.engine.settings import TrainSettings
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.models.eomt import MaskAnnealing
from vitkit.models.windows import window_starts
from vitkit.nn.attention import AttentionRecorder
from vitkit.ops.images import normalize_images
from vitkit.ops.mask_postprocess import Geometry, WindowMasks, merge_window_scores, semantic_scores
from vitkit.ops.masks import mask_logits
from vitkit.registry import CRITERIA
from vitkit.weights import load_weights

VIT = dict(type="ViT", patch_size=8, d_model=24, depth=4, num_heads=2, image_size=32, num_registers=2)
DINOV3 = dict(type="vit_small_patch16_dinov3_qkvb", d_model=24, depth=4, num_heads=2, image_size=64)
WINDOWED = dict(type="ViTDet", patch_size=8, d_model=24, depth=4, num_heads=2, image_size=32)


def build(*, backbone=VIT, **options):
    torch.manual_seed(0)
    spec = dict(type="EoMT", num_queries=5, num_blocks=2, num_classes=3, tasks=["panoptic"], backbone=backbone)
    return build_model(spec | options).eval()


def images(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (3, *size), generator=generator, dtype=torch.uint8) for size in sizes]


def batch(*images):
    """Return a batch of the images, zero-padded to a common size, with its padding mask."""
    height, width = (max(image.shape[i] for image in images) for i in (1, 2))
    padded = torch.zeros(len(images), 3, height, width, dtype=torch.uint8)
    mask = torch.ones(len(images), height, width, dtype=torch.bool)
    for i, image in enumerate(images):
        padded[i, :, : image.shape[1], : image.shape[2]] = image
        mask[i, : image.shape[1], : image.shape[2]] = False
    return padded, mask


def test_smaller_images_are_padded_with_black_and_do_not_depend_on_the_batch():
    model, (first, second) = build(), images((20, 32), (32, 10))
    with torch.no_grad():
        together, alone = model(*batch(first, second)), model(first[None])
        black = model(nn.functional.pad(first, (0, 0, 0, 12))[None])
    assert together["input_size"] == (32, 32) and together["image_sizes"].tolist() == [[20, 32], [32, 10]]
    for key in ("pred_logits", "pred_masks"):
        torch.testing.assert_close(together[key][:1], alone[key])
        torch.testing.assert_close(black[key], alone[key])


def test_pixel_statistics_of_the_backbone_are_used_also_for_black_padding():
    model = build(backbone=VIT | dict(pixel_mean=[0.5] * 3, pixel_std=[0.25] * 3))
    (image,) = images((20, 32))
    prepared = model.prepare(image[None], None)
    torch.testing.assert_close(prepared[0, :, :20], (image / 255 - 0.5) / 0.25, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(prepared[0, :, 20:], torch.full((3, 12, 32), -2.0))


def test_normalized_images_are_padded_with_black_too():
    model = build()
    padded, mask = batch(*images((20, 32), (32, 10)))
    with torch.no_grad():
        expected, got = model(padded, mask), model(normalize_images(padded, mask), mask)
    torch.testing.assert_close(got["pred_masks"], expected["pred_masks"])


def test_sizes_of_larger_images_must_be_multiples_of_the_patch():
    model = build()
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 40, 64))["pred_masks"].shape == (1, 5, 10, 16)
    message = r"images of 40x33 pixels are not divisible into patches of 8x8\. Expected at most 32x32, .*multiples of 8"
    with pytest.raises(DataError, match=message):
        model(torch.zeros(1, 3, 40, 33))


def test_semantic_images_are_split_into_windows_only_in_evaluation():
    model = build(tasks=["semantic"])
    padded, mask = batch(*images((32, 70), (32, 32), (50, 20)))
    with torch.no_grad():
        outputs = model(padded, mask)
    # The first is 70 wide: three windows; the second is one; the third is 50 high.
    assert outputs["windows"].tolist() == [[0, 0, 0], [0, 0, 19], [0, 0, 38], [1, 0, 0], [2, 0, 0], [2, 18, 0]]
    assert outputs["pred_masks"].shape == (6, 5, 8, 8) and outputs["pred_logits"].shape == (6, 5, 4)
    results = model.postprocess(outputs, [(64, 140), (32, 32), (25, 10)])
    assert [tuple(r["semantic"].shape) for r in results] == [(64, 140), (32, 32), (25, 10)]
    with torch.no_grad():
        (alone,) = model.postprocess(model(padded[1:2, :, :32, :32]), [(32, 32)])
    assert torch.equal(results[1]["semantic"], alone["semantic"])
    assert "windows" not in model.train()(padded[1:2, :, :32, :32])


def test_losses_of_windows_are_those_of_the_masks_in_them():
    model = build(tasks=["semantic"])
    matcher = dict(type="HungarianMaskMatcher", cost_labels=2.0, cost_mask=5.0, cost_dice=5.0, mask_cost="focal")
    criterion = CRITERIA.build(
        dict(type="MaskCriterion", matcher=matcher, no_object_weight=0.1, mask_loss="focal",
             weights=dict(labels=2.0, mask=5.0, dice=5.0))
    ).eval()  # fmt: skip
    pixels = images((32, 64))[0][None]
    masks = torch.zeros(2, 32, 64, dtype=torch.bool)
    masks[0, :, :40] = True
    masks[1, :, 40:] = True
    target = dict(labels=torch.tensor([0, 2]), masks=masks)
    left = dict(labels=torch.tensor([0]), masks=masks[:1, :, :32])
    right = dict(labels=torch.tensor([0, 2]), masks=masks[:, :, 32:])
    with torch.no_grad():
        losses = criterion(model(pixels), [target])
        windows = criterion(model(torch.cat((pixels[..., :32], pixels[..., 32:]))), [left, right])
    assert losses.keys() == windows.keys()
    for name, loss in losses.items():
        torch.testing.assert_close(loss, windows[name])


def test_windows_are_spaced_evenly():
    assert window_starts(32, 32) == window_starts(20, 32) == [0]
    assert window_starts(33, 32) == [0, 1]
    assert window_starts(70, 32) == [0, 19, 38]
    assert window_starts(64, 32) == [0, 32]


def test_single_window_equals_the_usual_scores_and_rows_can_be_selected(monkeypatch):
    torch.manual_seed(0)
    probabilities, masks = torch.rand(5, 3), torch.randn(5, 8, 8)
    geometry = Geometry((32, 32), (32, 20), (50, 31))
    ((_, expected),) = semantic_scores(probabilities, masks, geometry, resize_masks=False)
    window = WindowMasks(probabilities, masks, 0, 0)
    ((_, got),) = merge_window_scores([window], geometry)
    torch.testing.assert_close(got, expected)
    monkeypatch.setattr("vitkit.ops.mask_postprocess.CHUNK_VALUES", 1000)
    bands = list(merge_window_scores([window], geometry, within=range(7, 40)))
    assert len(bands) > 1
    torch.testing.assert_close(torch.cat([scores for _, scores in bands], dim=1), expected[:, 7:40])


def test_queries_attend_to_everything_except_patches_outside_their_masks():
    model = build()
    with torch.no_grad(), AttentionRecorder(model) as maps:
        outputs = model(images((32, 32))[0][None])
    layer = outputs["aux_outputs"][1]
    small = nn.functional.interpolate(mask_logits(layer["mask_embed"], layer["mask_features"]), (4, 4), mode="bilinear")
    (weights,) = maps["backbone.blocks.3.attn"]
    assert weights.shape == (1, 2, 5 + 3 + 16, 5 + 3 + 16)
    seen = weights[0] > 0
    assert torch.equal(seen[:, :5, 8:].all(0), small[0].flatten(1) > 0) and not seen[:, :5, 8:].all()
    assert seen[:, :, :8].all() and seen[:, 5:].all()
    assert maps["backbone.blocks.1.attn"][0].shape == (1, 2, 19, 19)


def test_training_predicts_before_every_block_and_trains_all_parameters():
    for backbone in (VIT, DINOV3):
        model = build(backbone=backbone).train()
        model.set_mask_probabilities([0.0, 0.0])
        size = backbone["image_size"]
        outputs = model(torch.zeros(2, 3, size, size, dtype=torch.uint8))
        assert len(outputs["aux_outputs"]) == 2
        criterion = CRITERIA.build(
            dict(
                type="MaskCriterion",
                num_points=64,
                no_object_weight=0.1,
                weights=dict(labels=2.0, mask=5.0, dice=5.0),
                matcher=dict(type="HungarianMaskMatcher", cost_labels=2.0, cost_mask=5.0, cost_dice=5.0, num_points=64),
            )
        )
        target = dict(labels=torch.tensor([1]), masks=torch.ones(1, size, size, dtype=torch.bool))
        empty = dict(labels=torch.zeros(0, dtype=torch.int64), masks=torch.zeros(0, size, size, dtype=torch.bool))
        losses = criterion(outputs, [target, empty])
        assert len(losses) == 9
        sum(losses.values()).backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_only_the_last_block_predicts_without_masked_attention():
    model = build(masked_attention=False)
    assert model.train()(torch.zeros(1, 3, 32, 32))["aux_outputs"] == []
    assert model.eval()(torch.zeros(1, 3, 32, 32))["aux_outputs"] == []


def test_loaded_checkpoint_determines_the_masked_blocks():
    model, annealed = build(), build()
    annealed.set_mask_probabilities([0.0, 0.5])
    model.load_state_dict(annealed.state_dict())
    with torch.no_grad():
        assert len(model(torch.zeros(1, 3, 32, 32))["aux_outputs"]) == 1


def test_annealing_is_spread_over_the_run():
    hook = MaskAnnealing()
    assert hook.probabilities(20, 120, 4) == [1.0, 1.0, 1.0, 1.0]
    assert hook.probabilities(30, 120, 4) == [0.5**0.9, 1.0, 1.0, 1.0]
    assert hook.probabilities(60, 120, 4) == [0.0, 0.0, 1.0, 1.0]
    assert hook.probabilities(100, 120, 4) == [0.0] * 4
    assert hook.probabilities(30, 120, 1) == [0.5**0.9]


def run_of(model, *, step, ema=None):
    """Return what the hook reads from a run of two epochs of 6 batches, with two batches per step."""
    settings = TrainSettings(epochs=2, accumulate=2)
    return SimpleNamespace(
        model=model, ema=ema, settings=settings, loader=range(6), progress=SimpleNamespace(step=step)
    )


def test_annealing_sets_the_model_and_its_average_after_each_step():
    model, average = build(), build()
    hook = MaskAnnealing()
    with hook.during_training(run_of(model, step=0)):
        hook.before_epoch(run_of(model, step=0))
        assert model.attn_mask_probs.tolist() == [1.0, 1.0]
        hook.after_step(run_of(model, step=2, ema=SimpleNamespace(module=average)), step=None)
    for each in (model, average):
        assert each.attn_mask_probs.tolist() == pytest.approx([0.0, 1.0])
    with torch.no_grad():
        assert len(average(torch.zeros(1, 3, 32, 32))["aux_outputs"]) == 1


def test_annealing_needs_a_model_with_masked_attention_and_steps_for_each_block():
    with pytest.raises(ConfigError, match="MaskAnnealing: Linear has no masked attention to anneal"):
        MaskAnnealing().during_training(run_of(nn.Linear(1, 1), step=0)).__enter__()
    hook = MaskAnnealing(start_steps=[1], end_steps=[2])
    with pytest.raises(ConfigError, match="are for 1 blocks, but model.num_blocks=2"):
        hook.during_training(run_of(build(), step=0)).__enter__()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(start_steps=[1]), "expected both start_steps and end_steps"),
        (dict(start_steps=[1, 5], end_steps=[3]), "expected an end after each start"),
        (dict(start_steps=[3], end_steps=[3]), "expected an end after each start"),
        (dict(power=-0.9), "power=-0.9: expected a value above 0"),
    ],
)
def test_invalid_annealing_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        MaskAnnealing(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_blocks=5), "num_blocks=5: expected 1 to 4"),
        (dict(num_queries=0), "num_queries=0: expected at least 1"),
        (
            dict(backbone=dict(type="ResNet", depth=18, pretrained=False)),
            "queries join the blocks of a ViT; got ResNet",
        ),
        (dict(backbone=dict(WINDOWED, window_size=2)), "a ViT without windows"),
        (dict(backbone=dict(VIT, image_size=[32, 36])), "32x36 pixels, which are not divisible into patches of 8x8"),
        (dict(tasks=[]), "model: tasks is empty"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        build(**options)


def test_checkpoints_with_other_numbers_of_queries_or_blocks_are_named():
    state = build(num_queries=7, num_blocks=3).state_dict()
    message = r"num_queries=7 and num_blocks=3 does not fit a model with num_queries=5 and num_blocks=2"
    with pytest.raises(CheckpointError, match=message):
        load_weights(build(), state)


def official(model, prefix=""):
    """The state dict under the original's names."""
    names = {"backbone": "encoder.backbone", "head.query_embed": "q", "head.class_embed": "class_head"}
    names |= {"head.mask_embed": "mask_head", "head.upscale": "upscale"}
    state = {}
    for key, value in model.state_dict().items():
        ours = next((name for name in names if key.startswith(f"{name}.")), None)
        state[prefix + (key if ours is None else names[ours] + key.removeprefix(ours))] = value
    return state


@pytest.mark.parametrize("prefix", ["", "network."])
def test_official_names_load_with_positions_of_another_size(prefix):
    state = official(build(backbone=dict(VIT, image_size=64)), prefix)
    state[f"{prefix}encoder.pixel_mean"] = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
    state["criterion.empty_weight"] = torch.ones(4)
    model = build()
    assert load_weights(model, state).converter == "tue-mps/eomt"
    assert model.backbone.pos_embed.shape == (1, 1 + 16, 24)


def test_weights_for_other_pixel_statistics_are_refused():
    state = official(build())
    state["encoder.pixel_mean"] = torch.full((1, 3, 1, 1), 0.5)
    with pytest.raises(CheckpointError, match=r"encoder.pixel_mean: the weights expect images normalized by \[0.5"):
        load_weights(build(), state)


@pytest.mark.parametrize("probability", [1.0, 0.0])
def test_loads_transformers_names_and_equals_transformers(probability):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.EomtConfig(
        hidden_size=24, num_hidden_layers=4, num_attention_heads=2, image_size=32, patch_size=8, num_blocks=2,
        num_queries=5, num_register_tokens=2, num_upscale_blocks=1, id2label={i: str(i) for i in range(3)},
    )  # fmt: skip
    theirs = transformers.EomtForUniversalSegmentation(config).eval()
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3)
    theirs.attn_mask_probs.fill_(probability)
    ours = build(backbone=dict(VIT, positions="patches", blocks=dict(layer_scale=1.0)))
    assert load_weights(ours, theirs.state_dict()).converter == "transformers EoMT"
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected, got = theirs(pixel_values=x), ours(x)
    torch.testing.assert_close(got["pred_logits"], expected.class_queries_logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got["pred_masks"], expected.masks_queries_logits, atol=1e-3, rtol=1e-4)


def test_dinov3_variant_loads_transformers_names_and_equals_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.EomtDinov3Config(
        hidden_size=24, num_hidden_layers=4, num_attention_heads=2, image_size=64, patch_size=16, num_blocks=2,
        num_queries=5, num_register_tokens=4, num_upscale_blocks=2, intermediate_size=96,
        id2label={i: str(i) for i in range(3)}, attn_implementation="sdpa",
    )  # fmt: skip
    theirs = transformers.EomtDinov3ForUniversalSegmentation(config).eval()
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3)
    ours = build(backbone=DINOV3)
    assert load_weights(ours, theirs.state_dict()).converter == "transformers EoMT"
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected, got = theirs(pixel_values=x), ours(x)
    torch.testing.assert_close(got["pred_logits"], expected.class_queries_logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got["pred_masks"], expected.masks_queries_logits, atol=1e-3, rtol=1e-4)


def test_model_can_be_pickled_to_another_process():
    model = build()
    model.set_mask_probabilities([0.0, 1.0])
    copied = pickle.loads(pickle.dumps(model))
    copied.load_state_dict(model.state_dict())
    (image,) = images((32, 32))
    with torch.no_grad():
        torch.testing.assert_close(copied(image[None])["pred_masks"], model(image[None])["pred_masks"])
