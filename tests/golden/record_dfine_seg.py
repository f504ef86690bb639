"""Record dfine_seg_n.json and dfine_seg_n.npz: D-FINE-seg's smallest network with weights made by rules, its losses.

Run:  python tests/golden/record_dfine_seg.py    (needs dfine-seg 0.6.2)
"""

import json
from importlib.metadata import version

import numpy as np
import torch
from dfine_seg.model import dfine
from dfine_seg.model.configs import models
from weights import HERE, fill, grad_projection, make_input, rule_for

SIZE, NUM_CLASSES, NUM_QUERIES, COUNTS = (128, 160), 7, 40, (3, 2)
INPUT = dict(seed="input:dfine_seg_n", kind="pixels", shape=[2, 3, *SIZE])
GRADS = (
    "decoder.mask_head.layers.0.weight",
    "decoder.mask_decoder.lateral.0.weight",
    "decoder.mask_decoder.up_conv.weight",
    "decoder.mask_decoder.bn.2.bias",
    "backbone.stages.1.blocks.0.layers.0.conv.weight",
)


def make_targets() -> list[dict[str, torch.Tensor]]:
    """Return objects whose masks fill most of their boxes; edges of these lie between pixels of the predicted masks."""
    targets = []
    for image, count in enumerate(COUNTS):
        numbers = torch.from_numpy(
            make_input(dict(seed=f"targets:{image}", kind="ids", low=0, high=97, shape=[count, 4]))
        )
        masks, boxes = torch.zeros(count, *SIZE, dtype=torch.bool), torch.zeros(count, 4)
        for j, (x, y, w, h) in enumerate(numbers.tolist()):
            left, top, width, height = 5 + x, 3 + y * 3 // 4, 21 + w // 4, 18 + h // 4
            masks[j, top : top + height, left : left + width] = True
            masks[j, top : top + height // 2, left : left + width // 3] = False
            center = [left + width / 2, top + height / 2]
            boxes[j] = torch.tensor([*center, width, height]) / torch.tensor([SIZE[1], SIZE[0], SIZE[1], SIZE[0]])
        targets.append(dict(labels=torch.arange(count) * 2, boxes=boxes, masks=masks))
    return targets


def main() -> None:
    models["n"]["DFINETransformer"].update(num_queries=NUM_QUERIES, num_denoising=0)
    model = dfine.build_model("n", NUM_CLASSES, True, "cpu", img_size=SIZE)
    stored, entries, state = {}, [], {}
    for key, value in model.state_dict().items():
        is_given = key.split(".")[-1] in ("anchors", "valid_mask", "up", "reg_scale", "project", "num_points_scale")
        rule = f"computed:{key}" if is_given else rule_for(key, value.shape)
        dtype = str(value.dtype).removeprefix("torch.")
        entries.append([key, list(value.shape), dtype, rule])
        if is_given:
            stored[f"buf/{key}"] = value.numpy()
        state[key] = value if is_given else torch.from_numpy(fill(key, value.shape, dtype, rule))
    model.load_state_dict(state)
    images = torch.from_numpy(make_input(INPUT)) / 255
    model.eval()
    with torch.no_grad():
        outputs = {name: model(images)[name] for name in ("pred_logits", "pred_boxes", "pred_masks")}
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    targets = make_targets()
    terms = dfine.build_loss("n", NUM_CLASSES, 0.0, True)(model(images, targets), targets)
    total = sum(terms.values())
    total.backward()
    gradients = dict(model.named_parameters())
    projections = [grad_projection(name, gradients[name].grad.numpy()) for name in GRADS]
    stored["grad/train/norm"], stored["grad/train/dot"] = map(np.array, zip(*projections, strict=True))
    described = {}
    for name, value in outputs.items():
        array, stride = value.numpy(), 7 if name == "pred_masks" else 1
        stored[f"out/{name}"] = array.reshape(-1)[::stride] if stride > 1 else array
        stats = {"mean": float(array.mean()), "std": float(array.std()), "l2": float(np.linalg.norm(array))}
        described[name] = dict(
            shape=list(array.shape), dtype="float32", stride=stride, level="main", atol=1e-4, stats=stats
        )
    for image, target in enumerate(targets):
        stored |= {f"target/{image}/{field}": value.numpy() for field, value in target.items()}
    meta = dict(
        name="dfine_seg_n",
        format=1,
        description="D-FINE-seg N on two images in float32, and its losses without denoising, batch norms fixed.",
        official=dict(package=f"dfine-seg=={version('dfine-seg')}"),
        settings=dict(num_classes=NUM_CLASSES, num_queries=NUM_QUERIES, size=SIZE),
        torch_version=torch.__version__,
        inputs=dict(images=INPUT),
        outputs=described,
        targets=dict(train=[{field: f"target/{i}/{field}" for field in target} for i, target in enumerate(targets)]),
        losses=dict(train=dict(terms={name: float(value) for name, value in terms.items()}, total=float(total))),
        grads=dict(train=GRADS),
        state_dict=entries,
    )
    (HERE / "dfine_seg_n.json").write_text(json.dumps(meta, separators=(",", ":")) + "\n", encoding="utf-8")
    np.savez_compressed(HERE / "dfine_seg_n.npz", **stored)


if __name__ == "__main__":
    main()
