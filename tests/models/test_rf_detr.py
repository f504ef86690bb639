"""RF-DETR: equal to the transformers library's, for images of any shape, and trained with groups of queries."""

from argparse import Namespace

import pytest
import torch
from helpers.realtime_models import rf_detr
from torch import nn

from vitkit import build_model
from vitkit.backbones.windowed_vit import WindowedViT
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.io.coco_classes import COCO_CATEGORY_IDS, COCO_CLASSES
from vitkit.model_zoo.converters import write_names
from vitkit.model_zoo.converters.rf_detr import TRANSFORMERS
from vitkit.necks.c2f_projection import C2fProjection
from vitkit.ops.mask_postprocess import Geometry, upsample_to_masks
from vitkit.registry import CRITERIA
from vitkit.structures import FeatureInfo
from vitkit.training_queries.groups import OneToManyQueries
from vitkit.weights import load_weights

SIZES = {
    "n": dict(resolution=384, layers=2),
    "s": dict(resolution=512, layers=3),
    "m": dict(resolution=576, layers=4),
    "l": dict(resolution=704, layers=4),
    "seg_n": dict(resolution=312, layers=4, queries=100, windows=1),
    "seg_s": dict(resolution=384, layers=4, queries=100),
    "seg_m": dict(resolution=432, layers=5, queries=200),
    "seg_l": dict(resolution=504, layers=5, queries=200),
}
"""Resolution, number of decoder layers and queries of the published models."""


def library_model(transformers, *, resolution, layers, queries=300, windows=2, patch=16, groups=13, masks=False):
    backbone = transformers.RfDetrDinov2Config(
        hidden_size=384, num_attention_heads=6, image_size=resolution, patch_size=patch, num_windows=windows,
        out_features=["stage3", "stage6", "stage9", "stage12"],
    )  # fmt: skip
    config = transformers.RfDetrConfig(
        backbone_config=backbone, decoder_n_points=2, decoder_layers=layers, num_queries=queries, group_detr=groups,
        num_labels=91, dropout=0.0, layer_norm_eps=1e-6,
    )  # fmt: skip
    kind = transformers.RfDetrForInstanceSegmentation if masks else transformers.RfDetrForObjectDetection
    return kind(config).eval()


