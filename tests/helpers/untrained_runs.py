"""Runs with random weights, and a video to predict on."""

from pathlib import Path

import cv2
import numpy as np
import torch

from vitkit import build_dataset, build_model, load_config
from vitkit.config import save_config
from vitkit.weights import save_checkpoint

DETR = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    cfg = quickstart()
    cfg["model"]["neck"]["out_channels"] = 32
    cfg["model"]["head"].update(d_model=32, num_heads=2, d_ffn=64, num_encoder_layers=1, num_decoder_layers=1)
    return cfg
"""
MASKS = """
from vitkit.configs.quickstart.mask2former_panoptic import config as quickstart


def config():
    cfg = quickstart()
    cfg["model"].update(tasks=["panoptic", "semantic", "instance"], object_threshold=0.0, overlap_threshold=0.0)
    return cfg
"""


def make_run(text: str, dataset: str) -> None:
    Path("config.py").write_text(text)
    config = load_config("config.py")
    torch.manual_seed(0)
    data = build_dataset(dict(type=dataset, num_images=1))
    known = {"classes": data.classes, "things": data.things}
    model = build_model(config["model"], classes=data.classes, things=known.get("things"))
    save_checkpoint("run/best.pth", {"model": model.state_dict(), **known})
    save_config(config, "run/config.json")


def make_video(path: str) -> None:
    writer = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*"mp4v"), 10, (64, 48))
    for k in range(7):
        writer.write(np.full((48, 64, 3), 30 * k, np.uint8))
    writer.release()
