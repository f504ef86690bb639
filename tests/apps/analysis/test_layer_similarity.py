"""CKA of layers equals the published formula, and is drawn for one or two models."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from vitkit.apps.analysis.layer_similarity import LayerSimilarity, centered_gram, compare_layers, layer_grams
from vitkit.apps.analysis.reports.layers import layer_similarity
from vitkit.errors import ConfigError, DataError
from vitkit.tools import analyze


def covariance(x: np.ndarray, y: np.ndarray) -> float:
    """Return HSIC_1 of Song et al. 2012, equation 5, by its three sums."""
    n = len(x)
    k, m = ((z @ z.T) * (1 - np.eye(n)) for z in (x, y))
    ones = np.ones(n)
    sums = np.trace(k @ m) + (ones @ k @ ones) * (ones @ m @ ones) / ((n - 1) * (n - 2))
    return (sums - 2 / (n - 2) * (ones @ k @ m @ ones)) / (n * (n - 3))


def dense_cka(first: list[np.ndarray], second: list[np.ndarray]) -> float:
    """Return the ratio of the batches' mean covariances."""
    batches = list(zip(first, second))
    product = np.mean([covariance(x, y) for x, y in batches])
    return product / np.sqrt(np.mean([covariance(x, x) for x in first]) * np.mean([covariance(y, y) for y in second]))


def random_features(seed: int, *sizes: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=sizes) + 3.0


def similarity(batches: list[dict[str, np.ndarray]], others: list[dict[str, np.ndarray]]):
    result = LayerSimilarity()
    for ours, theirs in zip(batches, others):
        grams = [{name: centered_gram(torch.from_numpy(x)) for name, x in batch.items()} for batch in (ours, theirs)]
        result.update(*grams)
    return result.compute()


def test_cka_of_random_features_equals_the_dense_formula():
    common = [random_features(k, 8, 5) for k in range(3)]
    first = [{"a": x, "b": x @ random_features(10, 5, 7) + random_features(20 + k, 8, 7)} for k, x in enumerate(common)]
    second = [{"c": np.tanh(x), "d": random_features(30 + k, 8, 3), "e": x} for k, x in enumerate(common)]
    names, others, cka = similarity(first, second)
    assert (names, others) == (["a", "b"], ["c", "d", "e"])
    for i, name in enumerate(names):
        for j, other in enumerate(others):
            expected = dense_cka([batch[name] for batch in first], [batch[other] for batch in second])
            assert cka[i, j].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert cka[0, 2].item() == pytest.approx(1.0)


def test_cka_ignores_scale_and_rotation_and_is_about_zero_for_unrelated_wide_layers():
    x = random_features(0, 16, 6)
    rotation = np.linalg.qr(random_features(1, 6, 6))[0]
    wide = [{"x": random_features(100 + k, 16, 2000)} for k in range(20)]
    unrelated = [{"y": random_features(200 + k, 16, 2000)} for k in range(20)]
    assert similarity([{"x": x}], [{"y": 0.1 * x @ rotation}])[2].item() == pytest.approx(1.0, abs=1e-5)
    assert abs(similarity(wide, unrelated)[2].item()) < 0.1
    plain = [z["x"] - z["x"].mean(axis=0) for z in wide], [z["y"] - z["y"].mean(axis=0) for z in unrelated]
    gram = [[z @ z.T for z in side] for side in plain]
    products = [[(a * b).sum() for a, b in zip(*pair)] for pair in ((gram[0], gram[1]), (gram[0], gram[0]))]
    assert np.sum(products[0]) / np.sum(products[1]) > 0.9  # the biased form, as if the layers were alike


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.same, self.shared = nn.Linear(4, 6), nn.Identity(), nn.Linear(6, 6)
        self.rows, self.constant = nn.Flatten(0, 1), nn.Linear(6, 2)
        nn.init.zeros_(self.constant.weight)

    def forward(self, x):
        x = self.same(self.first(x))
        self.rows(x[:, None].expand(-1, 2, -1))
        return self.constant(self.shared(self.shared(x)))


