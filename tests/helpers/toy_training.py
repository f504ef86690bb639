"""A regression that trains in a fraction of a second, with its data and its run."""

import json
import threading
from contextlib import contextmanager

import torch
from torch import nn

from vitkit.distributed import RatioMeter
from vitkit.engine.run import TrainRun
from vitkit.engine.settings import TrainSettings
from vitkit.engine.trainer import fit
from vitkit.logging import LOG_NAME
from vitkit.protocols.criterion import Criterion
from vitkit.registry import SCHEDULES
from vitkit.structures import Batch

CPU = torch.device("cpu")


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, images):
        return {"value": self.layers(images)[:, 0]}


class SquaredError(Criterion):
    def __init__(self):
        super().__init__()
        self.meters = {"close": RatioMeter()}

    def forward(self, outputs, targets):
        wanted = torch.stack([t["value"] for t in targets])
        error = (outputs["value"] - wanted).abs()
        self.meters["close"].add((error < 0.5).sum(), torch.tensor(len(targets)))
        return {"squared": error.square().mean(), "absolute": 0.1 * error.mean()}


class Batches:
    """Eight batches of four samples, in an order that depends on the epoch."""

    num_skipped = num_padded = 0

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(32, 4, generator=generator)
        self.values = self.images.sum(dim=1)
        self.epoch = self.batch = 0

    def set_position(self, epoch, batch=0):
        self.epoch, self.batch = epoch, batch

    def __len__(self):
        return 8

    def __iter__(self):
        order = torch.randperm(32, generator=torch.Generator().manual_seed(self.epoch))
        for rows in order.view(8, 4)[self.batch :]:
            yield Batch({"images": self.images[rows]}, [{"value": v} for v in self.values[rows]])


def run(
    run_dir,
    *,
    resume=None,
    evaluate=None,
    loader=None,
    model=None,
    criterion=None,
    owns_folder=lambda: True,
    schedule=None,
    batches_per_epoch=8,
    added_hooks=(),
    val_data="",
    **settings,
):
    run_dir.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model, criterion = model or Regression(), criterion or SquaredError()
    settings = TrainSettings(**{"epochs": 4, "log_every": 4, **settings})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = SCHEDULES.build(
        {"type": "CosineLR", "warmup_steps": 3, "epochs": 4, **(schedule or {})},
        optimizer=optimizer,
        steps_per_epoch=max(1, batches_per_epoch // settings.accumulate),
    )
    state = TrainRun(
        model=model,
        criterion=criterion,
        loader=loader or Batches(),
        optimizer=optimizer,
        schedule=schedule,
        settings=settings,
        device=CPU,
        run_dir=run_dir,
        saved_with={"classes": ["a"]},
        val_data=val_data,
        owns_folder=owns_folder or (lambda: True),
    )
    return model, fit(state, validate=evaluate, resume=resume, hooks=added_hooks)


@contextmanager
def unseen_tensorboard_errors():
    """Do not report the errors of TensorBoard's threads, which also reach the run, and wait until they have ended."""
    before, report = threading.enumerate(), threading.excepthook
    threading.excepthook = lambda issue: None
    try:
        yield
        for thread in set(threading.enumerate()).difference(before):
            thread.join(timeout=60)
    finally:
        threading.excepthook = report


def records(run_dir, kind):
    lines = [json.loads(line) for line in (run_dir / LOG_NAME).read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


class Blocks(nn.Module):
    """A stem, two blocks with a layer between, a norm after them, and a head beside the backbone."""

    class Block(nn.Module):
        activation_checkpointing = False

        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

    def __init__(self):
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.pos_embed = nn.Parameter(torch.zeros(1, 3, 2))
        self.backbone.stem = nn.Linear(2, 2)
        self.backbone.stage1 = nn.Sequential(self.Block(), nn.Linear(2, 2))
        self.backbone.stage2 = nn.Sequential(self.Block())
        self.backbone.norm = nn.LayerNorm(2)
        self.head = self.Block()
