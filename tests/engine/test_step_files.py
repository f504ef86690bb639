"""How many files a reader has to open to follow one training step of a DETR."""

import sys
from contextlib import contextmanager
from pathlib import Path

import vitkit
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

    def after_step(self, run, decision):
        sys.setprofile(self.note if run.progress.step == 2 else None)

    def note(self, frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            self.step.add(str(path.relative_to(PACKAGE)))
            if self.in_forward:
                self.forward.add(str(path.relative_to(PACKAGE)))


def test_step_of_detr_passes_few_files(tmp_path):
    passed = PassedFiles()
    world = dict(num_images=64, transforms=None)
    vitkit.train(
        "quickstart/detr",
        run_dir=tmp_path / "run",
        device="cpu",
        hooks=[passed],
        data=dict(train=world, val=dict(num_images=1), images_per_gpu=16),
        train=dict(epochs=1),
    )
    data = {name for name in passed.step if name.startswith("data/")}
    # vitkit/README.md lists them: whoever adds one asks whether a reader of DETR needs it.
    assert len(passed.forward) <= 11, sorted(passed.forward)
    assert len(passed.step - data) <= 21, sorted(passed.step - data)
    assert len(data) <= 6, sorted(data)
