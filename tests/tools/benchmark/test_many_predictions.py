"""vitkit predict over ten thousand images: killed three times, and in flat memory."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from vitkit.tools.benchmark.predicting import BATCH_SIZE, MODEL, write_photos

pytestmark = [pytest.mark.slow]
NUM_IMAGES = int(os.environ.get("NUM_IMAGES", "10000"))


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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads a process's memory from /proc")
def test_killed_three_times_ten_thousand_images_are_those_of_an_uninterrupted_prediction(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = write_photos(Path("photos"), NUM_IMAGES)
    seconds, memory = predict(Path("whole"))
    for part in (1, 2, 3):
        predict(Path("killed"), kill_at=part * NUM_IMAGES // 4)
    predict(Path("killed"))
    for name in ("predictions.json", "predictions_settings.json", "coco/instances.json", "coco/review_order.txt"):
        assert Path("killed", name).read_bytes() == Path("whole", name).read_bytes(), name
    result = json.loads(Path("whole/predictions.json").read_text())
    assert [entry["image"] for entry in result["images"]] == [str(path) for path in paths]
    tenth = max(len(memory) // 10, 1)
    early, late = np.median(memory[tenth : 2 * tenth]), np.median(memory[-tenth:])
    print(f"{seconds:.0f} s; memory {early:.0f} MiB in the second tenth, {late:.0f} in the last, {max(memory)} at most")
    assert late < early + 64
