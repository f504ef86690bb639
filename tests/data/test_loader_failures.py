"""Files that cannot be used are named, and replaced by others if the config says so."""

import os
import signal
import subprocess
import sys
import time
from itertools import chain

import numpy as np
import pytest
import torch
from helpers.forked_python import forked_python
from helpers.processes import is_running

from vitkit.data.loading.loader import lost_worker
from vitkit.data.loading.settings import DataSettings
from vitkit.errors import DataError
from vitkit.protocols.dataset import Dataset


class Numbers(Dataset):
    """A dataset some of whose samples cannot be read."""

    def __init__(self, bad=(), size=12):
        self.bad, self.size = bad, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        index, seed = index
        if index in self.bad:
            raise DataError(f"images: cannot decode '{index}.jpg'")
        return {"image": torch.zeros(3, 4, 4, dtype=torch.uint8), "target": {"image_id": index, "seed": seed}}

    def aspect_ratios(self):
        return np.ones(self.size)


def epoch(loader):
    loader.set_position(0)
    return [[(target["image_id"], target["seed"]) for target in batch.targets] for batch in loader]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_file_is_named_and_replaced_by_the_same_one_each_time(num_workers, caplog):
    def loader(bad):
        return DataSettings(images_per_gpu=3, on_error="skip", num_workers=num_workers).train_loader(
            Numbers(bad), seed=1
        )

    skipping = loader((4, 7))
    found, whole = epoch(skipping), epoch(loader(()))
    assert skipping.num_skipped >= 2
    assert "cannot decode '4.jpg' Another sample takes its place (data.on_error=skip)" in caplog.text
    assert "cannot decode '7.jpg'" in caplog.text
    assert [len(batch) for batch in found] == [len(batch) for batch in whole]
    for ours, theirs in zip(chain(*found), chain(*whole)):
        assert ours == theirs if theirs[0] not in (4, 7) else ours[0] not in (4, 7)
    assert epoch(loader((4, 7))) == found


def test_only_the_first_failures_are_logged(caplog):
    dataset = Numbers(set(range(60)) - {3, 50}, size=60)
    loader = DataSettings(images_per_gpu=1, num_workers=0, on_error="skip").train_loader(dataset, seed=0)
    with pytest.raises(DataError, match=r"10 samples in a row cannot be used\. The last one: images: cannot decode"):
        for position in range(100):
            loader.set_position(position)
            list(loader)
    assert caplog.text.count("takes its place") <= 20


def test_bad_file_is_an_error_by_default_and_in_evaluation():
    for settings, training in (
        (DataSettings(num_workers=0), True),
        (DataSettings(num_workers=0, on_error="skip"), False),
    ):
        dataset = Numbers((4,))
        loader = settings.train_loader(dataset, 0) if training else settings.val_loader(dataset)
        with pytest.raises(DataError, match=r"cannot decode '4\.jpg'$"):
            list(loader)


class Killing(Numbers):
    """A dataset whose process is killed, as when memory runs out."""

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


def test_killed_worker_is_reported_as_such():
    loader = DataSettings(images_per_gpu=3, num_workers=1, start_workers="fork").train_loader(Killing(), seed=0)
    with pytest.raises(RuntimeError) as error:
        epoch(loader)
    assert lost_worker(error.value) and not lost_worker(RuntimeError("shapes do not fit"))


class Unpicklable(Numbers):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return sample | {"target": sample["target"] | {"of no other process": lambda: None}}


def test_a_batch_that_cannot_be_passed_on_ends_the_run(capfd):
    """Such as without file handles or shared memory: the trainer would wait for the batch forever."""
    loader = DataSettings(images_per_gpu=3, num_workers=1, start_workers="fork").train_loader(Unpicklable(), seed=0)
    with pytest.raises(RuntimeError) as error:
        epoch(loader)
    assert lost_worker(error.value)
    assert "a batch cannot be passed on by its loading process: " in capfd.readouterr().err


class Threaded(Numbers):
    """A dataset in whose process threads fail, as Python's do that pass batches to a trainer that has ended."""

    def __getitem__(self, index):
        for error in (ConnectionResetError("of the trainer"), OSError("of the disk")):
            try:
                raise error
            except OSError:
                sys.excepthook(*sys.exc_info())
        return super().__getitem__(index)


def test_a_worker_does_not_report_that_its_trainer_has_ended(capfd):
    loader = DataSettings(images_per_gpu=3, num_workers=1, start_workers="fork").train_loader(Threaded(), seed=0)
    epoch(loader)
    printed = capfd.readouterr().err
    assert "OSError: of the disk" in printed and "of the trainer" not in printed


TRAINER = """
import multiprocessing, sys
from vitkit.data.loading.settings import DataSettings
from vitkit.data.synthetic.shapes import ShapesDetection

if __name__ == "__main__":
    dataset = ShapesDetection(num_images=4000, image_size=32)
    settings = DataSettings(images_per_gpu=1, num_workers=int(sys.argv[2]), start_workers=sys.argv[1])
    loader = settings.train_loader(dataset, seed=0)
    batches = iter(loader)  # whose end would end the workers
    next(batches)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    sys.stdin.read()
"""


# Forks hold each other's pipes open; other workers hold only their own, and take seconds to start.
@pytest.mark.parametrize("method, number", [("fork", 2), ("forkserver", 1), ("spawn", 1)])
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_workers_end_with_a_killed_trainer(tmp_path, method, number):
    (tmp_path / "trainer.py").write_text(TRAINER)
    with forked_python(tmp_path) as forked:
        python = sys.executable if method == "forkserver" else str(forked)  # a fork has a server already
        command = [python, str(tmp_path / "trainer.py"), method, str(number)]
        trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        workers = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(workers) == number and all(map(is_running, workers))
        trainer.kill()
        trainer.communicate()
    deadline = time.monotonic() + 60
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline, "the workers still run"
        time.sleep(0.1)


def test_a_script_without_a_main_guard_gives_one_error_that_names_it(tmp_path):
    values = "run_dir='run', device='cpu', train=dict(epochs=1), data=dict(num_workers=2, start_workers='spawn')"
    (tmp_path / "mine.py").write_text(f"import vitkit\nvitkit.train('quickstart/detr', {values})\n")
    with forked_python(tmp_path) as python:
        command = [str(python), str(tmp_path / "mine.py")]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.count("Traceback") == 1
    assert ended.stderr.splitlines()[-1] == (
        "vitkit.errors.ConfigError: data.num_workers=2: the processes that load data first import the script "
        f"'{tmp_path / 'mine.py'}', which trains or evaluates as soon as it is imported. Put what it runs below "
        '`if __name__ == "__main__":`, or set data.num_workers=0.'
    )
