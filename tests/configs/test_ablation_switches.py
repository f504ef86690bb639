"""The arguments by which ablations leave a part out."""

import numpy as np
import pytest
import torch

from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import choose_fraction
from vitkit.data.synthetic.shapes import ShapesDetection
from vitkit.errors import ConfigError, DataError
from vitkit.heads.detr import DETRHead
from vitkit.heads.mask2former import Mask2FormerHead
from vitkit.matchers.fixed import FixedMaskMatcher
from vitkit.nn.layers import FeedForward
from vitkit.protocols.dataset import Dataset
from vitkit.registry import BACKBONES, DATASETS, HEADS
from vitkit.structures import FeatureInfo

SIZES = dict(d_model=16, num_heads=2, d_ffn=32, num_decoder_layers=2)


def detr_head(**settings) -> DETRHead:
    torch.manual_seed(0)
    spec = dict(type="DETRHead", **SIZES, num_encoder_layers=1, dropout=0.0, **settings)
    return HEADS.build(spec, feature_info={"res4": FeatureInfo(16, 16)}, num_classes=3, num_queries=5).eval()


@pytest.mark.parametrize(("positions", "are_seen"), [("none", False), ("sine", True), ("sine_input", True)])
def test_detr_without_position_encodings_ignores_locations(positions, are_seen):
    head, features = detr_head(positions=positions), torch.randn(1, 16, 3, 4)
    boxes = [head({"res4": x})["pred_boxes"] for x in (features, features.flip(3))]
    assert torch.allclose(*boxes, atol=1e-5) is not are_seen


def test_detr_learns_a_position_for_each_row_and_column():
    head, features = detr_head(positions="learned"), torch.randn(1, 16, 60, 2)
    head({"res4": features})["pred_boxes"].sum().backward()
    assert (head.row_embed.weight.grad.abs().sum(1) > 0).all()  # 60 rows: those from 50 on have the last one's
    assert (head.col_embed.weight.grad.abs().sum(1) > 0).tolist() == [True] * 2 + [False] * 48
    with pytest.raises(ConfigError, match=r"head: DETRHead: positions='cosine', expected one of"):
        detr_head(positions="cosine")


def test_feed_forward_network_without_channels_adds_only_a_bias():
    ffn = FeedForward(16, 0)
    assert torch.equal(ffn(torch.randn(2, 3, 16)), ffn.linear2.bias.expand(2, 3, 16))


def mask2former_head(num_queries=5, **settings) -> Mask2FormerHead:
    torch.manual_seed(0)
    info = {"mask_features": FeatureInfo(16, 4), "res3": FeatureInfo(16, 8), "res4": FeatureInfo(16, 16)}
    spec = dict(type="Mask2FormerHead", **SIZES, num_levels=2, **settings)
    return HEADS.build(spec, feature_info=info, num_classes=3, num_queries=num_queries).eval()


@pytest.mark.parametrize("is_masked", [True, False])
def test_mask2former_with_full_attention_attends_outside_its_mask(is_masked):
    head = mask2former_head(num_queries=1, masked_attention=is_masked)
    features = {"mask_features": torch.randn(1, 16, 16, 16), "res3": torch.randn(1, 16, 8, 8)}
    features["res4"] = torch.randn(1, 16, 4, 4, requires_grad=True)
    # The first layer reads res4.
    head(features)["aux_outputs"][1]["pred_logits"][0, 0, 0].backward()
    num_read = int((features["res4"].grad.abs().sum(1) > 0).sum())
    assert 0 < num_read < 16 if is_masked else num_read == 16


def test_mask2former_with_zero_queries_predicts_nothing_before_the_first_layer():
    features = {name: torch.randn(1, 16, s, s) for name, s in (("mask_features", 16), ("res3", 8), ("res4", 4))}
    learned, zero = mask2former_head(), mask2former_head(learned_queries=False)
    assert len(learned(features)["aux_outputs"]) == 2 and len(zero(features)["aux_outputs"]) == 1
    assert not zero.query_feat.weight.any() and not zero.query_feat.weight.requires_grad


