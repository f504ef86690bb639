import numpy as np
import pytest
import torch

from vitkit import build_model
from vitkit.apps.explanations import backbones
from vitkit.apps.explanations.attention_locations import attention_names, locate_attention, spread
from vitkit.apps.explanations.backbones import (
    backbone_attention,
    estimate_layer_bytes,
    is_large,
    keys_size,
    locate_in_input,
    mean_distances,
    rollout_maps,
)
from vitkit.apps.explanations.explain_options import ExplainRequest, Explanation
from vitkit.apps.inference import Predictor
from vitkit.errors import ConfigError, DataError
from vitkit.nn.attention import AttentionRecorder

BACKBONES = {
    "vit": dict(type="ViT", d_model=16, depth=2, num_heads=2, image_size=64, patch_size=16),
    "swin": dict(type="Swin", embed_dim=4, depths=(2, 2, 2, 2), num_heads=(1, 1, 2, 2), window=4),
    "swinv2": dict(type="SwinV2", embed_dim=4, depths=(2, 2, 2, 2), num_heads=(1, 1, 2, 2), window=4),
    "mvit": dict(type="MViT", depths=(1, 1, 1, 1), embed_dim=8, num_heads=1),
    "lrnet": dict(type="LRNet", depth=26, channels_per_weight=16, kernel_size=3),
    "nonlocal": dict(type="NonLocalResNet", depth=50, pretrained=False),
}


