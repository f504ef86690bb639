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
NIGHTLY = (
    "apps/export_writing/test_exported_files.py::test_file_of_a_model_without_pixel_statistics_and_with_one_size",
    *(
        f"apps/export_writing/test_prompted_export.py::{name}"
        for name in ("test_file", "test_texts", "test_the_", "test_wrong", "test_a_missing")
    ),  # those that need the two files, whose graphs are run without ONNX by the others
    "apps/export_writing/test_generated_program.py::test_file_and_generated_program_return_the_keypoints_of_the_model",
    "backbones/test_mvit.py::test_compiles_without_graph_breaks[{'window_size': 8}]",
    "configs/test_rtdetr.py::test_a_few_images_are_learned_with_denoising",
    "configs/test_rtdetr.py::test_a_run_trains_evaluates_and_loads[rtdetrv2_r50]",
    "data/test_loader_failures.py::test_a_script_without_a_main_guard_gives_one_error",
    "data/test_loader_failures.py::test_workers_end_with_a_killed_trainer[forkserver-1]",
    "engine/test_channels.py::test_an_exported_file_takes_its_channels[onnx]",
    "engine/test_number_of_processes.py::test_a_run_without_images_per_step_advances_its_schedule",
    "engine/test_number_of_processes.py::test_shards_and_their_average_are_those_of_full_weights",
    "heads/test_dfine_training.py::test_overfits_two_images_with_denoising",
    "kernels/test_deformable_triton.py::test_interpreted_kernels_process_queries_in_blocks",
    "model_zoo/test_packaged.py::test_packaged_models_are_exported_explained_and_reported",
    "models/test_compiling.py::test_a_real_time_detector_is_one_graph_for_free_sizes",
    "models/test_compiling.py::test_other_numbers_of_targets_cause_no_recompilation",
    "models/test_detr.py::test_forward_compiles_without_graph_breaks[True]",
    "models/test_dfine_sem.py::test_overfits_a_simple_image",
    "models/test_ecpose.py::test_a_run_on_drawn_shapes_learns",
    "models/test_per_pixel.py::test_overfits_a_simple_image",
    "models/test_rf_detr_keypoints.py::test_a_run_on_drawn_shapes_learns",
    "tools/benchmark/test_benchmark.py::test_each_part_is_measured_in_a_separate_process",
    "tools/benchmark/test_crowds.py::test_steps_of_all_counts_are_measured[DETR-R50]",
    "tools/test_analyze.py::test_joint_attention_costs_more_than_divided",
    "tools/test_cli.py::test_closed_pipe_ends_the_printed_config_without_an_error[train]",
    "tools/test_killed_runs.py::test_a_rank_that_fails_ends_the_other_and_its_error_is_shown[new]",
    "tools/test_killed_runs.py::test_run_killed_while_saving_shards_equals_an_uninterrupted_one",
    "tools/test_killed_runs.py::test_run_on_two_machines_resumes_automatically[False]",
)
"""How the names of tests begin that take five seconds or more, and whose parts shorter ones hold: for every night."""


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


@pytest.hookimpl(tryfirst=True)  # before those of -m are chosen
def pytest_collection_modifyitems(items):
    # If a process began a long file last, the others would wait for it.
    ranks = {ROOT / "tests" / f"{name}.py": rank for rank, name in enumerate(LONGEST)}
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: (ranks.get(item.path, len(ranks)), -sizes[item.path]))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available() and "VITKIT_GPU_TESTS" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if f"{item.path.relative_to(ROOT / 'tests').as_posix()}::{item.name}".startswith(NIGHTLY):
            item.add_marker("nightly")


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
