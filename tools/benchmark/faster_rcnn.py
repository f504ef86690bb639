"""Train torchvision's Faster R-CNN R50-FPN for some minutes of processor time, to compare vitkit's detectors with it.

A plain recipe after torchvision's references: SGD, flips, color jitter, IoU crops, frozen batch norms; the rate falls
to a tenth after 80 % of the time. The loop uses nothing of vitkit, so its time is only torchvision's. With --run-dir,
an interrupted run is continued by the same command, from its last minute on.

Example:
    python tools/benchmark/faster_rcnn.py data/bccd --minutes 15 --weights resnet50.pth --stride-in-1x1 \\
        --pixel-mean 0.48502 0.45796 0.40760
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.datasets import CocoDetection
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
from torchvision.models.resnet import resnet50
from torchvision.ops import FrozenBatchNorm2d
from torchvision.transforms import v2

from vitkit.tools.common import positive
from vitkit.weights.reading import read_checkpoint

WARMUP_STEPS = 100
STATE_NAME, RESULT_NAME = "state.pth", "result.json"
SECONDS_BETWEEN_STATES = 60


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder with images/ and annotations/instances_{train,val}.json")
    parser.add_argument(
        "--minutes", type=positive_minutes, default=15, help="processor minutes of training (default: 15)"
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--run-dir", type=Path, help=f"folder for {STATE_NAME} every minute and {RESULT_NAME}")
    add_model_arguments(parser)
    return parser.parse_args(argv)


def positive_minutes(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a finite number above 0")
    return minutes


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is trained."""
    parser.add_argument("--weights", type=Path, help="the backbone's weights (default: random ones)")
    parser.add_argument(
        "--stride-in-1x1", action="store_true", help="the weights stride in a stage's first convolution"
    )
    parser.add_argument(
        "--pixel-mean", nargs=3, type=float, default=[0.485, 0.456, 0.406], help="mean of RGB, for Keras's weights"
    )
    parser.add_argument("--size", type=positive, default=320, help="short side of the images in pixels (default: 320)")


def build(args: argparse.Namespace, num_classes: int) -> FasterRCNN:
    pretrained = args.weights is not None
    backbone = resnet50(weights=None, norm_layer=FrozenBatchNorm2d if pretrained else torch.nn.BatchNorm2d)
    if pretrained:
        state = read_checkpoint(args.weights)
        backbone.load_state_dict({k: v for k, v in state.items() if not k.endswith("num_batches_tracked")})
    if args.stride_in_1x1:
        for stage in (backbone.layer2, backbone.layer3, backbone.layer4):
            stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    backbone = _resnet_fpn_extractor(backbone, trainable_layers=3 if pretrained else 5)
    return FasterRCNN(
        backbone, num_classes, min_size=args.size, max_size=2 * args.size, image_mean=args.pixel_mean,
        image_std=[0.229, 0.224, 0.225],
    )  # fmt: skip


class LabeledPhotos(CocoDetection):
    """Images with boxes and labels from 1 in the order of category ids, and without crowds, as in the references.

    torchvision's own wrapper leaves out boxes and labels where an image has none, which its transforms do not allow.
    """

    def __init__(self, root: Path, part: str, transforms: Callable[[Any, Any], Any]):
        super().__init__(root / "images", root / f"annotations/instances_{part}.json", transforms=self._transform)
        self._transforms = transforms
        self.category_ids = sorted(self.coco.cats)

    def _transform(self, image: Any, annotations: Sequence[dict[str, Any]]) -> tuple[Tensor, dict[str, Tensor]]:
        objects = [annotation for annotation in annotations if not annotation.get("iscrowd")]
        boxes = torch.tensor([annotation["bbox"] for annotation in objects], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        labels = [1 + self.category_ids.index(annotation["category_id"]) for annotation in objects]
        target = dict(
            boxes=tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(image.height, image.width)),
            labels=torch.tensor(labels, dtype=torch.int64),
        )
        return self._transforms(image, target)


