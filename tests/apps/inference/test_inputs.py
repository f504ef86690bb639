"""Images from any source, given to a predictor."""

import io
import os

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from vitkit.apps.inference import Prediction, Predictor, find_images, inputs
from vitkit.apps.inference.inputs import find_files, to_array
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.io.image_files import read_image
from vitkit.io.video_files import open_video
from vitkit.protocols.model import Model


class Brightness(Model):
    """Detects one object, whose score is the mean of the image."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, images, padding_mask):
        return {"mean": images.float().mean(dim=(1, 2, 3)) / 255}

    def postprocess(self, outputs, image_sizes):
        box = torch.tensor([[0.0, 0.0, 2.0, 2.0]])
        return [dict(scores=m[None], labels=torch.tensor([0]), boxes_xyxy=box) for m in outputs["mean"]]


@pytest.fixture
def model():
    return Predictor(Brightness(), ["light"])


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("photos/a.png", "photos/deep/b.png", "street.png")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw_image(50 * (number + 1))).save(tmp_path / name)
    return tmp_path


def draw_image(value, height=6, width=8):
    return np.full((height, width, 3), value, np.uint8)


def scores(predictions):
    return [round(float(p.fields["scores"][0]) * 255) for p in predictions]


def test_every_form_of_one_image_gives_one_prediction(model, files):
    array = draw_image(150)
    planes = torch.from_numpy(array).permute(2, 0, 1)
    kinds = ["street.png", files / "street.png", (files / "street.png").read_bytes(), array, Image.fromarray(array)]
    kinds += [io.BytesIO(kinds[2]), (files / "street.png").open("rb")]
    for one in (*kinds, planes, planes / 255):
        prediction = model(one)
        assert isinstance(prediction, Prediction) and scores([prediction]) == [150], type(one)
        assert (prediction.image == array).all()


@pytest.mark.parametrize("kind", ["turned", "16 bits"])
def test_an_opened_image_is_read_like_its_file(kind, tmp_path):
    path, exif = tmp_path / "a.png", Image.Exif()
    exif[0x0112] = 6 if kind == "turned" else 1  # to be displayed rotated by 90 degrees
    values = np.arange(0, 60000, 1000).reshape(6, 10).astype(np.uint16)
    image = Image.fromarray(values if kind == "16 bits" else (values >> 8).astype(np.uint8))
    image.save(path, exif=exif)
    expected = inputs.to_array(path)
    assert expected.shape == ((10, 6, 3) if kind == "turned" else (6, 10, 3)) and expected.max() == 59000 >> 8
    np.testing.assert_array_equal(inputs.to_array(Image.open(path)), expected)
    channels = inputs.to_array(path, channels=1)
    np.testing.assert_array_equal(inputs.to_array(Image.open(path), channels=1), channels)


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_images_of_32_bits_are_an_error(dtype, tmp_path):
    image = Image.fromarray(np.arange(0, 240, 4).reshape(6, 10).astype(dtype))
    image.save(tmp_path / "a.tif")
    for source in (image, tmp_path / "a.tif", Image.open(tmp_path / "a.tif")):
        with pytest.raises(DataError, match="values have a sign, 32 bits or a fraction; expected unsigned"):
            inputs.to_array(source)


def test_several_images_give_a_list(model, files):
    assert [p.name for p in model("photos")] == ["photos/a.png", "photos/deep/b.png"]
    assert scores(model("*.png")) == [150] and isinstance(model("*.png"), list)
    assert scores(model(["street.png", draw_image(7)], batch_size=2)) == [150, 7]
    batch = np.stack([draw_image(1), draw_image(2)])
    assert scores(model(batch)) == [1, 2] == scores(model(torch.from_numpy(batch).permute(0, 3, 1, 2)))
    assert model([]) == [] and len(model.predict("street.png")) == 1


def test_generator_is_read_only_as_far_as_predictions_are_used(model):
    taken = []

    def draw_images():
        for k in range(4):
            taken.append(k)
            yield draw_image(k)

    stream = model(draw_images())
    assert taken == [] and scores([next(stream)]) == [0] and taken == [0]
    assert scores(stream) == [1, 2, 3]


def test_a_video_is_predicted_frame_by_frame(model, files):
    video = cv2.VideoWriter("drive.avi", cv2.VideoWriter_fourcc(*"MJPG"), 10.0, (64, 48))
    for value in (0, 100, 200):
        video.write(draw_image(value, 48, 64))
    video.release()
    stream = model("drive.avi")
    assert not isinstance(stream, list)
    assert scores(stream) == pytest.approx([0, 100, 200], abs=3)


def test_each_url_is_downloaded_once(model, files, monkeypatch):
    fetched = []

    def fetch_file(url, *, folder):
        fetched.append(folder)
        return files / "street.png"

    monkeypatch.setattr(inputs, "fetch_file", fetch_file)
    assert scores([model("https://a.example/image.png")]) == [150]
    model("https://b.example/image.png")
    assert len(set(fetched)) == 2  # two of one name do not share a file

    def offline(url, *, folder):
        raise CheckpointError(f"cannot download {url}")

    monkeypatch.setattr(inputs, "fetch_file", offline)
    with pytest.raises(CheckpointError, match="cannot download https://a.example/image.png"):
        model("https://a.example/image.png")


def test_broken_files_of_a_folder_are_named_and_the_others_predicted(model, files, caplog):
    (files / "photos/0.png").write_bytes(b"")
    (files / "photos/c.png").write_text("no image")
    assert scores(model("photos")) == [50, 100]
    assert [record.getMessage().split("'")[1] for record in caplog.records] == ["photos/0.png", "photos/c.png"]
    (files / "only").mkdir()
    (files / "only/x.png").write_bytes(b"")
    with pytest.raises(DataError, match="only/x.png"):
        model("only")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none.jpg", "cannot read 'none.jpg'"),
        ("a" * 300, "cannot read 'a{300}' .File name too long"),
        ("none*.jpg", "'none\\*.jpg': no such file or folder, and no file matches it as a pattern"),
        ("empty", "folder 'empty' has no image"),
        (None, "got None; expected a file, its URL, a folder"),
        (1.5, "got float; expected a file"),
        (True, "got True; expected"),
        ([1], "image_0: got int; expected a file"),
    ],
)
def test_input_without_images_is_an_error_that_names_valid_inputs(model, files, source, message):
    (files / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        model(source)


def test_missing_camera_is_an_error(monkeypatch):
    class Missing:
        def __init__(self, source):
            assert source == 7

        def grab(self):
            return False

        def get(self, key):
            return 0.0

        def release(self):
            pass

    monkeypatch.setattr(inputs.cv2, "VideoCapture", Missing)
    with pytest.raises(DataError, match="input: no frame of camera 7 can be read. Is it connected"):
        list(find_images(7).named)


def test_invalid_scores_counts_and_images_are_refused(model, files):
    for options, message in (
        (dict(threshold=2), "threshold 2: expected a score, 0 to 1"),
        (dict(batch_size=0), "batch_size=0: expected at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            model(["street.png"], **options)
    with pytest.raises(ConfigError, match="workers=-1: expected at least 0"):
        next(model.stream(["street.png"], workers=-1))
    with pytest.raises(DataError, match="got dict; expected a file"):
        model({"image": "street.png"})
    with pytest.raises(DataError, match="image_0: got tuple; expected a file"):  # a pair is a name and an image
        model([("street.png", "a street", 3)])
    prediction = model("street.png")
    for name in ("drawn", "drawn.xyz"):
        with pytest.raises(ConfigError, match=f"save: '{name}' does not have the extension of an image format"):
            prediction.save(name)


def test_videos_in_memory_are_distinguished_from_single_frames():
    small, large = np.zeros((4, 6, 3), np.uint8), np.zeros((5, 6, 3), np.uint8)
    assert inputs.find_videos([small, small]).kind == "one"
    several = inputs.find_videos([("named", [small, small]), [large], "clip.mp4"])
    assert several.kind == "many" and [name for name, _ in several.named] == ["named", "video_1", "clip.mp4"]
    # Frames of several sizes are a separate error when the video is opened.
    assert len(list(inputs.find_videos([[small, large]]).named)) == 1


@pytest.mark.parametrize("name", ["x.mp4", "x.png"])
def test_a_pipe_is_named_and_not_opened(tmp_path, name):
    os.mkfifo(tmp_path / name)
    images, videos = find_files([str(tmp_path / name)])
    (path, _), *others = images + videos
    assert not others
    with pytest.raises(DataError, match="it is a device or a pipe"):
        open_video(path) if videos else read_image(path)
    with pytest.raises(DataError, match="it is a device or a pipe"):
        [to_array(image, label) for label, image in find_images(str(tmp_path / name)).named]
