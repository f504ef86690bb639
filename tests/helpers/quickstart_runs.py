"""A training run of a quickstart config with a batch of its data, for tests that take single steps."""

from pathlib import Path

import torch

from vitkit.config import load_config
from vitkit.engine.build import build_model
from vitkit.engine.optimizers import parameter_groups
from vitkit.engine.run import TrainRun
from vitkit.engine.settings import TrainSettings
from vitkit.registry import CRITERIA, DATASETS
from vitkit.structures import Batch

REALTIME = {"dfine": "dfine_n_coco", "rf_detr": "rf_detr_n_coco", "rt_detr": "rtdetr_r18"}
"""Name of a run -> the config of its model and losses; its data are those of quickstart/detr."""


def quickstart_run(name: str, device: torch.device, folder: Path, *, move=None, **settings) -> tuple[TrainRun, Batch]:
    """Return a run without a loader, guarded, and a batch of two images.

    Args:
        name: a config in configs/quickstart, or one of `REALTIME`.
        move: moves a module to the device; None: `module.to`.
        settings: fields of `TrainSettings`.
    """
    config = load_config(f"quickstart/{'detr' if name in REALTIME else name}", check=False)
    if name in REALTIME:
        published = load_config(REALTIME[name], check=False)
        config |= {part: published[part] for part in ("model", "criterion")}
        config["model"]["backbone"] |= dict(pretrained=False)
        config["model"] |= dict(num_queries=50, num_detections=50)
        config["data"]["train"] |= dict(image_size=160)
    dataset = DATASETS.build(config["data"]["train"])
    batch = Batch.collate([dataset.load_sample(index, 0) for index in range(2)])
    torch.manual_seed(0)
    move = move or (lambda module: module.to(device))
    model = move(build_model(config["model"] | dict(num_classes=len(dataset.classes))).train())
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-4, weight_decay=1e-4), foreach=True)
    run = TrainRun(
        model=model,
        criterion=move(CRITERIA.build(config["criterion"])),
        loader=None,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.ConstantLR(optimizer),
        settings=TrainSettings(epochs=1, clip_grad_norm=0.1, **settings),
        device=device,
        run_dir=folder,
    )
    run.guard.watch()
    run.progress.num_batches = 1000  # of an epoch: more than any test takes
    return run, batch