def average_precision(coco: COCO, detections: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Print COCO's summary, and return AP and AP50."""
    detected = COCO()  # not coco.loadRes, which fails without detections
    annotations = [
        dict(detection, id=number, area=detection["bbox"][2] * detection["bbox"][3], iscrowd=0)
        for number, detection in enumerate(detections, start=1)
    ]
    detected.dataset = dict(coco.dataset, annotations=annotations)
    detected.createIndex()
    evaluation = COCOeval(coco, detected, "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return float(evaluation.stats[0]), float(evaluation.stats[1])


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    print(json.dumps(train(args)))


def train(args: argparse.Namespace) -> dict[str, float]:
    """Train for the time, unless that has been done; return the figures."""
    state_file, result_file = (args.run_dir and args.run_dir / name for name in (STATE_NAME, RESULT_NAME))
    if result_file and result_file.is_file():
        return json.loads(result_file.read_text(encoding="utf-8"))
    seed_everything(args.seed)
    augment = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomPhotometricDistort(),
            v2.RandomIoUCrop(),
            v2.RandomHorizontalFlip(),
            v2.RandomVerticalFlip(),
            v2.SanitizeBoundingBoxes(),
            v2.ToDtype(torch.float32, scale=True),
            v2.ToPureTensor(),
        ]
    )
    plain = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()])
    train_set, val_set = LabeledPhotos(args.root, "train", augment), LabeledPhotos(args.root, "val", plain)
    loader = DataLoader(train_set, batch_size=2, shuffle=True, drop_last=True, collate_fn=lambda batch: batch)
    model = build(args, 1 + len(train_set.category_ids))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.005, momentum=0.9, weight_decay=5e-4)
    budget, steps = 60 * args.minutes, 0
    start, clock_start = time.process_time(), time.monotonic()
    if state_file and state_file.is_file():
        state = read_checkpoint(state_file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        steps, start, clock_start = state["steps"], start - state["spent"], clock_start - state["seconds"]
        seed_everything(args.seed + steps)  # other photos than in the first steps
    saved = time.process_time()
    model.train()
    while time.process_time() - start < budget:
        for batch in loader:
            spent = time.process_time() - start
            if spent >= budget:
                break
            rate = 0.005 * min(1.0, (steps + 1) / WARMUP_STEPS) * (0.1 if spent > 0.8 * budget else 1.0)
            for group in optimizer.param_groups:
                group["lr"] = rate
            losses = model(*map(list, zip(*batch)))
            optimizer.zero_grad()
            sum(losses.values()).backward()
            optimizer.step()
            steps += 1
            if steps % 50 == 0:
                terms = "  ".join(f"{name} {loss.item():.3f}" for name, loss in losses.items())
                print(f"step {steps}  {spent / 60:.1f} of {args.minutes:g} min  {terms}", flush=True)
            if state_file and time.process_time() - saved > SECONDS_BETWEEN_STATES:
                before = time.process_time()
                times = dict(spent=before - start, seconds=time.monotonic() - clock_start)
                state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), steps=steps)
                write_state(state_file, state | times)
                saved = time.process_time()
                start += saved - before  # writing is not training
    minutes, clock_minutes = (time.process_time() - start) / 60, (time.monotonic() - clock_start) / 60
    model.eval()
    detections = []
    with torch.no_grad():
        for image_id, (image, _) in zip(val_set.ids, val_set):
            output = model([image])[0]
            boxes = output["boxes"].clone()
            boxes[:, 2:] -= boxes[:, :2]
            detections += [
                dict(image_id=image_id, category_id=val_set.category_ids[label - 1], bbox=box, score=score)
                for box, label, score in zip(boxes.tolist(), output["labels"].tolist(), output["scores"].tolist())
            ]
    ap, ap50 = average_precision(val_set.coco, detections)
    epochs = round(steps / len(loader))
    result = dict(AP=ap, AP50=ap50, steps=steps, epochs=epochs, processor_minutes=minutes, minutes=clock_minutes)
    result = {name: round(value, 4) for name, value in result.items()}
    if result_file:
        args.run_dir.mkdir(parents=True, exist_ok=True)
        result_file.write_text(json.dumps(result), encoding="utf-8")
        state_file.unlink(missing_ok=True)
    return result


def seed_everything(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write the state of a run; an interruption leaves the earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


if __name__ == "__main__":
    main()
