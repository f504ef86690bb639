"""Mask2Former with denoising queries in training (MP-Former)."""

import pytest
import torch
import torch.nn.functional as F

from vitkit.engine.build import build_model
from vitkit.engine.step import training_inputs
from vitkit.ops.packed_masks import PackedMasks
from vitkit.registry import CRITERIA
from vitkit.structures import Batch
from vitkit.weights import load_weights

SIZE = (61, 90)
"""(height, width) of the images, which are padded to 64 x 96."""
NUM_LAYERS = 3


def make_model(*training_queries, **options):
    """Build a small model with noised queries, and with others."""
    torch.manual_seed(0)
    return build_model(
        dict(
            type="Mask2Former",
            num_queries=5,
            num_classes=3,
            backbone=dict(type="ResNet", depth=18, norm="frozen_bn", pretrained=False),
            neck=dict(type="FPNPixelDecoder", out_channels=32, mask_channels=16),
            head=dict(
                type="Mask2FormerHead", d_model=32, num_heads=2, d_ffn=32, num_levels=1, num_decoder_layers=NUM_LAYERS
            ),
            training_queries=[*training_queries, dict(type="MaskDenoising", num_queries=6, **options)],
        )
    ).train()


GROUPS = dict(type="QueryGroups", groups=2)


def make_plain():
    """Build the model without training queries."""
    torch.manual_seed(0)
    spec = dict(type="FPNPixelDecoder", out_channels=32, mask_channels=16)
    head = dict(type="Mask2FormerHead", d_model=32, num_heads=2, d_ffn=32, num_levels=1, num_decoder_layers=NUM_LAYERS)
    backbone = dict(type="ResNet", depth=18, norm="frozen_bn", pretrained=False)
    model = dict(type="Mask2Former", num_queries=5, num_classes=3, backbone=backbone, neck=spec, head=head)
    return build_model(model).train()


def make_criterion():
    matcher = dict(type="HungarianMaskMatcher", mask_cost="focal", cost_labels=2.0, cost_mask=5.0, cost_dice=5.0)
    weights = dict(labels=2.0, mask=5.0, dice=5.0)
    return CRITERIA.build(
        dict(type="MaskCriterion", mask_loss="focal", no_object_weight=0.1, weights=weights, matcher=matcher)
    )


def make_batch(counts=(2, 1)):
    generator = torch.Generator().manual_seed(0)
    masks = [torch.zeros(n, *SIZE, dtype=torch.bool) for n in counts]
    for each in masks:
        for i, mask in enumerate(each):
            mask[: 30 + 20 * i, 30 * i : 30 * i + 32] = True
    targets = [dict(labels=torch.randint(3, (n,), generator=generator), masks=m) for n, m in zip(counts, masks)]
    return Batch(dict(images=torch.rand(len(counts), 3, *SIZE, generator=generator)), targets)


def run(model, batch):
    return model(**training_inputs(model, batch))


def test_matching_queries_do_not_attend_to_denoising_queries():
    model, batch = make_model(), make_batch()
    assert model.uses_targets
    with torch.no_grad():
        outputs, expected = run(model, batch), model(**batch.inputs)
    assert "training_outputs" not in expected
    (noised,) = outputs["training_outputs"]
    assert noised["pred_logits"].shape == (2, 6, 4) and noised["repeats"] == 3
    assert len(noised["aux_outputs"]) == NUM_LAYERS - 1
    for name in ("pred_logits", "pred_masks"):
        torch.testing.assert_close(outputs[name], expected[name], atol=1e-5, rtol=1e-4)


def test_inference_equals_that_of_a_model_without_denoising_queries():
    model, batch = make_model().eval(), make_batch()
    plain = make_plain().eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "denoising" not in k})
    assert not plain.uses_targets
    with torch.no_grad():
        outputs, expected = model(**batch.inputs), plain(**batch.inputs)
    assert outputs.keys() == expected.keys()
    assert torch.equal(outputs["pred_masks"], expected["pred_masks"])


def test_denoising_queries_attend_within_their_target_masks_in_every_layer():
    model = make_model(label_flips=0.0, mask_flips=0.0)
    mask = torch.zeros(1, *SIZE, dtype=torch.bool)
    mask[:, :32, 32:64] = True  # location (0, 1) of the map of 2 x 3 that is attended to
    batch = Batch(dict(images=torch.rand(1, 3, *SIZE)), [dict(labels=torch.tensor([1]), masks=mask)])
    visible = []

    def note(layer, args, kwargs):
        visible.append((kwargs["memory_bias"] == 0)[0, 0, :6])

    for layer in model.head.layers:
        layer.register_forward_pre_hook(note, with_kwargs=True)
    run(model, batch)
    assert len(visible) == NUM_LAYERS
    for rows in visible:
        assert rows.tolist() == [[False, True, False, False, False, False]] * 6


