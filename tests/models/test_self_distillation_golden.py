"""Self-distillation against the official DINO: outputs, losses, gradients, centers, weights after four steps."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from golden.weights import Case, fill, grad_projection, load_case
from helpers.weights import assert_same_weights

from vitkit import build_model
from vitkit.engine.hooks import Hook
from vitkit.engine.run import TrainRun
from vitkit.engine.settings import TrainSettings
from vitkit.engine.trainer import fit
from vitkit.model_zoo.converters import write_names
from vitkit.models.self_distillation import ProjectionHead, SelfDistillationLoss, SelfDistillationSchedules, cosine
from vitkit.registry import OPTIMIZERS, SCHEDULES
from vitkit.structures import Batch
from vitkit.weights import load_weights

CPU = torch.device("cpu")
PARTS = ("student", "teacher", "dino_loss")


@pytest.fixture(scope="module")
def case() -> Case:
    return load_case("self_distillation")


def official_checkpoint(case: Case, *, wrapped: bool = True) -> dict:
    """Return what the official training writes, where DDP wraps the student."""
    checkpoint: dict = {part: {} for part in PARTS} | {"epoch": 0}
    for key, value in case.torch_state_dict().items():
        part, _, rest = key.partition(".")
        checkpoint[part]["module." * (wrapped and part == "student") + rest] = value
    return checkpoint


def make_model(case: Case):
    s = case.meta["settings"]
    backbone = {name: s[name] for name in ("patch_size", "image_size", "d_model", "depth", "num_heads")}
    sizes = dict(num_prototypes=s["prototypes"], hidden_channels=s["hidden"], bottleneck_channels=s["bottleneck"])
    backbone |= dict(type="ViT", position_offset=0.1)
    return build_model(dict(type="SelfDistillation", backbone=backbone, norm_last_layer=False, **sizes))


class Views:
    """The views of the golden case, step by step."""

    num_skipped = num_padded = 0

    def __init__(self, case: Case):
        self.inputs, self.settings = case.torch_inputs(), case.meta["settings"]

    def set_position(self, epoch, batch=0):
        self.first = epoch * len(self) + batch

    def __len__(self):
        return self.settings["steps_per_epoch"]

    def __iter__(self):
        for step in range(self.first, self.first + len(self)):
            names = ("images", "small_images")
            yield Batch({name: self.inputs[f"{step}/{name}"] for name in names}, [{}] * self.settings["images"])


class Recorder(Hook):
    """Records the student's gradients when the optimizer steps, and what a step has left."""

    def __init__(self):
        self.gradients, self.losses, self.centers = [], [], []

    @contextmanager
    def during_training(self, run):
        def record(*_):
            named = run.model.student.named_parameters()
            self.gradients.append({k: grad_projection(k, p.grad) for k, p in named if p.grad is not None})

        with run.optimizer.register_step_pre_hook(record):
            yield

    def after_step(self, run, step):
        self.losses.append(float(step.losses[0]["distillation"]))
        self.centers.append(run.model.center.clone())


def assert_golden(case: Case, name: str, got: torch.Tensor) -> None:
    expected = case.expected[name]
    np.testing.assert_allclose(expected.take(got.detach().numpy()), expected.values, atol=1e-5, rtol=1e-5, err_msg=name)