def test_fixed_matcher_gives_each_class_its_query():
    targets = [{"labels": torch.tensor([2, 0])}, {"labels": torch.tensor([], dtype=torch.int64)}]
    layers = [{"pred_logits": torch.zeros(2, 3, 4)}] * 2
    (matches,) = FixedMaskMatcher()([(layers, targets)], input_size=(8, 8))
    assert [[pair.tolist() for pair in image] for image in matches[1]] == [[[0, 2], [1, 0]], [[], []]]
    with pytest.raises(DataError, match=r"has labels \[1, 1\]; expected each class once, all in 0\.\.2"):
        FixedMaskMatcher()([(layers, [{"labels": torch.tensor([1, 1])}])], input_size=(8, 8))
    classes = layers[0]["pred_logits"].shape[2] - 1
    for wrong in (-1, classes):
        with pytest.raises(DataError, match=rf"has labels \[{wrong}\]; expected each class once, all in 0\.\."):
            FixedMaskMatcher()([(layers, [{"labels": torch.tensor([wrong])}])], input_size=(8, 8))


def vit(**arguments):
    torch.manual_seed(0)
    sizes = dict(patch_size=8, d_model=16, depth=2, num_heads=2, image_size=32, pretrained=False, num_classes=3)
    return BACKBONES.build(dict(type="ViT", **sizes, **arguments)).eval()


@pytest.mark.parametrize(("positions", "are_seen"), [("none", False), ("axes", True), ("all", True)])
def test_vit_without_position_encodings_ignores_patch_locations(positions, are_seen):
    images = torch.randn(1, 3, 32, 32)
    moved = images.roll(8, dims=3)  # by a patch
    model = vit(positions=positions)
    assert torch.allclose(model(images), model(moved), atol=1e-6) is not are_seen


def test_axial_vit_positions_are_the_sum_of_row_and_column():
    model = vit(positions="axes")
    patches = model.embed(torch.zeros(1, 6, 16), (2, 3))[0, 1:].unflatten(0, (2, 3))
    assert torch.equal(patches[0, :, :8], patches[0, :1, :8].expand(3, -1))
    assert torch.equal(patches[:, 0, 8:], patches[:1, 0, 8:].expand(2, -1)) and not torch.equal(*patches[:, 0, :8])
    assert vit(positions="axes")(torch.randn(1, 3, 40, 24)).shape == (1, 3)


def test_hybrid_vit_splits_a_stem_feature_map_into_patches():
    stem = dict(type="ResNet", depth=18, out_features=["res2"], pretrained=False)
    model = vit(stem=stem)
    assert model.patch_embed.proj.weight.shape == (16, 64, 2, 2) and model(torch.randn(2, 3, 30, 32)).shape == (2, 3)
    with pytest.raises(ConfigError, match="patch_size=8: expected a multiple of 16, the stem's stride"):
        vit(stem=stem | {"out_features": ["res4"]})


def test_vit_head_may_have_a_hidden_layer():
    model = vit(classifier=dict(hidden_layer=True))
    x = torch.randn(2, 17, 16)
    hidden, tanh, last = model.head
    assert torch.allclose(model.classify(x), last(torch.tanh(hidden(model.norm(x)[:, 0]))))
    assert isinstance(tanh, torch.nn.Tanh)


def test_a_fraction_of_the_training_images_is_the_same_in_each_run_and_nested():
    tenth, third = choose_fraction(100, 0.1), choose_fraction(100, 1 / 3)
    assert len(tenth) == 10 and len(third) == 33 and set(tenth) < set(third) and len(choose_fraction(5, 0.01)) == 1
    spec = dict(type="ShapesClassification", image_size=16, num_images=100)
    data = DataSettings(train=spec | {"fraction": 0.1}, val=spec | {"fraction": 0.1}, images_per_gpu=4, num_workers=0)
    loader = data.train_loader(data.dataset("train"), seed=3)
    for epoch in (0, 1):
        loader.set_position(epoch)
        indices = [index for batch in loader.batches for index, _ in batch]
        assert set(indices) == set(tenth.tolist()) and len(loader) == 3
    with pytest.raises(
        ConfigError, match=r"data\.val\.fraction: got 0\.1; expected above 0, at most 1, and only in data\.train"
    ):
        data.dataset("val")
    with pytest.raises(ConfigError, match=r"data\.train\.fraction: got 2"):
        DataSettings(train=spec | {"fraction": 2}).dataset("train")