def test_layers_are_the_modules_with_a_row_for_each_image():
    torch.manual_seed(0)
    network, x = Network(), torch.randn(6, 4)
    grams = layer_grams(network, x)
    assert list(grams) == ["first", "shared", "constant"] and all(gram.shape == (36,) for gram in grams.values())
    torch.testing.assert_close(grams["shared"], centered_gram(network.shared(network.first(x))))
    (result,) = compare_layers([[x]], network, lambda images: images[0])
    assert result.compute()[0] == ["first", "shared"]
    assert not any(module._forward_hooks for module in network.modules())


SMALL_VIT = ["ViT", "patch_size=16", "d_model=16", "depth=2", "num_heads=2", "image_size=32"]


@pytest.fixture
def photos(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(9):
        Image.effect_noise((40, 30 + number), 90).convert("RGB").save(folder / f"{number}.png")
    (folder / "broken.png").write_bytes(b"x")
    return folder


def test_two_models_are_compared_and_drawn(photos, capsys, caplog):
    other = ["ResNet", "depth=18", "base_channels=4", "pretrained=false"]
    options = ["--images", str(photos), "--size", "32", "--batch-size", "5"]
    analyze.main([*SMALL_VIT, *options, "--json", "--cka", *other])
    own, of_other, both = json.loads(capsys.readouterr().out)
    assert (both["first"], both["second"]) == ("ViT (random weights)", "ResNet (random weights)")
    assert own["num_images"] == 9 and "left out: " in caplog.text and "broken.png" in caplog.text
    assert "blocks.1.attn.qkv" in both["layers"] == own["layers"] and "layer1.0.conv1" in both["other_layers"]
    assert np.array(both["cka"]).shape == (len(own["layers"]), len(of_other["layers"]))
    assert np.diag(own["cka"]) == pytest.approx(1.0) and np.array(own["cka"]) == pytest.approx(np.array(own["cka"]).T)
    assert Image.open("cka.png").size[0] > 2 * Image.open("cka.png").size[1]
    analyze.main([*SMALL_VIT, *options, "--cka", "--out", "own.png"])
    printed = capsys.readouterr().out
    assert "layers of ViT (random weights) on 9 images" in printed and "The plot is own.png." in printed


def test_no_batch_is_too_small_as_images_are_one_more_than_a_batch(photos):
    (result,) = layer_similarity("ViT", sorted(photos.glob("[0-4].png")), overrides=SMALL_VIT[1:], batch_size=4)
    assert result.num_images == 5


def test_trained_weights_are_those_of_the_model(photos, capsys):
    analyze.main(["shapes_vit", "--images", str(photos), "--json", "--cka"])
    (result,) = json.loads(capsys.readouterr().out)
    assert result["first"] == "shapes_vit" and "blocks.3.mlp.fc2" in result["layers"]


def test_what_cannot_be_compared_is_an_error(photos, capsys):
    with pytest.raises(DataError, match="CKA compares images; expected at least 4"):
        layer_similarity("ViT", [np.zeros((32, 32, 3), np.uint8)] * 3, overrides=SMALL_VIT[1:], size=32)
    with pytest.raises(ConfigError, match="--batch-size 3: CKA compares images; expected at least 4"):
        layer_similarity("ViT", photos, overrides=SMALL_VIT[1:], batch_size=3)
    with pytest.raises(ConfigError, match="--cka: for models of images"):
        layer_similarity("quickstart/translation", photos)
    with pytest.raises(ConfigError, match="takes clips or other channels"):
        layer_similarity("TimeSformer", photos, overrides=["d_model=16", "depth=1", "num_heads=2", "pretrained=false"])
    for arguments in (["--cka"], ["--images", "photos"], ["--cka", "--images", "photos", "--out", "cka.jpg"]):
        with pytest.raises(SystemExit):
            analyze.main(["ViT", *arguments])
