"""Weights are found and loaded without what builds and trains models."""

import subprocess
import sys

SCRIPT = """
import sys
from vitkit.weights import load_weights
assert sys.modules.keys().isdisjoint(["albumentations", "vitkit.models", "vitkit.backbones", "vitkit.data"])
"""


def test_loading_weights_imports_neither_models_nor_data():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
