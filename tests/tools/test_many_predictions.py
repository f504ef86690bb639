"""vitkit predict over ten thousand images: killed three times, beside a bare PyTorch loop, and in flat memory."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from vitkit import load
from vitkit.data.synthetic.shapes import ShapesDetection
from vitkit.io.image_files import read_image, to_tensor
from vitkit.structures import Batch

pytestmark = [pytest.mark.slow]
NUM_IMAGES = int(os.environ.get("NUM_IMAGES", "10000"))
BATCH_SIZE = 16
MODEL = "shapes_dino"


class Photos(Dataset):
    """The bare loop's data."""

    def __init__(self, predictor, paths):
        self.predictor, self.paths = predictor, paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index):
        image = read_image(self.paths[index])
        return {"image": to_tensor(self.predictor.as_evaluated(image)), "target": {"size": image.shape[:2]}}


def predict(out: Path, kill_at: int | None = None) -> tuple[float, list[int]]:
    """Run the command, killed at a number of lines; return the seconds of its loop and its memory, MiB, every 0.5 s."""
    command = [sys.executable, "-m", "vitkit.tools.predict", MODEL, "--input", "photos", "--device", "cpu", "--no-draw"]
    command += ["--resume", str(out), "--batch-size", str(BATCH_SIZE), "--format", "coco"]
    lines, memory, first = out / "predictions.jsonl", [], None
    with open(f"{out}.txt", "a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None:
            size = lines.stat().st_size if lines.exists() else 0
            if size and first is None:
                first = time.monotonic()
            if first is not None:
                status = Path(f"/proc/{process.pid}/status")
                values = [line for line in status.read_text().splitlines() if line.startswith("VmRSS")]
                memory += [int(value.split()[1]) // 1024 for value in values]
            if kill_at is not None and size and lines.read_bytes().count(b"\n") >= kill_at:
                process.send_signal(signal.SIGKILL)
            time.sleep(0.05 if kill_at is not None else 0.5)
    assert process.returncode == (0 if kill_at is None else -signal.SIGKILL), Path(f"{out}.txt").read_text()
    return time.monotonic() - first, memory


def bare_loop(paths: list[Path]) -> float:
    """Return images per second of a loop that predicts what vitkit predict does, and writes nothing."""
    predictor = load(MODEL)
    data = DataLoader(Photos(predictor, paths), BATCH_SIZE, num_workers=2, collate_fn=Batch.collate)
    started = None
    with torch.inference_mode():
        for number, batch in enumerate(data):
            outputs = predictor.model(**batch.inputs)
            predictor.model.postprocess(outputs, [target["size"] for target in batch.targets])
            if number == 0:
                started = time.monotonic()
    return (len(paths) - BATCH_SIZE) / (time.monotonic() - started)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads a process's memory from /proc")
def test_killed_three_times_ten_thousand_images_are_those_of_an_uninterrupted_prediction(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    shapes = ShapesDetection(num_images=NUM_IMAGES, image_size=48)
    for number in range(NUM_IMAGES):
        cv2.imwrite(f"photos/{number:06}.jpg", cv2.cvtColor(shapes.load_image(number), cv2.COLOR_RGB2BGR))
    paths = sorted(Path("photos").iterdir())
    before = bare_loop(paths[: NUM_IMAGES // 5])
    seconds, memory = predict(Path("whole"))
    after = bare_loop(paths[: NUM_IMAGES // 5])
    for part in (1, 2, 3):
        predict(Path("killed"), kill_at=part * NUM_IMAGES // 4)
    predict(Path("killed"))
    for name in ("predictions.json", "predictions_settings.json", "coco/instances.json", "coco/review_order.txt"):
        assert Path("killed", name).read_bytes() == Path("whole", name).read_bytes(), name
    result = json.loads(Path("whole/predictions.json").read_text())
    assert [entry["image"] for entry in result["images"]] == [str(path) for path in paths]
    line = next(line for line in Path("whole.txt").read_text().splitlines() if f"{NUM_IMAGES} images, " in line)
    rate = float(line.split(", ")[1].split()[0])
    tenth = max(len(memory) // 10, 1)
    early, late = np.median(memory[tenth : 2 * tenth]), np.median(memory[-tenth:])
    print(f"predict {rate:.1f} images/s; bare loop {before:.1f} before, {after:.1f} after; {seconds:.0f} s in all")
    print(f"memory {early:.0f} MiB in the second tenth, {late:.0f} MiB in the last, {max(memory)} MiB at most")
    assert late < early + 64