def classifier(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(dict(type="Classifier", backbone=BACKBONES[name], num_classes=3)).eval()


def explained(predictor: Predictor, image: np.ndarray, folder, stem: str, **options) -> Explanation:
    result = Explanation(folder, stem=stem)
    backbones.explain_backbone(predictor, image, ExplainRequest(**options), result)
    return result


def draw_image(height: int = 50, width: int = 70) -> torch.Tensor:
    return torch.randint(0, 255, (1, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", BACKBONES)
def test_attention_of_a_point_sums_to_at_most_one_over_the_map(name):
    model, image = classifier(name), draw_image()
    for layer in locate_attention(model, image, names=spread(attention_names(model), 4)):
        for point in ((3.0, 5.0), (60.0, 44.0)):
            sums = layer.at(point).sum((1, 2))
            # Weights on padding or on the class token are not on the map.
            assert (sums <= 1 + 1e-5).all() and (sums > 0.05).all()
            x0, y0, x1, y1 = layer.window_at(point)
            assert x0 < x1 and y0 < y1


def test_swin_attends_to_its_window_and_after_the_shift_to_another():
    layers = locate_attention(classifier("swin"), draw_image(64, 64))
    # Stride 4, windows of 4: 16 pixels; the second block's windows lie half of one further to the left and up.
    assert layers[0].window_at((41, 21)) == (32, 16, 48, 32)
    assert layers[1].window_at((41, 21)) == (40, 8, 56, 24)
    # At the border, a shifted window is cut; the rest of it comes from the opposite border and is masked.
    assert layers[1].window_at((60, 62)) == (56, 56, 64, 64)


def test_vit_maps_equal_the_recorded_rows():
    model, image = classifier("vit"), draw_image()
    with torch.no_grad(), AttentionRecorder(model) as maps:
        model(image)
    expected = maps["backbone.blocks.1.attn"][0][0]  # 4 x 5 patches after the class token
    layers = locate_attention(model, image)
    assert torch.allclose(layers[1].class_token(), expected[:, 0, 1:].unflatten(-1, (4, 5)), atol=1e-6)
    assert torch.allclose(layers[1].at((33, 17)), expected[:, 1 + 5 + 2, 1:].unflatten(-1, (4, 5)), atol=1e-6)
    assert layers[1].covered == (64 / 50, 80 / 70)
    halves = [maps[f"backbone.blocks.{i}.attn"][0][0].mean(0) / 2 + torch.eye(21) / 2 for i in (0, 1)]
    reached = rollout_maps(layers, [0])[1]
    assert torch.allclose(reached[0], (halves[1] @ halves[0])[0, 1:].unflatten(0, (4, 5)), atol=1e-6)


def test_local_kernel_surrounds_its_point_within_the_image():
    layer = locate_attention(classifier("lrnet"), draw_image(64, 64))[2]
    assert layer.cell == 4 and layer.window_at((33, 33)) == (28, 28, 40, 40)
    assert layer.window_at((0, 0)) == (0, 0, 8, 8)


def test_only_the_first_and_last_layer_of_a_large_image_are_drawn(monkeypatch, tmp_path):
    monkeypatch.setattr(backbones, "MAX_PIXELS", 50 * 70 - 1)
    predictor, image = Predictor(classifier("swin"), list("abc")), draw_image()[0].permute(1, 2, 0).numpy()
    result = explained(predictor, image, tmp_path, "image")
    assert "only the first and the last layer are drawn" in result.notes[0] and "70 x 50 pixels" in result.notes[0]
    layers = backbone_attention(predictor, image)
    assert [layer.name for layer in layers] == ["backbone.layers.0.blocks.0.attn", "backbone.layers.3.blocks.1.attn"]


def record(monkeypatch) -> dict[str, str]:
    """Record the title and the names of the rows of each figure from now on, by the name of its file."""
    titles = {}

    def keep(image, rows, path, *, title, **_):
        titles[path.stem] = title
        titles[f"{path.stem} rows"] = ", ".join(name for name, _ in rows)

    monkeypatch.setattr(backbones, "draw_rows", keep)
    return titles


def test_memory_of_a_vits_weights_is_known_before_they_are_recorded(monkeypatch):
    model, image = classifier("vit"), draw_image(64, 64)
    needed = 4 * sum(layer.weights[..., 1:, 1:].numel() for layer in locate_attention(model, image))
    monkeypatch.setattr(backbones, "MAX_BYTES", needed)
    assert not is_large(model, image)
    monkeypatch.setattr(backbones, "MAX_BYTES", needed - 1)
    assert is_large(model, image)


def test_figure_whose_weights_do_not_fit_for_a_single_layer_is_refused(monkeypatch):
    predictor, image = Predictor(classifier("vit"), list("abc")), draw_image()[0].permute(1, 2, 0).numpy()
    needed = estimate_layer_bytes(predictor.model, predictor.prepare([image]).inputs["images"])
    monkeypatch.setattr(backbones, "MAX_BYTES", needed)
    assert len(backbone_attention(predictor, image)) == 2
    monkeypatch.setattr(backbones, "MAX_BYTES", needed - 1)
    with pytest.raises(DataError, match="a single layer take .* GiB for 70 x 50 pixels"):
        backbone_attention(predictor, image)


def test_titles_say_which_heads_layers_and_groups_are_left_out(monkeypatch, tmp_path):
    titles, image = record(monkeypatch), draw_image()[0].permute(1, 2, 0).numpy()
    backbone = dict(BACKBONES["vit"], d_model=32, num_heads=16, depth=14)
    model = build_model(dict(type="Classifier", backbone=backbone, num_classes=3)).eval()
    assert explained(Predictor(model, list("abc")), image, tmp_path, "vit").notes == []
    assert titles["vit_class_token"].endswith("by layer and head; 12 of 16 heads, 12 of 14 layers")
    assert titles["vit_points"].endswith("; 12 of 14 layers") and titles["vit_rollout"].endswith("; 8 of 14 steps")
    backbone = dict(BACKBONES["lrnet"], channels_per_weight=8)
    predictor = Predictor(build_model(dict(type="Classifier", backbone=backbone, num_classes=3)).eval(), list("abc"))
    result = explained(predictor, image, tmp_path, "lrnet", points=[(3, 4), (40, 30)])
    assert titles["lrnet_kernels"].endswith("; 4 of 9 layers")
    assert "res2 block 1: geometry prior; 8 of 13 groups, res2 block 1: at the point" in titles["lrnet_kernels rows"]
    assert "the kernels are drawn at the first of the 2 points only" in "\n".join(result.notes)


@pytest.mark.parametrize("name", ["swin", "mvit", "lrnet", "nonlocal"])
def test_missing_figures_are_explained(name, monkeypatch, tmp_path):
    titles, image = record(monkeypatch), draw_image()[0].permute(1, 2, 0).numpy()
    notes = "\n".join(explained(Predictor(classifier(name), list("abc")), image, tmp_path, "image").notes)
    assert "no figure of the rollout: it needs the attention of all layers" in notes
    assert f"no figure of the class token: this {BACKBONES[name]['type']} does not have exactly one" in notes
    assert ("window" in titles["image_points"]) == (name in ("swin", "lrnet"))  # the others see everything


def test_layers_are_labeled_by_stage_and_block():
    expected = {
        "vit": ["block 1", "block 2"],
        "swin": [f"stage {stage} block {block}" for stage in (1, 2, 3, 4) for block in (1, 2)],
        "lrnet": ["stem", *(f"res{stage} block {block}" for stage in (2, 3, 4, 5) for block in (1, 2))],
        "nonlocal": [f"res{stage} after block {block}" for stage, block in ((3, 2), (3, 4), (4, 2), (4, 4), (4, 6))],
    }
    for name, labels in expected.items():
        assert [layer.label for layer in locate_attention(classifier(name), draw_image())] == labels


def test_keys_are_counted_after_pooling():
    # Maps of 7 x 9 and 4 x 5 locations, pooled by 2.
    layers = locate_attention(classifier("nonlocal"), draw_image())
    assert [keys_size(layer) for layer in (layers[0], layers[-1])] == [(3, 4), (2, 2)]


def test_distances_of_every_layer_are_averaged_over_small_and_large_images(monkeypatch):
    predictor = Predictor(classifier("swin"), list("abc"))
    images = [draw_image(*size)[0].permute(1, 2, 0).numpy() for size in ((50, 70), (40, 40))]
    expected = mean_distances(predictor, images)
    monkeypatch.setattr(backbones, "MAX_PIXELS", 50 * 70 - 1)
    distances = mean_distances(predictor, images)
    assert list(distances) == [f"stage {stage} block {block}" for stage in (1, 2, 3, 4) for block in (1, 2)]
    assert all(torch.allclose(heads, expected[name]) for name, heads in distances.items())


def test_negative_weights_have_no_distance():
    torch.manual_seed(0)
    spec = dict(type="NonLocalResNet", depth=50, pretrained=False, pairwise="dot_product")
    predictor = Predictor(build_model(dict(type="Classifier", backbone=spec, num_classes=3)).eval(), list("abc"))
    with pytest.raises(ConfigError, match="images: res3 after block 2 has negative weights"):
        mean_distances(predictor, [draw_image()[0].permute(1, 2, 0).numpy()])


def test_layers_are_spread_from_the_first_to_the_last():
    assert spread(range(10), 4) == [0, 3, 6, 9] and spread("abc", 5) == list("abc") and spread("abc", 1) == ["a"]


def test_points_follow_the_image_through_resizing_and_cropping():
    predictor = Predictor(classifier("vit"), list("abc"))
    predictor.as_evaluated = lambda image: np.repeat(np.repeat(image, 2, 0), 2, 1)[:, 20:]
    x, y = locate_in_input(predictor, np.zeros((50, 70, 3), np.uint8), (40, 10))
    assert x == pytest.approx(2 * 40.5 - 20) and y == pytest.approx(2 * 10.5)
