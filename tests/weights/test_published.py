"""The model zoo answers what `load_weights` asks, though checkpoints do not import it."""

import subprocess
import sys

SCRIPT = """
import sys
from vitkit.weights import load_weights
from vitkit.weights.published import model_zoo
loaded = [name for name in ("vitkit.model_zoo", "albumentations", "vitkit.models") if name in sys.modules]
assert not loaded, loaded
assert "detr_r50" in model_zoo().names()
assert "vitkit.model_zoo" in sys.modules
"""


def test_the_model_zoo_is_imported_when_weights_are_loaded():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
