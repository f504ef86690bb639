"""Record rf_detr_keypoints.json and .npz: RF-DETR's preview of keypoints with weights made by rules, in float64.

Run:  python tests/golden/record_rf_detr_keypoints.py    (needs rfdetr 1.11.2)
"""

import json
from importlib.metadata import version

import numpy as np
import torch
from rfdetr._namespace import _namespace_from_configs
from rfdetr.config import KeypointTrainConfig, RFDETRKeypointPreviewConfig
from rfdetr.models.lwdetr import build_criterion_and_postprocessors, build_model
from rfdetr.utilities.tensors import nested_tensor_from_tensor_list
from weights import HERE, fill, grad_projection, make_input, rng_for, rule_for

NAME = "rf_detr_keypoints"
SETTINGS = dict(resolution=64, patch=16, windows=2, layers=2, queries=8, groups=3, classes=4, masks=False, keypoints=3)
PER_CLASS = [3, 0, 3, 0]
HEIGHT, WIDTH = 96, 64
INPUT = dict(seed=f"input:{NAME}", kind="image", shape=[2, 3, HEIGHT, WIDTH])
SIZES = [[50, 61], [40, 33]]
COUNTS = {"objects": (3, 2), "one_empty": (0, 3)}
NAMES = ("pred_logits", "pred_boxes", "pred_keypoints")


def make_targets(variant):
    """Return objects of all classes, each with points of every visibility in another order; some without keypoints
    belong to classes without any."""
    targets = []
    for image, count in enumerate(COUNTS[variant]):
        random = rng_for(f"targets:{NAME}:{variant}:{image}").random
        centers, sizes = 0.3 + 0.4 * random((count, 2)), 0.15 + 0.35 * random((count, 2))
        labels = np.array([[2, 0, 1], [0, 2, 2]][image][:count], np.int64)
        visibility = np.array([[2, 1, 0], [0, 2, 2], [1, 0, 0]], np.float64)[:count]
        points = centers[:, None] + (random((count, 3, 2)) - 0.5) * sizes[:, None]
        points *= (visibility > 0)[..., None]
        keypoints = np.concatenate((points, visibility[..., None]), axis=-1) * (labels != 1)[:, None, None]
        targets.append(dict(labels=labels, boxes=np.concatenate((centers, sizes), 1), keypoints=keypoints))
    return [{name: torch.from_numpy(value) for name, value in target.items()} for target in targets]


def build():
    """Return the network in float64, its criterion and its postprocessing."""
    model_config = RFDETRKeypointPreviewConfig(
        resolution=SETTINGS["resolution"],
        patch_size=SETTINGS["patch"],
        positional_encoding_size=SETTINGS["resolution"] // SETTINGS["patch"],
        num_windows=SETTINGS["windows"],
        dec_layers=SETTINGS["layers"],
        num_queries=SETTINGS["queries"],
        num_select=SETTINGS["queries"],
        group_detr=SETTINGS["groups"],
        num_classes=SETTINGS["classes"] - 1,
        num_keypoints_per_class=PER_CLASS,
        pretrain_weights=None,
        device="cpu",
    )
    train_config = KeypointTrainConfig(dataset_dir=".", output_dir="/tmp")
    args = _namespace_from_configs(model_config, train_config)
    args.pretrain_weights = "given"  # so that none are downloaded
    return build_model(args).double(), *build_criterion_and_postprocessors(args)


def rule_of(key, shape):
    """Return the rule of a weight; points are told apart by vectors of order one, and predicted away from centers."""
    if key.endswith(("initializer.queries", "initializer_enc.queries", "keypoint_pos_embed")):
        return "affine:0,1"
    if key.endswith("mask_token"):
        return "zero"
    return rule_for(key, shape)


def compact(name, value):
    """Return an output; of points, (B, Q, 12, 8), those of classes with points, without what is added to the logits."""
    if not name.endswith("pred_keypoints"):
        return value
    chosen = [label for label, count in enumerate(PER_CLASS) if count]
    return value.unflatten(2, (len(PER_CLASS), SETTINGS["keypoints"]))[:, :, chosen, :, :7]


