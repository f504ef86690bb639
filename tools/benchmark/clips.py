"""Compare clip models: TimeSformer with transformers', MViTv2-S with torchvision's; and reading a clip from a file."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.video import mvit_v2_s

from vitkit.data.datasets.clip_sampling import ClipSampling
from vitkit.data.datasets.video import read_clips
from vitkit.data.transforms.clips import ClipTrainTransforms
from vitkit.io.video_files import open_video
from vitkit.registry import BACKBONES
from vitkit.tools.benchmark.models import import_transformers
from vitkit.tools.benchmark.timing import Call, Measurement, Options, compare

_FRAME_RATE, _SECONDS = 30, 10


def measure(part: str, options: Options) -> list[Measurement]:
    """Measure classifiers with 400 classes on one clip, without dropout and drop path, and then decoding of files."""
    rows = []
    families = {
        "timesformer_divided, 8 frames": (
            8,
            {"transformers": transformers_timesformer, "vitkit": partial(vitkit_model, "timesformer_divided")},
        ),
        "mvitv2_s_16x4, 16 frames": (
            16,
            {"torchvision": torchvision_mvit, "vitkit": partial(vitkit_model, "mvitv2_s_16x4")},
        ),
    }
    for name, (num_frames, models) in families.items():
        for training in (False, True):
            steps = {key: partial(step, model, num_frames, training, options) for key, model in models.items()}
            task = "training step" if training else "inference"
            rows += compare(f"{name}, {task}, 224x224, batch 1", steps, options)
    with tempfile.TemporaryDirectory() as folder:
        for distance in (12, 250):
            path = write_video(Path(folder, f"{distance}.mp4"), distance)
            readers = {"PyAV, all frames": partial(decode_all, path), "vitkit, a clip": partial(decode_clip, path)}
            what = f"{_SECONDS} s of 854x480 to RGB, a key frame every {distance}; a clip of 8 crops"
            rows += compare(what, readers, options, memory=False)
    return rows


def step(build: Callable[[], nn.Module], num_frames: int, training: bool, options: Options) -> Call:
    """Return a call that runs inference, or forward and backward."""
    torch.manual_seed(0)
    model = build().to(options.device).train(training)
    clip = torch.randn(1, 3, num_frames, 224, 224, device=options.device)
    label = torch.tensor([7], device=options.device)

    def infer() -> None:
        with torch.inference_mode(), options.autocast():
            model(clip)

    def train() -> None:
        with options.autocast():
            loss = F.cross_entropy(model(clip), label)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return train if training else infer


def vitkit_model(name: str) -> nn.Module:
    """Build one of vitkit's classifiers."""
    return BACKBONES.build(name, num_classes=400, drop_path=0.0)


def torchvision_mvit() -> nn.Module:
    """Build torchvision's MViTv2-S."""
    return mvit_v2_s(stochastic_depth_prob=0.0, dropout=0.0)


def transformers_timesformer() -> nn.Module:
    """Build transformers' TimeSformer, which takes (B, T, 3, H, W)."""
    transformers = import_transformers()
    model = transformers.TimesformerForVideoClassification(transformers.TimesformerConfig(num_labels=400))
    return _FramesFirst(model)


class _FramesFirst(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, clips: Tensor) -> Tensor:
        return self.model(clips.transpose(1, 2)).logits


def write_video(path: Path, key_frame_distance: int) -> Path:
    """Write an H.264 file with x264's defaults: a moving textured image with noise."""
    import av
    import cv2

    generator = np.random.default_rng(0)
    coarse, fine = (generator.integers(0, 256, size, np.uint8) for size in ((15, 40, 3), (240, 640, 3)))
    background = cv2.addWeighted(cv2.resize(coarse, (1280, 480)), 0.85, cv2.resize(fine, (1280, 480)), 0.15, 0)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=_FRAME_RATE, options={"g": str(key_frame_distance)})
        stream.width, stream.height, stream.pix_fmt = 854, 480, "yuv420p"
        for number in range(_FRAME_RATE * _SECONDS):
            noise = generator.integers(0, 8, (480, 854, 1), np.uint8)
            frame = cv2.add(background[:, number : number + 854], np.broadcast_to(noise, (480, 854, 3)))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return path


def decode_all(path: Path) -> Call:
    """Return a call that decodes each frame to RGB and discards it."""
    import av

    def call() -> None:
        with av.open(str(path)) as container:
            container.streams.video[0].codec_context.thread_count = torch.get_num_threads()
            for frame in container.decode(video=0):
                frame.to_ndarray(format="rgb24")

    return call


def decode_clip(path: Path) -> Call:
    """Return a call that reads a clip for training: 8 frames, every 32nd, cropped."""
    sampling, transforms = ClipSampling(num_frames=8, sampling_rate=32), ClipTrainTransforms()

    def call() -> None:
        with open_video(path) as video:
            read_clips(video, sampling.numbers(video.times, np.random.default_rng(0), str(path)), transforms, seed=0)

    return call
