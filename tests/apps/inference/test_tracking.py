"""The guide's lines for tracking run, with the libraries that they name or with stand-ins for what they use."""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from vitkit.apps.inference import Prediction

README = Path(__file__).parents[3] / "vitkit" / "apps" / "inference" / "README.md"
SPEEDS = {"left": 5.0, "right": -4.0}  # pixels per frame


@dataclass
class Detections:
    """supervision's class, as far as a tracker of boxes needs it."""

    xyxy: np.ndarray
    mask: np.ndarray | None = None
    confidence: np.ndarray | None = None
    class_id: np.ndarray | None = None
    tracker_id: np.ndarray | None = None
    data: dict = field(default_factory=dict)

    def __len__(self):
        return len(self.xyxy)


class NearestBoxTracker:
    """Gives each box the number of the nearest one of the previous frame."""

    def __init__(self, frame_rate: float):
        self.previous = np.zeros((0, 4))

    def update(self, detections):
        distances = np.abs(detections.xyxy[:, None] - self.previous).sum(axis=2)
        numbers = distances.argmin(axis=1) if len(self.previous) else np.arange(len(detections))
        self.previous = np.array([box for _, box in sorted(zip(numbers.tolist(), detections.xyxy.tolist()))])
        detections.tracker_id = numbers
        return detections


@pytest.fixture(params=["libraries", "stand-ins"])
def libraries(request, monkeypatch):
    if request.param == "libraries":
        pytest.importorskip("supervision")
        pytest.importorskip("trackers")
        return
    for name, part in (("supervision", Detections), ("trackers", NearestBoxTracker)):
        module = ModuleType(name)
        setattr(module, "ByteTrackTracker" if name == "trackers" else "Detections", part)
        monkeypatch.setitem(sys.modules, name, module)


def test_an_object_keeps_its_number_through_a_video(libraries, capsys):
    tracking = README.read_text(encoding="utf-8").partition("## Track objects in a video")[2]
    code = re.search(r"```python\n(.*?)```", tracking, re.S)[1]
    assert len([line for line in code.splitlines() if line]) == 5
    tracked = []

    def model(source, *, threshold):
        assert source == "drive.mp4" and threshold < 0.5
        random = np.random.default_rng(0)
        for number in range(12):
            boxes = [[20 + SPEEDS["left"] * number, 20, 60 + SPEEDS["left"] * number, 50]]
            boxes += [[200 + SPEEDS["right"] * number, 100, 250 + SPEEDS["right"] * number, 140]]
            scores = torch.tensor(random.uniform(0.8, 0.95, 2), dtype=torch.float32)  # either may come first
            fields = dict(scores=scores, labels=torch.tensor([0, 1]), boxes_xyxy=torch.tensor(boxes))
            yield Prediction(str(number), np.zeros((160, 320, 3), np.uint8), fields, ["left", "right"])
            tracked.append((variables["tracked"].tracker_id, variables["tracked"].data["class_name"]))

    variables = {"model": model}
    exec(code, variables)
    assert len(tracked) == 12 and capsys.readouterr().out.startswith("0 ")
    numbers = {name: set() for name in SPEEDS}
    for ids, names in tracked[3:]:
        for number, name in zip(ids.tolist(), names):
            numbers[name].add(number)
    assert all(len(found) == 1 and min(found) >= 0 for found in numbers.values()), numbers
    assert numbers["left"] != numbers["right"]
