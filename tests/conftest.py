import gc
import logging
import os
import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import unsynced  # noqa: F401

# Small tensors gain nothing from threads, and threads that share cores with other processes wait for each other.
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[1]
LONGEST = (
    "tools/test_killed_runs",
    "models/test_compiling",
    "engine/test_number_of_processes",
    "data/test_loader_failures",
    "apps/export_writing/test_prompted_export",
    "apps/inference/test_gpu",
    "models/test_fuse",
    "apps/starter/test_start",
    "fuzz/test_broken_input",
    "apps/export_writing/test_exported_files",
    "apps/export_writing/test_generated_program",
    "backbones/test_timesformer_golden",
    "tools/test_killed_recipe",
    "tools/test_train_and_test",
    "backbones/test_mvit",
    "tools/test_cli",
    "tools/test_analyze",
    "models/test_dino_golden",
    "models/test_ecpose",
    "models/test_rf_detr_keypoints",
)
"""Files that take fifteen seconds or more, the longest first."""


def pytest_configure(config):
    if config.pluginmanager.hasplugin("xdist"):  # whose order is by numbers of tests
        config.option.loadscopereorder = False
    if "VITKIT_TEST_DEVICE" in os.environ:  # before the tests import what it replaces
        from helpers import on_device

        device = torch.device(os.environ["VITKIT_TEST_DEVICE"])
        on_device.install(device, os.environ.get("VITKIT_TEST_PRECISION", "fp32"))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    # What is imported and collected lives until the end; Python would look through it for garbage again and again.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        # Building models makes many objects and hardly any garbage, for which 6 to 8 % of the time was spent.
        gc.set_threshold(10_000, 10, 10)


def pytest_collection_modifyitems(items):
    # If a process began a long file last, the others would wait for it.
    ranks = {ROOT / "tests" / f"{name}.py": rank for rank, name in enumerate(LONGEST)}
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: (ranks.get(item.path, len(ranks)), -sizes[item.path]))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available() and "VITKIT_GPU_TESTS" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    # What a test draws, and a fixture of its module, must not depend on which tests its process happened to run before.
    seed = 1  # not 0, with which tests draw their models: inputs would be like the weights
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


@pytest.fixture
def gpu() -> torch.device:
    """Return the GPU; with VITKIT_GPU_TESTS=cpu the CPU, so that the tests themselves can be tested without a GPU."""
    return torch.device(os.environ.get("VITKIT_GPU_TESTS", "cuda"))


@pytest.fixture(autouse=True)
def fresh_logging():
    """Undo the effects of a tool's `setup_logging`, so that each test's log reaches pytest."""
    yield
    logger = logging.getLogger("vitkit")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def own_settings(request, tmp_path_factory, monkeypatch):
    """Keep the files that tests trust out of the user's list."""
    folder = tmp_path_factory.getbasetemp() / "settings" / str(id(request.node))  # made only if something is trusted
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))


@pytest.fixture(autouse=True)
def curves_drawn_once(monkeypatch):
    """Draw the curves of a tiny run only if no earlier run had the same losses and metrics."""
    if api := sys.modules.get("vitkit.apps.training.api"):
        from helpers.drawn_curves import plot_once

        monkeypatch.setitem(api.FIGURES, "plot_training", plot_once)


@pytest.fixture
def fused_attention():
    """Use fused attention, as the plain definition would store all matrices."""
    from vitkit.kernels import use_kernels

    with use_kernels("fast"):
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder with the small real datasets; tests that need it are skipped if it is absent."""
    folder = Path(os.environ.get("VITKIT_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no datasets at {folder}")
    return folder