def by_hand(outputs, targets, weight_no_object=0.1):
    """Return the loss terms of one layer of denoising queries, with full masks."""
    logits, embeds, features = outputs["pred_logits"], outputs["mask_embed"], outputs["mask_features"]
    num_rows = logits.shape[1]
    most = max(len(t["labels"]) for t in targets)
    classes = torch.full(logits.shape[:2], 3)
    focal = dice = 0
    copies = num_rows // most
    for i, target in enumerate(targets):
        for c in range(copies):
            for j, label in enumerate(target["labels"]):
                classes[i, c * most + j] = label
                mask = torch.einsum("c,chw->hw", embeds[i, c * most + j], features[i])
                mask = F.interpolate(mask[None, None], size=(64, 96), mode="bilinear", align_corners=False)[0, 0]
                truth = F.pad(target["masks"][j].float(), (0, 96 - SIZE[1], 0, 64 - SIZE[0]))
                p = mask.sigmoid()
                entropy = F.binary_cross_entropy_with_logits(mask, truth, reduction="none")
                share = p * truth + (1 - p) * (1 - truth)
                focal += ((0.25 * truth + 0.75 * (1 - truth)) * (1 - share) ** 2 * entropy).mean()
                dice += 1 - (2 * (p * truth).sum() + 1) / (p.sum() + truth.sum() + 1)
    weights = torch.tensor([1.0, 1.0, 1.0, weight_no_object])
    num_masks = copies * sum(len(t["labels"]) for t in targets)
    return dict(
        labels=2 * F.cross_entropy(logits.transpose(1, 2), classes, weights),
        mask=5 * focal / num_masks,
        dice=5 * dice / num_masks,
    )


def test_denoising_losses_equal_a_plain_loop_in_every_layer():
    model, batch = make_model(), make_batch((2, 1))
    with torch.no_grad():
        outputs = run(model, batch)
        losses = make_criterion()(outputs, batch.targets)
        (noised,) = outputs["training_outputs"]
        for prefix, layer in {"dn_": noised, "dn_aux1_": noised["aux_outputs"][1]}.items():
            for name, expected in by_hand(layer, batch.targets).items():
                torch.testing.assert_close(losses[prefix + name], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("counts", [(2, 1), (0, 2), (0, 0), (9, 1)])
def test_keys_are_constant_and_every_parameter_has_a_gradient(counts):
    model, batch = make_model(), make_batch(counts)
    losses = make_criterion()(run(model, batch), batch.targets)
    expected = {f"dn_{layer}{term}" for layer in ("", "aux0_", "aux1_") for term in ("labels", "mask", "dice")}
    assert {name for name in losses if name.startswith("dn_")} == expected
    assert all(value.isfinite() for value in losses.values())
    if not sum(counts):
        assert all(losses[name] == 0 for name in expected)
    sum(losses.values()).backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_denoising_queries_and_query_groups_can_be_combined():
    torch.manual_seed(0)
    model, batch = make_model(GROUPS), make_batch()
    outputs = run(model, batch)
    noised, group = outputs["training_outputs"]
    assert (noised["name"], group["name"]) == ("dn", "") and noised["pred_logits"].shape[1] == 6
    losses = make_criterion()(outputs, batch.targets)
    assert "dn_labels" in losses and not any(name.startswith("group") for name in losses)


def test_weights_without_denoising_queries_initialize_a_model_with_them():
    model, plain = make_model(), make_plain()
    with torch.no_grad():
        plain.head.query_feat.weight.add_(1)
    label_embed = model.training_queries.denoising.label_embed.weight.clone()
    load_weights(model, plain.state_dict())
    assert torch.equal(model.head.query_feat.weight, plain.head.query_feat.weight)
    assert torch.equal(model.training_queries.denoising.label_embed.weight, label_embed)


@pytest.mark.slow
def test_overfits_two_images_with_denoising_queries_and_groups():
    model, batch, criterion = make_model(GROUPS), make_batch(), make_criterion()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history = []
    for _ in range(80):
        losses = criterion(run(model, batch), batch.targets)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append({name: value.item() for name, value in losses.items()})
    for name in ("mask", "dice", "dn_mask", "dn_dice", "dn_labels", "labels"):
        assert history[-1][name] < 0.5 * history[0][name], name


def test_masks_stored_as_bits_train_the_same_and_in_a_compiled_model():
    torch._dynamo.reset()
    model, batch, results = make_model(), make_batch(), []
    packed = [t | {"masks": PackedMasks.pack(t["masks"].numpy(), t["masks"].shape[1:])} for t in batch.targets]
    compiled = torch.compile(model, backend="eager")
    for called, targets in ((model, batch.targets), (model, packed), (compiled, packed)):
        torch.manual_seed(1)
        outputs = called(**training_inputs(model, Batch(batch.inputs, targets)))
        results.append(make_criterion()(outputs, targets))
    assert results[0] == results[1]
    # A compiled model's sums may be rounded otherwise, as on a processor that has only AVX2.
    torch.testing.assert_close(results[2], results[0], rtol=1e-5, atol=1e-6)
