"""A small model, its data and its training, for several gloo ranks."""

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vitkit.distributed import is_main, rank
from vitkit.engine.evaluate import evaluate
from vitkit.engine.parallel import is_sharded, shard
from vitkit.engine.run import TrainRun
from vitkit.engine.settings import TrainSettings
from vitkit.engine.trainer import fit
from vitkit.protocols.criterion import Criterion
from vitkit.registry import OPTIMIZERS, SCHEDULES
from vitkit.structures import Batch
from vitkit.weights.locate import LAST_NAME

CPU = torch.device("cpu")
needs_newer_torch = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch shards no model among CPU processes"
)


class Block(nn.Sequential):
    activation_checkpointing = False


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 1)

    def forward(self, images):
        for block in self.blocks:
            images = images + block(images)
        return {"value": self.last(self.norm(images))[:, 0]}


class Error(Criterion):
    def forward(self, outputs, targets):
        return {"squared": (outputs["value"] - torch.stack([t["value"] for t in targets])).square().mean()}


class RankBatches:
    """Four batches, different on each rank; batch `poisoned` of rank 1 contains nan."""

    num_skipped = num_padded = 0

    def __init__(self, poisoned=None):
        self.poisoned = poisoned

    def set_position(self, epoch, batch=0):
        self.epoch, self.batch = epoch, batch

    def __len__(self):
        return 4

    def __iter__(self):
        for number in range(self.batch, 4):
            generator = torch.Generator().manual_seed(100 * self.epoch + 10 * number + rank())
            images = torch.randn(5, 6, generator=generator)
            targets = [{"value": image.sum(), "image_id": 10 * number} for image in images]
            if number == self.poisoned and rank() == 1:
                images = images * torch.nan
            yield Batch({"images": images}, targets)


class EvalRankBatches:
    """Evaluation batches, with a number of batches for each rank."""

    def __init__(self, numbers):
        self.number = numbers[rank()]

    def __len__(self):
        return self.number

    def __iter__(self):
        for seed in range(self.number):
            images = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
            yield Batch({"images": images}, [{}] * 5)


class Sums:
    """An evaluator that keeps the sums of the outputs."""

    takes_outputs = True

    def __init__(self):
        self.sums = []

    def update(self, predictions, targets):
        self.sums.append(sum(prediction["value"].item() for prediction in predictions))

    def gather(self):
        pass

    def compute(self):
        return {"bbox/AP": 0.5}


def run(folder: Path, strategy: str, *, poisoned: int | None = None, to_evaluate=(2, 1), **settings):
    """Train; return the losses of the evaluations, in which rank 0 has one batch more, or all batches."""
    torch.manual_seed(0)
    model = Blocks()
    if strategy == "fsdp":
        model = shard(model, CPU)
        assert is_sharded(model) and is_sharded(model.blocks[0])
    optimizer = OPTIMIZERS.build({"type": "AdamW", "lr": 0.01, "lr_multipliers": {"blocks": 0.5}}, model=model)
    schedule = SCHEDULES.build(
        {"type": "CosineLR", "warmup_steps": 1}, optimizer=optimizer, steps_per_epoch=2, epochs=3
    )
    sums, full = [], []

    def validate(model):
        evaluator = Sums()
        first = model.blocks[0][0]
        handle = model.last.register_forward_hook(lambda *_: full.append(not isinstance(first.weight, DTensor)))
        metrics = evaluate(model, EvalRankBatches(to_evaluate), evaluator, device=CPU)
        handle.remove()
        sums.extend(evaluator.sums)
        return metrics

    if is_main():
        folder.mkdir(exist_ok=True)
    dist.barrier()
    resume = folder / LAST_NAME if (folder / LAST_NAME).exists() else None
    dist.barrier()
    options = {"epochs": 3, "accumulate": 2, "clip_grad_norm": 0.5, **settings}
    state = TrainRun(
        model=model,
        criterion=Error(),
        loader=RankBatches(poisoned),
        optimizer=optimizer,
        schedule=schedule,
        settings=TrainSettings(strategy=strategy, **options),
        device=CPU,
        run_dir=folder,
    )
    fit(state, validate=validate, resume=resume)
    assert strategy == "ddp" or set(full) <= {0 in to_evaluate}  # then a rank cannot keep in step with the others
    return sums


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())
