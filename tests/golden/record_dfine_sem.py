"""Record dfine_sem_n.json and dfine_sem_n.npz: D-FINE-seg's smallest semantic network with weights made by rules.

Run:  python tests/golden/record_dfine_sem.py    (needs dfine-seg 0.6.2)
"""

import json
from importlib.metadata import version

import numpy as np
import torch
from dfine_seg.model import dfine
from weights import HERE, fill, grad_projection, make_input, rule_for

SIZE, NUM_CLASSES, IGNORED = (128, 160), 7, 255
INPUT = dict(seed="input:dfine_sem_n", kind="pixels", shape=[2, 3, *SIZE])
LABELS = dict(seed="labels:dfine_sem_n", kind="ids", low=0, high=NUM_CLASSES + 1, shape=[2, 8, 10])
GRADS = (
    "decoder.mask_decoder.lateral.0.weight",
    "decoder.mask_decoder.up_conv.weight",
    "decoder.neck.0.0.weight",
    "decoder.neck.1.1.bias",
    "decoder.classifier.weight",
    "decoder.aux_head.0.0.weight",
    "decoder.aux_head.2.bias",
    "encoder.pan_blocks.0.cv1.conv.weight",
    "backbone.stages.1.blocks.0.layers.0.conv.weight",
)


def make_labels() -> torch.Tensor:
    """Return (2, H, W) int64, squares of 16 pixels of a class; some are ignored, and the last class is absent."""
    squares = torch.from_numpy(make_input(LABELS)).long()
    squares = torch.where(squares >= NUM_CLASSES - 1, IGNORED, squares)
    return squares.repeat_interleave(16, 1).repeat_interleave(16, 2)


def main() -> None:
    model = dfine.build_model("n", NUM_CLASSES, False, "cpu", img_size=SIZE, task="sem_seg")
    stored, entries, state = {}, [], {}
    for key, value in model.state_dict().items():
        rule, dtype = rule_for(key, value.shape), str(value.dtype).removeprefix("torch.")
        entries.append([key, list(value.shape), dtype, rule])
        state[key] = torch.from_numpy(fill(key, value.shape, dtype, rule))
    model.load_state_dict(state)
    images = torch.from_numpy(make_input(INPUT)) / 255
    model.eval()
    with torch.no_grad():
        logits = model(images)["sem_seg_logits"].numpy()
    model.train()
    for module in model.modules():
        if isinstance(module, (torch.nn.BatchNorm2d, torch.nn.Dropout2d)):
            module.eval()
    labels = make_labels()
    criterion = dfine.build_loss("n", NUM_CLASSES, 0.0, False, task="sem_seg", ignore_index=IGNORED)
    terms = criterion(model(images), [dict(sem_mask=label) for label in labels])
    total = sum(terms.values())
    total.backward()
    gradients = dict(model.named_parameters())
    projections = [grad_projection(name, gradients[name].grad.numpy()) for name in GRADS]
    stored["grad/train/norm"], stored["grad/train/dot"] = map(np.array, zip(*projections, strict=True))
    stored["out/logits"] = logits.reshape(-1)[::11]
    stored |= {f"target/{image}/labels": label.numpy() for image, label in enumerate(labels)}
    stats = {"mean": float(logits.mean()), "std": float(logits.std()), "l2": float(np.linalg.norm(logits))}
    described = dict(shape=list(logits.shape), dtype="float32", stride=11, level="main", atol=1e-4, stats=stats)
    meta = dict(
        name="dfine_sem_n",
        format=1,
        description="D-FINE-seg N for semantic segmentation on two images in float32, and its losses, batch norms fixed"
        " and without dropout.",
        official=dict(package=f"dfine-seg=={version('dfine-seg')}"),
        settings=dict(num_classes=NUM_CLASSES, size=SIZE, ignored=IGNORED),
        torch_version=torch.__version__,
        inputs=dict(images=INPUT),
        outputs=dict(logits=described),
        targets=dict(train=[dict(labels=f"target/{image}/labels") for image in range(len(labels))]),
        losses=dict(train=dict(terms={name: float(value) for name, value in terms.items()}, total=float(total))),
        grads=dict(train=GRADS),
        state_dict=entries,
    )
    (HERE / "dfine_sem_n.json").write_text(json.dumps(meta, separators=(",", ":")) + "\n", encoding="utf-8")
    np.savez_compressed(HERE / "dfine_sem_n.npz", **stored)


if __name__ == "__main__":
    main()