def randomize(model):
    torch.manual_seed(0)
    for key, value in model.named_parameters():
        is_scale = "lambda1" in key or ("norm" in key and key.endswith("weight"))
        nn.init.normal_(value, mean=float(is_scale), std=0.1 if value.dim() < 2 else 0.05)


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        ((256, 256), dict(resolution=256, layers=2, queries=40, groups=3)),
        ((192, 192), dict(resolution=256, layers=2, queries=40, groups=3)),
        # The library confuses height and width in several windows, so rectangles are compared with one.
        ((128, 192), dict(resolution=96, layers=2, queries=40, groups=2, windows=1)),
        ((96, 96), dict(resolution=96, layers=3, queries=20, groups=2, patch=12, masks=True)),
        ((72, 120), dict(resolution=96, layers=3, queries=20, groups=2, patch=12, masks=True, windows=1)),
    ],
    ids=["own size", "other size", "rectangle", "masks", "masks of a rectangle"],
)
def test_outputs_equal_the_librarys(size, changes):
    transformers = pytest.importorskip("transformers", reason="the comparison needs pip install -e '.[benchmark]'")
    theirs, ours = library_model(transformers, **changes), rf_detr(**changes).eval()
    randomize(theirs)
    table = next(form.table for form in TRANSFORMERS if form.is_of(ours))
    ours.load_state_dict(table.read(theirs.state_dict(), ours))
    written = table.write(ours.state_dict(), ours)
    assert written.keys() == theirs.state_dict().keys()
    tokens = {key for key, value in theirs.state_dict().items() if not torch.equal(value, written[key])}
    assert all(key.endswith("mask_token") for key in tokens), "only the unused token of pre-training differs"
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        expected, outputs = theirs.double()(images), ours.double()(images)
    torch.testing.assert_close(outputs["pred_logits"], expected.logits, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(outputs["pred_boxes"], expected.pred_boxes, atol=1e-6, rtol=1e-6)
    (first,) = outputs["training_outputs"]
    if changes.get("masks"):
        torch.testing.assert_close(outputs["pred_masks"], expected.pred_masks, atol=1e-5, rtol=1e-5)
        assert outputs["input_size"] == size
    else:
        torch.testing.assert_close(first["pred_boxes"], expected.enc_outputs_coord_logits, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", SIZES)
def test_every_size_has_the_librarys_parameters(name):
    transformers = pytest.importorskip("transformers", reason="the comparison needs pip install -e '.[benchmark]'")
    is_seg = name.startswith("seg")
    settings = dict(SIZES[name], masks=is_seg, patch=12 if is_seg else 16)
    with torch.device("meta"):
        theirs, ours = library_model(transformers, **settings), rf_detr(**settings)
    counts = [sum(value.numel() for value in model.parameters()) for model in (ours, theirs)]
    assert counts[0] == counts[1] - 384, "but for the token of pre-training"


def small_vit(**changes):
    torch.manual_seed(0)
    sizes = dict(patch_size=4, d_model=16, depth=4, num_heads=2, image_size=24, global_blocks=[2])
    vit = WindowedViT(**{**sizes, **changes}).eval()
    for parameter in vit.parameters():
        nn.init.normal_(parameter, std=0.3)
    return vit


@pytest.mark.parametrize("size", [(24, 24), (16, 32), (22, 13), (5, 30)])
def test_windows_equal_a_loop_over_them_in_images_of_any_size(size):
    vit = small_vit()
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        maps = vit(images)
        tokens = vit.tokens(images)
        (height, width), patches = tokens.size, tokens.x[:, 1:].unflatten(1, tokens.size)
        rows, columns = -(-height // 2), -(-width // 2)
        regions = [
            (slice(rows * i, rows * i + rows), slice(columns * j, columns * j + columns))
            for i in (0, 1)
            for j in (0, 1)
        ]
        windows = [torch.cat((tokens.x[:, :1], patches[:, y, x].flatten(1, 2)), dim=1) for y, x in regions]
        for i, block in enumerate(vit.blocks):
            if i in vit.global_blocks:
                windows = block(torch.cat(windows, dim=1), None).split([w.shape[1] for w in windows], dim=1)
            else:
                windows = [block(window, None) for window in windows]
            for (y, x), window in zip(regions, windows):
                found = maps[f"block{i + 1}"][:, :, y, x]
                expected = vit.norm(window[:, 1:]).transpose(1, 2).reshape(found.shape)
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert maps["block1"].shape[-2:] == (-(-size[0] // 4), -(-size[1] // 4))


def test_a_backbone_without_its_last_maps_has_no_block_without_a_gradient():
    vit, images = small_vit(), torch.randn(1, 3, 24, 24)
    before = vit(images)
    vit.keep_features(["block1", "block2"])
    after = vit(images)
    assert list(after) == ["block1", "block2"] and torch.equal(after["block2"], before["block2"])
    after["block2"].sum().backward()
    unused = [name for name, value in vit.named_parameters() if value.grad is None]
    assert unused == []
    with_all = small_vit().state_dict()
    load_weights(vit, with_all)


def small(*, masks=False, groups=3, classes=3, windows=2, queries=6):
    torch.manual_seed(0)
    model = build_model(
        dict(
            type="RFDETRSeg" if masks else "RFDETR",
            num_queries=queries,
            num_classes=classes,
            num_detections=5,
            backbone=dict(
                type="WindowedViT", patch_size=8, d_model=16, depth=4, num_heads=2, image_size=64, global_blocks=[2],
                num_windows=windows,
            ),
            neck=dict(type="C2fProjection", out_channels=32),
            head=dict(
                type="RFDETRHead", d_model=32, num_heads=2, num_cross_heads=4, d_ffn=32, num_decoder_layers=2,
                masks=masks,
            ),
            training_queries=[dict(type="QueryGroups", groups=groups)] if groups > 1 else [],
        )
    )  # fmt: skip
    for name, value in model.named_parameters():
        if "bbox_embed.layers.2" in name:
            nn.init.normal_(value, std=0.1)
    return model


TARGETS = [
    {"labels": torch.tensor([0, 2]), "boxes_cxcywh": torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.6, 0.6, 0.4, 0.3]])},
    {"labels": torch.tensor([1]), "boxes_cxcywh": torch.tensor([[0.5, 0.5, 0.9, 0.9]])},
]
COSTS = dict(activation="sigmoid", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0)
CRITERION = dict(
    type="SetCriterion", class_loss="iou_aware", weights=dict(labels=1.0, l1=5.0, giou=2.0),
    matcher=dict(type="HungarianMatcher", **COSTS),
)  # fmt: skip
MASK_CRITERION = dict(
    type="BoxMaskCriterion", weights=dict(labels=5.0, l1=5.0, giou=2.0, mask=5.0, dice=5.0),
    matcher=dict(type="HungarianBoxMaskMatcher", **COSTS, cost_mask=5.0, cost_dice=5.0),
)  # fmt: skip


def with_masks(target, size):
    masks = torch.zeros(len(target["labels"]), *size, dtype=torch.bool)
    masks[:, 5:20, 8:30] = True
    return {**target, "masks": masks}


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("empty", [False, True])
def test_every_parameter_is_trained_by_images_of_different_sizes(masks, empty):
    model, criterion = small(masks=masks).train(), CRITERIA.build(MASK_CRITERION if masks else CRITERION)
    sizes = [(60, 75), (41, 50)]
    targets = [with_masks(target, size) for target, size in zip(TARGETS, sizes)]
    if empty:
        targets = [{name: value[:0] for name, value in target.items()} for target in targets]
    padding = torch.zeros(2, 60, 75, dtype=torch.bool)
    padding[1, 41:], padding[1, :, 50:] = True, True
    losses = criterion(model(torch.randn(2, 3, 60, 75), padding, targets), targets)
    terms = ("labels", "l1", "giou", *(["mask", "dice"] if masks else []))
    assert losses.keys() == {f"{layer}{term}" for layer in ("", "aux0_", "enc_") for term in terms}
    sum(losses.values()).backward()
    assert [name for name, value in model.named_parameters() if value.grad is None] == []
    assert all(value.grad.isfinite().all() for value in model.parameters())


def test_groups_see_only_themselves_and_exist_only_in_training():
    model, images = small().eval(), torch.randn(2, 3, 60, 75)
    with torch.no_grad():
        alone, together = model(images), model(images, None, TARGETS)
        torch.testing.assert_close(together["pred_logits"], alone["pred_logits"])
        torch.testing.assert_close(together["pred_boxes"], alone["pred_boxes"])
        assert [entry["name"] for entry in alone["training_outputs"]] == ["enc"]
        assert [entry["name"] for entry in together["training_outputs"]] == ["enc", "enc", "enc", "", ""]
        nn.init.normal_(model.training_queries.groups.embed.weight)
        changed = model(images, None, TARGETS)
    torch.testing.assert_close(changed["pred_logits"], alone["pred_logits"])
    assert not torch.allclose(
        changed["training_outputs"][3]["pred_logits"], together["training_outputs"][3]["pred_logits"]
    )


def test_masks_of_all_groups_are_made_from_one_map():
    targets = [with_masks(target, (60, 75)) for target in TARGETS]
    outputs = small(masks=True).train()(torch.randn(2, 3, 60, 75), None, targets)
    maps = {name: set() for name in ("enc", "")}
    for entry in outputs["training_outputs"]:
        maps[entry["name"]].add(id(entry["mask_features"]))
    assert len(maps["enc"]) == 1 and maps[""] == {id(outputs["mask_features"])}


def test_boxes_are_relative_to_images_that_are_not_divisible_into_patches():
    model = small(groups=1).eval()
    for name, value in model.named_parameters():
        if "bbox_embed.layers.2" in name:
            nn.init.zeros_(value)
    height, width = 43, 70
    with torch.no_grad():
        boxes = model(torch.randn(1, 3, height, width))["pred_boxes"][0]
    columns = boxes[:, 0] * width / 8 - 0.5
    rows = boxes[:, 1] * height / 8 - 0.5
    torch.testing.assert_close(columns, columns.round(), atol=1e-4, rtol=0)
    torch.testing.assert_close(rows, rows.round(), atol=1e-4, rtol=0)
    torch.testing.assert_close(boxes[:, 2:], torch.full((6, 2), 0.05))


def test_results_end_at_the_images_border_and_have_a_mask_each():
    model = small(masks=True, groups=1).eval()
    outputs = model(torch.randn(2, 3, 43, 70))
    assert outputs["input_size"] == (48, 72) and outputs["pred_masks"].shape == (2, 6, 12, 18)
    outputs["pred_boxes"] = outputs["pred_boxes"] + 0.5
    for result, (height, width) in zip(model.postprocess(outputs, [(86, 140), (30, 20)]), [(86, 140), (30, 20)]):
        assert result["masks"].shape == (5, height, width) and result["masks"].dtype == torch.bool
        assert result["boxes_xyxy"].amax(0).tolist()[2:] == [width, height]


def test_masks_are_resized_once_where_they_end_with_the_image():
    masks = torch.randn(3, 6, 8)
    direct = nn.functional.interpolate(masks[None], size=(50, 33), mode="bilinear")[0] > 0
    assert torch.equal(upsample_to_masks(masks, Geometry((24, 32), (24, 32), (50, 33))), direct)
    part = nn.functional.interpolate(masks[None, :, :5, :6], size=(50, 33), mode="bilinear")[0] > 0
    assert torch.equal(upsample_to_masks(masks, Geometry((24, 32), (20, 24), (50, 33))), part)
    pixels = nn.functional.interpolate(masks[None], size=(24, 32), mode="bilinear")[..., :21, :24]
    part = nn.functional.interpolate(pixels, size=(50, 33), mode="bilinear")[0] > 0
    assert torch.equal(upsample_to_masks(masks, Geometry((24, 32), (21, 24), (50, 33))), part)


def official_file(path, model):
    """Write the weights as the original stores them: beside a Namespace, with a head for COCO's raw ids."""
    args = Namespace(
        encoder="dinov2_windowed_small", resolution=64, num_classes=90, lr=1e-4, out_feature_indexes=[1, 2]
    )
    torch.save({"model": write_names(model, "official").state, "args": args, "epoch": 3}, path)


def test_an_official_file_is_read_without_running_code_and_its_raw_ids_become_cocos_classes(tmp_path):
    theirs, ours = small(classes=91), small(classes=80)
    nn.init.normal_(theirs.head.class_embed.weight)
    official_file(tmp_path / "weights.pth", theirs)
    report = load_weights(ours, tmp_path / "weights.pth", classes=COCO_CLASSES)
    assert report.converter == "roboflow/rf-detr" and not report.missing and not report.unexpected
    assert torch.equal(ours.head.class_embed.weight, theirs.head.class_embed.weight[list(COCO_CATEGORY_IDS)])
    group, theirs_group = (model.training_queries.groups.proposals[1].class_embed for model in (ours, theirs))
    assert torch.equal(group.weight, theirs_group.weight[list(COCO_CATEGORY_IDS)])


def test_checkpoints_of_lightning_are_read(tmp_path):
    """As versions from 1.5 of the original write them beside the .pth files."""
    theirs, ours = small(classes=91), small(classes=91)
    nn.init.normal_(theirs.head.class_embed.weight)
    state = {f"model.{key}": value for key, value in write_names(theirs, "official").state.items()}
    state["criterion.empty_weight"] = torch.ones(92)
    torch.save({"state_dict": state, "pytorch-lightning_version": "2.6.0", "epoch": 3}, tmp_path / "last.ckpt")
    report = load_weights(ours, tmp_path / "last.ckpt")
    assert report.converter == "roboflow/rf-detr"
    assert torch.equal(ours.head.class_embed.weight, theirs.head.class_embed.weight)


def test_other_classes_replace_the_class_heads_of_all_groups_and_nothing_else(tmp_path):
    theirs, ours = small(classes=91), small(classes=2)
    nn.init.normal_(theirs.training_queries.groups.embed.weight)
    official_file(tmp_path / "weights.pth", theirs)
    with pytest.raises(CheckpointError, match="classes"):
        load_weights(ours, tmp_path / "weights.pth", classes=["a", "b"])
    report = load_weights(ours, tmp_path / "weights.pth", classes=["a", "b"], new_class_head=True)
    assert len(report.reinitialized) == 2 * (1 + 3) and all("class_embed" in name for name in report.reinitialized)
    assert torch.equal(ours.training_queries.groups.embed.weight, theirs.training_queries.groups.embed.weight)


@pytest.mark.parametrize("groups", [1, 2])
def test_other_numbers_of_groups_load_the_first_group(tmp_path, groups):
    theirs, ours = small(classes=91), small(classes=91, groups=groups)
    nn.init.normal_(theirs.head.query_embed.weight)
    official_file(tmp_path / "weights.pth", theirs)
    load_weights(ours, tmp_path / "weights.pth")
    assert torch.equal(ours.head.query_embed.weight, theirs.head.query_embed.weight)


def test_weights_with_more_queries_keep_the_first_of_each_group(tmp_path):
    theirs, ours = small(classes=91, queries=6), small(classes=91, queries=4)
    embed = theirs.training_queries.groups.embed
    nn.init.normal_(embed.weight)
    official_file(tmp_path / "weights.pth", theirs)
    load_weights(ours, tmp_path / "weights.pth")
    assert torch.equal(ours.head.query_embed.weight, theirs.head.query_embed.weight[:4])
    assert torch.equal(ours.training_queries.groups.embed.weight, torch.cat((embed.weight[:4], embed.weight[6:10])))


def test_weights_of_another_size_or_without_masks_are_named(tmp_path):
    official_file(tmp_path / "weights.pth", small(classes=91))
    with pytest.raises(
        CheckpointError, match="of 2 decoder layers without masks does not fit a model of 2 .* with masks"
    ):
        load_weights(small(classes=91, masks=True), tmp_path / "weights.pth")


def test_weights_of_another_model_are_not_taken_for_a_variant():
    state = small(classes=3).state_dict()
    del state["head.query_embed.weight"]  # RT-DETR's weights, for example, have most names, but no learned queries
    with pytest.raises(CheckpointError, match=r"missing \(1\): head.query_embed.weight"):
        load_weights(small(classes=3), state)


MAPS = {"res3": FeatureInfo(8, 8), "res4": FeatureInfo(8, 16)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WindowedViT(num_windows=0), "num_windows=0: expected at least 1"),
        (lambda: WindowedViT(global_blocks=[3, 12]), r"global_blocks=\[12\]: expected indices of blocks, 0 to 11"),
        (lambda: WindowedViT(out_features=["res4"]), "out_features: unknown feature 'res4'"),
        (lambda: C2fProjection(MAPS, 8), "the maps res3, res4 have strides 8, 16; expected .* one stride"),
        (lambda: C2fProjection(MAPS, 8, in_features=["res5"]), "the backbone has no feature 'res5'"),
        (lambda: C2fProjection(MAPS, 7, in_features=["res3"]), "out_channels=7: expected an even number"),
        (lambda: small(queries=0), "num_queries=0, num_decoder_layers=2: expected at least 1"),
    ],
)
def test_wrong_settings_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_heads_that_do_not_fit_are_named():
    parts = dict(
        backbone=dict(type="ResNet", depth=18, pretrained=False),
        neck=dict(type="C2fProjection", out_channels=32, in_features=["res4"]),
        head=dict(type="RFDETRHead", d_model=32, num_heads=2, num_cross_heads=2),
    )
    with pytest.raises(ConfigError, match="RFDETRSeg: the head predicts no masks. Set model.head.masks=True"):
        build_model(dict(type="RFDETRSeg", **parts))
    vit = dict(type="WindowedViT", patch_size=14, d_model=16, depth=4, num_heads=2, image_size=56, global_blocks=[])
    parts |= dict(backbone=vit, neck=dict(type="C2fProjection", out_channels=32), head=dict(parts["head"], masks=True))
    with pytest.raises(ConfigError, match="masks: BlockMasks: the finest of the neck's maps, res4, has stride 14"):
        build_model(dict(type="RFDETRSeg", **parts))
    with pytest.raises(ConfigError, match="OneToManyQueries: the first stage of RFDETRHead .* Choose QueryGroups"):
        OneToManyQueries(small().head, 3, num_queries=6)


def test_images_with_fewer_locations_than_queries_are_named():
    with pytest.raises(DataError, match=r"RF-DETR: the maps \[\(1, 3\)\] have 3 locations, fewer than the 6 queries"):
        small().eval()(torch.randn(1, 3, 8, 20))
