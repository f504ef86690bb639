"""vitkit browse: figures and a report of what the model will see."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import cv2
import numpy as np
import pytest

from vitkit.tools import browse

CONFIG = """
def config():
    return dict(data=dict(
        train=dict(
            type="ShapesDetection", num_images=12, image_size=64, masks={masks},
            transforms=dict(type="ComposedTransforms", transforms=[dict(type="D4")]),
        ),
        val=dict(type={val!r}, num_images=4, image_size=64),
    ))
"""
MIXED = """
def config():
    transforms = dict(type="ClassificationTrainTransforms", size=32, mixup=0.8)
    return dict(data=dict(train=dict(type="ShapesClassification", num_images=6, transforms=transforms)))
"""


class Report(HTMLParser):
    """The content of a report: the sources of its images, the classes of its figures, and whether its tags close."""

    def __init__(self, path):
        super().__init__()
        self.sources, self.classes, self.links, self.open = [], [], [], []
        self.feed(Path(path).read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "img":
            self.sources.append(attrs["src"])
        if tag == "figure":
            self.classes.append(json.loads(attrs["data-classes"]))
        self.links += [attrs[key] for key in ("href", "src") if key in attrs and tag != "img"]
        if tag not in ("img", "meta", "!doctype"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def images(self):
        for source in self.sources:
            encoded = re.fullmatch(r"data:image/jpeg;base64,(.*)", source)[1]
            yield cv2.imdecode(np.frombuffer(base64.b64decode(encoded), np.uint8), cv2.IMREAD_COLOR)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.py").write_text(CONFIG.format(masks=False, val="ShapesClassification"))
    return "config.py"


def test_a_file_as_out_is_refused(config, capsys):
    with pytest.raises(SystemExit):
        browse.main([config, "--out", "look.html"])
    assert "--out look.html: expected a folder, in which the page is index.html" in capsys.readouterr().err
    assert not Path("look.html").exists()


def test_report_and_figures_contain_every_image(config, capsys):
    browse.main([config, "--max-images", "5", "--views", "2", "--original", "--out", "look"])
    report = Report("look/index.html")
    images = list(report.images())
    assert len(images) == 15 and all(image.std() > 5 for image in images)
    assert not report.open and not report.links
    assert report.classes[0] == [] and set(report.classes[1]) <= {
        "circle",
        "square",
        "triangle",
        "star",
        "ring",
        "cross",
    }
    assert cv2.imread("look/figure_1.png").std() > 10
    assert "15 images" in capsys.readouterr().out


def test_earlier_pages_are_replaced_only_if_asked(config):
    for out in ("runs/browse", "runs/browse-2"):
        browse.main([config, "--max-images", "1"])
        assert Path(out, "index.html").is_file()
    with pytest.raises(SystemExit, match="'runs/browse/[a-z0-9_.]+' exists already. Choose .* add --overwrite"):
        browse.main([config, "--max-images", "1", "--out", "runs/browse"])
    browse.main([config, "--max-images", "1", "--out", "runs/browse", "--overwrite"])
    with pytest.raises(SystemExit, match="config.py: is a file; expected a folder"):
        browse.main([config, "--out", config, "--overwrite"])


def test_views_differ_and_are_reproducible_by_the_seed(config):
    for out, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        browse.main([config, "--ids", "3", "--views", "3", "--seed", seed, "--out", out])
    a, b, c = (Report(f"{name}/index.html").sources for name in "abc")
    assert a == b != c and len(set(a)) > 1


def test_augmentation_is_that_of_the_epoch_and_of_a_batch(config):
    Path("config.py").write_text(
        CONFIG.format(masks=False, val="ShapesDetection").replace(
            'transforms=dict(type="ComposedTransforms", transforms=[dict(type="D4")]),',
            'transforms=dict(type="TransformsByEpoch", until_epochs=[2], transforms=[FLIP, CROP]),',
        )
        + """
FLIP = dict(type="ComposedTransforms", transforms=[dict(type="HorizontalFlip")])
CROP = dict(type="ComposedTransforms", transforms=[dict(type="RandomCrop", height=48, width=40)])
"""
    )
    sizes = {}
    for epoch in ("0", "2"):
        browse.main([config, "--ids", "3", "--epoch", epoch, "--out", f"epoch{epoch}"])
        sizes[epoch] = Path(f"epoch{epoch}/index.html").read_text(encoding="utf-8")
    assert "64x64" in sizes["0"] and "40x48" in sizes["2"]
    squares = ["data.squares={'sizes': [80]}", "data.mixup={'probability': 1.0}"]
    browse.main([config, *squares, "--ids", "3", "--out", "mixed"])
    assert "80x80" in Path("mixed/index.html").read_text(encoding="utf-8")
    (plain,), (mixed,) = (Report(f"{name}/index.html").classes for name in ("epoch0", "mixed"))
    assert set(plain) <= set(mixed)


def test_masks_and_classified_images_are_drawn(config):
    Path("config.py").write_text(CONFIG.format(masks=True, val="ShapesClassification"))
    browse.main([config, "--ids", "1", "--out", "masks"])
    (masks,) = Report("masks/index.html").images()
    assert masks.shape[0] > masks.shape[1] == 320  # the legend is below
    browse.main([config, "--split", "val", "--out", "val"])
    assert all(len(names) == 1 for names in Report("val/index.html").classes)


def test_mixed_images_show_the_shares_of_their_classes(config):
    Path("mixed.py").write_text(MIXED)
    browse.main(["mixed.py", "--max-images", "4", "--out", "look"])
    text = Path("look/index.html").read_text()
    assert re.search(r"[a-z]+ \d+ %", text)


def test_only_images_of_one_class_are_shown(config):
    browse.main([config, "--class", "star", "--max-images", "2", "--out", "look"])
    assert all("star" in names for names in Report("look/index.html").classes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ids", "99"], "--ids 99: no such image in data.train"),
        (["--class", "stat"], "--class stat: the data has no such class. Did you mean 'star'"),
        (["--max-images", "0"], "expected an integer of at least 1"),
        (["data.train=none"], "data.train not set"),
        (["data.train=ParallelText"], "ParallelText"),
        (["data.train.image_size=no"], "data.train.image_size"),
    ],
)
def test_wrong_arguments_are_helpful_errors(config, capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        browse.main([config, *arguments])
    assert message in f"{error.value.code}\n{capsys.readouterr().err}"


def test_names_are_escaped_in_the_report(tmp_path):
    from vitkit.apps.starter.gallery import Card, write_gallery

    card = Card('<b>"a"</b>', np.zeros((4, 4, 3), np.uint8), "x & y", ['<i>"q"', "it's"])
    write_gallery([card], tmp_path / "report.html", title="<title>")
    report = Report(tmp_path / "report.html")
    assert report.classes == [['<i>"q"', "it's"]] and not report.open
    with pytest.raises(ValueError, match="cards: got none"):
        write_gallery([], tmp_path / "report.html", title="none")
