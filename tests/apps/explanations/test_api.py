"""vitkit.explain from its arguments to its files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import vitkit
from vitkit.apps.explanations import api
from vitkit.apps.explanations.attention_locations import LocatedAttention
from vitkit.apps.explanations.backbones import draw_class_token_masks, mask_mass
from vitkit.apps.explanations.dense import explain_slots
from vitkit.apps.explanations.explain_options import ExplainRequest, Explanation, prepare_image_to_draw
from vitkit.apps.inference import Predictor
from vitkit.data.synthetic.world import World
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.registry import BACKBONES
from vitkit.structures import Batch
from vitkit.weights import load_pretrained

SMALL = ["d_model=32", "depth=2", "num_heads=2"]


@pytest.fixture
def image(tmp_path, monkeypatch) -> str:
    """An image file; the current folder is a fresh one."""
    monkeypatch.chdir(tmp_path)
    Image.fromarray(World(image_size=64).scene(0).image).save("scene.png")
    return "scene.png"


@pytest.fixture
def unsaved(monkeypatch):
    """Skip the rendering of figures, which takes most of the time."""
    from pathlib import Path

    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: Path(path).touch())


def test_backbone_by_name_with_a_file_without_a_head(image, unsaved):
    torch.manual_seed(0)
    trained = BACKBONES.build(dict(type="ViT", d_model=32, depth=2, num_heads=2))
    torch.save({name: value for name, value in trained.state_dict().items() if "head" not in name}, "dino.pth")
    result = vitkit.explain("ViT", "dino.pth", image=image, overrides=SMALL, size=(64, 96), out="out")
    names = ["points", "class_token", "class_token_masks", "rollout"]
    assert [path.name for path in result.files] == [f"scene_{name}.png" for name in names]
    assert all(path.is_file() for path in result.files)
    shares = [value for name, value in result.numbers.items() if "head" in name]
    assert len(shares) == 2 and all(0 < share < 0.7 for share in shares)
    assert result.notes == ["loaded dino.pth"]
    other = dict(overrides=[*SMALL[:2], "num_heads=4", "mlp_ratio=2"], image=image)
    with pytest.raises(CheckpointError, match="fc1"):
        vitkit.explain("ViT", "dino.pth", **other)


def test_backbone_without_published_weights_says_how_to_give_some(image):
    with pytest.raises(ConfigError, match="ViT: has no published weights. Give a file of weights after the name"):
        vitkit.explain("ViT", image=image, overrides=SMALL)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("vit_small_patch8_dino", "dino_deitsmall8_pretrain"),
        ("vit_small_patch16_dino", "dino_deitsmall16_pretrain"),
        ("vit_base_patch8_dino", "dino_vitbase8_pretrain"),
        ("vit_base_patch16_dino", "dino_vitbase16_pretrain"),
    ],
)
def test_names_of_dino_stand_for_its_weights(name, file, monkeypatch):
    sources = []
    monkeypatch.setattr("vitkit.weights.locate.fetch_file", lambda url, **_: sources.append(url) or Path("missing.pth"))
    with torch.device("meta"), pytest.raises(CheckpointError, match="missing.pth"):
        load_pretrained(BACKBONES.build(dict(type=name, pretrained=True)))
    assert sources == [f"https://dl.fbaipublicfiles.com/dino/{file}/{file}.pth"]


def test_loaded_model_is_explained_in_an_array(image, unsaved):
    torch.manual_seed(0)
    model = vitkit.build_model(dict(type="Classifier", backbone="timm/test_vit"), classes=["a", "b"])
    predictor = Predictor(model, ["a", "b"])
    result = vitkit.explain(predictor, image=np.zeros((160, 160, 3), np.uint8), out="out", points=[(3, 5)])
    assert {path.name for path in result.files} >= {"image_points.png", "image_rollout.png", "image_class_token.png"}
    with pytest.raises(ConfigError, match="dataset: a loaded model has no config"):
        vitkit.explain(predictor, dataset=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to explain: give an image, a text, a video, a folder of images, or dataset"),
        ({"weights": "photo.png"}, "nothing to explain: 'photo.png', the second argument, is the model's weights"),
        ({"text": "a", "video": "b"}, "text, video: a text or a video is explained by itself"),
        ({"image": "b", "frame": 0}, "frame: applies only to video"),
        ({"dataset": True, "html": True}, "html: applies only to image or text or video"),
    ],
)
def test_options_that_apply_to_nothing_are_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        vitkit.explain("detr_r50", **options)


def test_masks_hold_the_largest_weights_with_the_share_of_the_mass():
    maps = torch.tensor([[[0.5, 0.2], [0.2, 0.1]], [[0.25, 0.25], [0.25, 0.25]], [[0.0, 0.0], [0.0, 9.0]]])
    masks = mask_mass(maps)
    # 0.5 by itself is below 0.6; 3 quarters are the minimum that reaches it.
    assert masks.flatten(1).sum(1).tolist() == [2, 3, 1]
    assert masks[0, 0, 0] and not masks[0, 1, 1] and masks[2, 1, 1]
    kept = (maps * masks).sum((1, 2)) / maps.sum((1, 2))
    assert (kept >= 0.6).all()


def test_figure_of_the_masks_keeps_the_image_inside_them(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(
        "vitkit.apps.explanations.backbones.draw_rows", lambda image, rows, path, **_: drawn.append(rows)
    )
    positions = torch.tensor([[[8.0, 8.0], [24.0, 8.0]]])  # two patches of 16 pixels
    weights = torch.zeros(1, 1, 3, 3)
    weights[0, 0, 0] = torch.tensor([0.2, 0.7, 0.1])
    layer = LocatedAttention("blocks.0.attn", weights, positions, positions, 16, (16, 32), num_tokens=1)
    draw_class_token_masks(np.full((16, 32, 3), 100, np.uint8), layer, tmp_path / "a.png")
    (_, maps), (_, inside) = drawn[0]
    assert torch.allclose(maps[1].weights, torch.tensor([[0.7, 0.1]]))
    assert inside[1].title == "50% of the image" and inside[1].image[0, :, 0].tolist() == [100] * 16 + [20] * 16


@pytest.mark.parametrize("channels", [1, 5])
def test_images_of_other_channels_are_explained(channels, image, unsaved):
    torch.manual_seed(0)
    statistics = dict(pixel_mean=[0.5] * channels, pixel_std=[0.5] * channels)
    backbone = dict(type="ViT", d_model=16, depth=1, num_heads=2, image_size=32, in_channels=channels, **statistics)
    model = vitkit.build_model(dict(type="Classifier", backbone=backbone), classes=["a", "b"])
    predictor = Predictor(model, ["a", "b"], channels=channels)
    pixels = np.random.default_rng(0).integers(0, 60_000, (32, 48, channels), dtype=np.uint16)
    np.save("bands.npy", pixels)
    result = vitkit.explain(predictor, image="bands.npy", out="out", points=[(40, 3)], html=True)
    assert "bands_class_token_masks.png" in {path.name for path in result.files}
    assert prepare_image_to_draw(predictor, pixels).shape == (32, 48, 3)
    with pytest.raises(DataError, match=f"has 3 channels .*; expected {channels}, by data.channels"):
        vitkit.explain(predictor, image=image, out="out")


def test_detector_of_other_channels_is_explained(image, unsaved):
    torch.manual_seed(0)
    backbone = dict(type="ResNet", depth=18, pretrained=False, in_channels=4, pixel_mean=[0.5] * 4, pixel_std=[0.5] * 4)
    neck = dict(type="ChannelProjection", out_channels=16)
    layers = dict(d_model=16, num_heads=2, d_ffn=16, num_encoder_layers=1, num_decoder_layers=1)
    spec = dict(type="DETR", backbone=backbone, neck=neck, head=dict(type="DETRHead", **layers), num_queries=3)
    predictor = Predictor(vitkit.build_model(spec, classes=["a"]), ["a"], channels=4)
    pixels = np.random.default_rng(0).integers(0, 60_000, (64, 96, 4), dtype=np.uint16)
    result = vitkit.explain(predictor, image=pixels, out="out")
    assert {path.name for path in result.files} >= {"image_encoder.png", "image_decoder.png"}


def test_file_in_the_place_of_the_folder_is_an_error(image):
    Path("file").write_text("")
    with pytest.raises(ConfigError, match="out: 'file' is a file; expected a folder"):
        vitkit.explain("shapes_vit", image=image, out="file")


def test_attention_distances_bear_the_name_that_was_given(image, monkeypatch):
    drawn = []
    monkeypatch.setattr(api, "plot_distances", lambda models, *_, **__: drawn.extend(models))
    Path("photos").mkdir()
    Path(image).rename("photos/a.png")
    vitkit.explain("shapes_vit", images="photos", out="out")
    assert drawn == ["shapes_vit"]


class TwoBatches:
    """A loader whose second batch must not be read."""

    def __len__(self):
        return 2

    def __iter__(self):
        yield Batch({"images": torch.zeros(1, 3, 8, 8)}, [{"original_size": (8, 8)}])
        raise AssertionError("the second batch was read")


class FiveBoxes(nn.Module):
    """A detector with five queries."""

    def forward(self, images):
        """Return the same boxes for all images."""
        return {"pred_boxes": torch.full((len(images), 5, 4), 0.5)}


def test_queries_that_do_not_exist_are_an_error_before_all_data_are_read(tmp_path):
    with pytest.raises(ConfigError, match="queries: got 9; the model's queries are 0 to 4"):
        explain_slots(FiveBoxes(), TwoBatches(), "cpu", ExplainRequest(queries=[9]), Explanation(tmp_path))