def main() -> None:
    model, criterion, postprocess = build()
    stored, entries, state = {}, [], {}
    for key, value in model.state_dict().items():
        is_given = value.dtype == torch.bool
        rule = f"computed:{key}" if is_given else rule_of(key, value.shape)
        dtype = str(value.dtype).removeprefix("torch.").replace("float64", "float32")
        entries.append([key, list(value.shape), dtype, rule])
        if is_given:
            stored[f"buf/{key}"] = value.numpy()
        state[key] = value if is_given else torch.from_numpy(fill(key, value.shape, dtype, rule)).double()
    model.load_state_dict(state)
    images = nested_tensor_from_tensor_list(torch.from_numpy(make_input(INPUT)).double())
    outputs = {}
    model.eval()
    with torch.no_grad():
        found = model(images)
        results = postprocess(found, torch.tensor(SIZES))
    for name in NAMES:
        outputs[name], outputs[f"enc/{name}"] = found[name], found["enc_outputs"][name]
    for field in ("scores", "labels", "boxes", "keypoints"):
        # By their final scores, while the original's are in the order of the scores without the points' uncertainty.
        outputs[f"post/{field}"] = torch.stack([r[field][r["scores"].argsort(descending=True)] for r in results])
    model.train()
    targets, losses, grads = {}, {}, {}
    for variant in COUNTS:
        targets[variant] = make_targets(variant)
        found = model(images)
        layers = {"": found, "_0": found["aux_outputs"][0], "_enc": found["enc_outputs"]}
        indices = {}
        for suffix, layer in layers.items():
            pairs = criterion.matcher(layer, targets[variant], SETTINGS["groups"])
            indices[suffix] = [[side.tolist() for side in pair] for pair in pairs]
        criterion.train()
        terms = criterion(found, targets[variant])
        weights = {name: value for name, value in criterion.weight_dict.items() if name in terms}
        total = sum(weight * terms[name] for name, weight in weights.items())
        losses[variant] = dict(
            terms={name: float(value) for name, value in terms.items()},
            weights=weights,
            total=float(total),
            indices=indices,
        )
        if variant != "objects":
            continue
        for name in NAMES:
            outputs[f"train/{name}"], outputs[f"train/enc/{name}"] = found[name], found["enc_outputs"][name]
        model.zero_grad()
        total.backward()
        named = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
        grads[variant] = list(named)
        projections = [grad_projection(name, value) for name, value in named.items()]
        stored[f"grad/{variant}/norm"], stored[f"grad/{variant}/dot"] = map(np.array, zip(*projections, strict=True))
    described = {}
    for name, value in outputs.items():
        array = compact(name, value.detach()).numpy()
        array = array.astype(np.int64 if array.dtype == np.int64 else np.float32)
        stride = 3 if name.startswith("train/") and "keypoints" in name else 1
        stored[f"out/{name}"] = array.reshape(-1)[::stride] if stride > 1 else array
        stats = {"mean": float(array.mean()), "std": float(array.std()), "l2": float(np.linalg.norm(array))}
        described[name] = dict(
            shape=list(array.shape), dtype=str(array.dtype), stride=stride, level="main", atol=1e-5, stats=stats
        )
    for variant, images_targets in targets.items():
        for image, target in enumerate(images_targets):
            stored |= {f"tgt/{variant}/{image}/{field}": value.numpy() for field, value in target.items()}
    meta = dict(
        name=NAME,
        format=1,
        description="RF-DETR with keypoints of two of four classes, few queries and groups, on two rectangles.",
        official=dict(repository="roboflow/rf-detr", version=version("rfdetr")),
        settings=SETTINGS | dict(keypoint_classes=[label for label, count in enumerate(PER_CLASS) if count]),
        post=dict(target_sizes=SIZES),
        num_params=sum(p.numel() for p in model.parameters()),
        torch_version=torch.__version__,
        inputs=dict(images=INPUT),
        outputs=described,
        targets={
            variant: [{field: f"tgt/{variant}/{i}/{field}" for field in t} for i, t in enumerate(images_targets)]
            for variant, images_targets in targets.items()
        },
        losses=losses,
        grads=grads,
        state_dict=entries,
    )
    (HERE / f"{NAME}.json").write_text(json.dumps(meta, separators=(",", ":")) + "\n", encoding="utf-8")
    np.savez_compressed(HERE / f"{NAME}.npz", **stored)


if __name__ == "__main__":
    main()
