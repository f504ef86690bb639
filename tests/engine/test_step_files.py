"""How many files a reader has to open to follow one training step of a DETR on COCO's images."""

import json
import re
import sys
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

import vitkit
from vitkit.data.synthetic.shapes import ShapesDetection
from vitkit.engine.hooks import Hook

PACKAGE = Path(vitkit.__file__).parent


class PassedFiles(Hook):
    """Collects the files of the package whose functions run from the end of the second step to the end of the third."""

    @contextmanager
    def during_training(self, run):
        self.step, self.forward, self.in_forward = set(), set(), False
        begin = run.model.register_forward_pre_hook(lambda *_: setattr(self, "in_forward", True))
        end = run.model.register_forward_hook(lambda *_: setattr(self, "in_forward", False))
        try:
            yield
        finally:
            sys.setprofile(None)
            begin.remove()
            end.remove()

    def after_step(self, run, step):
        sys.setprofile(self.note if run.progress.step == 2 else None)

    def note(self, frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            self.step.add(str(path.relative_to(PACKAGE)))
            if self.in_forward:
                self.forward.add(str(path.relative_to(PACKAGE)))


def write_coco(root: Path, split: str, num_images: int) -> None:
    """Write drawn scenes as JPEG photos and an annotation file, in the folders that configs/detr_r50.py expects."""
    scenes = ShapesDetection(num_images, split=split)
    truth = scenes.ground_truth()
    images = root / f"{split}2017"
    images.mkdir(parents=True)
    (root / "annotations").mkdir(exist_ok=True)
    for index, image in enumerate(truth["images"]):
        image["file_name"] = f"{image['id']:012d}.jpg"
        Image.fromarray(scenes.load_image(index)).save(images / image["file_name"])
    (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(truth))


def listed_files() -> set[str]:
    """Return the files that the guide lists before those of the validation."""
    table = (PACKAGE / "README.md").read_text(encoding="utf-8").partition("| file | what happens |")[2]
    files = set()
    for row in table.partition("`vitkit/engine/evaluate.py`")[0].splitlines():
        folder = ""
        for path in map(Path, re.findall(r"`([\w/]+\.py)`", row.partition("| ")[2].partition(" |")[0])):
            folder = path.parent.relative_to("vitkit") if path.is_relative_to("vitkit") else folder
            files.add(str(folder / path.name))
    return files


def test_step_of_detr_passes_few_files(tmp_path):
    write_coco(tmp_path / "coco", "train", 8)
    write_coco(tmp_path / "coco", "val", 1)
    passed = PassedFiles()
    vitkit.train(
        "detr_r50",
        run_dir=tmp_path / "run",
        device="cpu",
        hooks=[passed],
        # The published data, losses and optimizer; a small model, whose files are those of the published one.
        model=dict(
            backbone=dict(depth=18, base_channels=32, pretrained=False),
            neck=dict(out_channels=16),
            head=dict(d_model=16, num_heads=2, d_ffn=16, num_encoder_layers=1, num_decoder_layers=2),
        ),
        data=dict(root=str(tmp_path / "coco"), num_workers=0),
        schedule=dict(drop_at_epochs=[]),
        train=dict(epochs=1),
    )
    data = {name for name in passed.step if name.startswith(("data/", "io/"))}
    # vitkit/README.md lists them: whoever adds one asks whether a reader of DETR needs it.
    assert passed.step == listed_files(), sorted(passed.step ^ listed_files())
    assert len(passed.forward) <= 13, sorted(passed.forward)
    assert len(passed.step - data) <= 23, sorted(passed.step - data)
    assert len(data) <= 8, sorted(data)