def test_a_seeded_fraction_is_nested_and_keeps_the_proportions_of_the_classes():
    # Photos 0 to 29 show class 0, 30 to 39 classes 0 and 1, 40 to 49 nothing.
    images = np.concatenate([np.arange(40), np.arange(30, 40)])
    labels = np.repeat([0, 1], [40, 10])
    chosen = [{*choose_fraction(50, part / 50, 3, (images, labels)).tolist()} for part in (1, 5, 10, 25, 50)]
    assert [len(part) for part in chosen] == [1, 5, 10, 25, 50] and chosen[0] < chosen[1] < chosen[2] < chosen[3]
    for part in chosen[1:]:
        counts = np.histogram([*part], bins=[0, 30, 40, 50])[0]
        assert np.abs(counts - len(part) * np.array([0.6, 0.2, 0.2])).max() <= 1
    assert len({tuple(choose_fraction(50, 0.2, seed, (images, labels))) for seed in range(5)}) == 5
    assert len({tuple(choose_fraction(50, 0.2, seed)) for seed in range(5)}) == 5  # without classes, such as of text


def test_a_seeded_fraction_is_set_in_the_config():
    spec = dict(type="ShapesDetection", image_size=32, num_images=40)
    chosen = [
        DataSettings(train=spec | dict(fraction=0.25, fraction_seed=seed)).dataset("train").training_indices()
        for seed in (1, 1, 2)
    ]
    dataset = DATASETS.build(spec)
    assert np.array_equal(chosen[0], choose_fraction(40, 0.25, 1, dataset.image_classes()))
    assert np.array_equal(chosen[0], chosen[1]) and not np.array_equal(chosen[0], chosen[2])
    assert (
        len(DataSettings(train=spec | dict(fraction=0.25, fraction_seed=1), val=spec).evaluation_dataset("train")) == 40
    )
    for wrong in (dict(fraction_seed=1), dict(fraction=0.5, fraction_seed=-1)):
        with pytest.raises(
            ConfigError, match=r"data\.train\.fraction_seed: got -?1; expected at least 0, and data\.train"
        ):
            DataSettings(train=spec | wrong).dataset("train")


def test_images_outside_the_fraction_are_not_drawn_for_mosaics_or_in_place_of_bad_ones(monkeypatch):
    drawn, chosen = set(), set(choose_fraction(100, 0.03).tolist())
    bad = min(chosen)

    def load(self, index):
        drawn.add(index)
        if index == bad:
            raise DataError("images: cannot decode")
        return load_annotated(self, index)

    load_annotated = ShapesDetection.load_annotated
    monkeypatch.setattr(ShapesDetection, "load_annotated", load)
    transforms = dict(type="MultiImageTransforms", mosaic=0.5, mixup=0.5)
    train = dict(type="ShapesDetection", num_images=100, image_size=32, fraction=0.03, transforms=transforms)
    data = DataSettings(train=train, images_per_gpu=1, num_workers=0, on_error="skip")
    loader = data.train_loader(data.dataset("train"), seed=0)
    for epoch in range(4):
        loader.set_position(epoch)
        assert len(list(loader)) == 3
    assert loader.num_skipped > 0 and drawn == chosen


def test_a_fraction_of_samples_of_another_kind_is_refused(monkeypatch):
    DATASETS.load_packages()
    monkeypatch.setattr(DATASETS, "_constructors", dict(DATASETS._constructors))

    @DATASETS.register
    class Sounds(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return index

    data = DataSettings(train=dict(type="Sounds", fraction=0.5))
    with pytest.raises(ConfigError, match=r"data\.train\.fraction: only images, videos and text have one, not Sounds"):
        data.dataset("train")