def test_four_steps_are_those_of_the_official_code(case, tmp_path):
    s, model = case.meta["settings"], make_model(case)
    assert load_weights(model, official_checkpoint(case)).converter == "facebookresearch/dino training"
    criterion, before, after = SelfDistillationLoss(), Recorder(), Recorder()
    schedules = SelfDistillationSchedules(
        momentum=s["momentum"],
        teacher_temperature=s["teacher_temp"],
        warmup_teacher_temperature=s["warmup_teacher_temp"],
        warmup_epochs=s["warmup_teacher_temp_epochs"],
        final_weight_decay=s["weight_decay_end"],
        clip_parameter_norm=s["clip"],
        frozen_last_layer_epochs=s["freeze_last_layer"],
    )
    spec = dict(type="AdamW", lr=s["lr"], weight_decay=s["weight_decay"], no_weight_decay=["vectors"])
    optimizer = OPTIMIZERS.build(spec, model=model)
    length = dict(steps_per_epoch=s["steps_per_epoch"], epochs=s["epochs"])
    settings = TrainSettings(epochs=s["epochs"], hooks=[before, schedules, after])
    run = TrainRun(
        model=model,
        criterion=criterion,
        loader=Views(case),
        optimizer=optimizer,
        schedule=SCHEDULES.build("ConstantLR", optimizer=optimizer, **length),
        settings=settings,
        device=CPU,
        run_dir=tmp_path,
    )
    run.criterion.teacher_temperature = schedules.temperature(0)
    outputs = model(**next(iter_views(case)).inputs)
    for name in ("student_logits", "teacher_logits"):
        assert_golden(case, f"0/{name}", outputs[name])

    fit(run)
    last_layer = {"head.last_layer.weight_g", "head.last_layer.weight_v"}
    for step in range(4):
        assert after.losses[step] == pytest.approx(float(case.expected[f"{step}/loss"].values), rel=1e-5)
        assert_golden(case, f"{step}/center", after.centers[step])
        frozen = last_layer if step < s["steps_per_epoch"] else set()
        assert case.grads[f"{step}"].keys() - after.gradients[step].keys() == frozen
        for recorder, name in ((before, f"{step}"), (after, f"{step}/clipped")):
            for key, got in recorder.gradients[step].items():
                assert got == pytest.approx(case.grads[name][key], rel=1e-3, abs=1e-5), f"{name} {key}"
    for key, value in write_names(model, "official").state.items():
        name = f"last/{key.replace('.module', '')}"
        if key.endswith("qkv.bias"):
            # Keys' biases have no effect, and AdamW makes steps of full size out of gradients that are only rounding.
            keys = slice(s["d_model"], 2 * s["d_model"])
            value[keys] = torch.from_numpy(case.expected[name].values)[keys]
        if not key.startswith("dino_loss"):
            assert_golden(case, name, value)


def iter_views(case: Case):
    views = Views(case)
    views.set_position(0)
    return iter(views)


def test_official_checkpoints_are_read_and_written(case):
    model, state = make_model(case), case.torch_state_dict()
    load_weights(model, official_checkpoint(case, wrapped=False))
    assert torch.equal(model.backbone.cls_token, state["teacher.backbone.cls_token"])
    assert torch.equal(model.student["head"].mlp[4].bias, state["student.head.mlp.4.bias"])
    assert torch.equal(model.center, state["dino_loss.center"])
    written = write_names(model, "official").nested()
    expected = official_checkpoint(case)
    for part in PARTS:
        assert written[part].keys() == expected[part].keys()
        assert all(torch.equal(value, expected[part][key]) for key, value in written[part].items())
    again = make_model(case)
    load_weights(again, written)
    assert_same_weights(again, model)


def test_head_with_batch_norms_is_the_official_one(case):
    s = case.meta["settings"]
    sizes = dict(hidden_channels=s["hidden"], bottleneck_channels=s["bottleneck"])
    head = ProjectionHead(s["d_model"], s["prototypes"], batch_norm=True, **sizes)
    rows = case.meta["norms_state_dict"]
    head.load_state_dict({row[0].removeprefix("norms.head."): torch.from_numpy(np.array(fill(*row))) for row in rows})
    assert_golden(case, "norms/logits", head(case.torch_inputs()["norms/features"][:, 0]))
    assert not head.last_layer.weight_g.requires_grad


def test_schedules_are_the_official_ones(case):
    golden = case.meta["schedules"]
    for name, start, end in (("momentum", 0.996, 1.0), ("weight_decay", 0.04, 0.4)):
        assert [cosine(start, end, step, 70) for step in golden["steps"]] == pytest.approx(golden[name], rel=1e-12)
    hook = SelfDistillationSchedules(teacher_temperature=0.07, warmup_epochs=3)
    temperatures = [hook.temperature(epoch) for epoch in range(5)]
    assert temperatures == pytest.approx(golden["teacher_temperature"], rel=1e-12)
