"""Record ecpose_s.json and .npz: ECPose-S with weights made by rules, in float64.

Run:  python tests/golden/record_ecpose.py    (needs libreyolo 1.6.0)

The original (EdgeCrafter at 706d037) adds positions in place, also in training, where the package does so in evaluation
only; and it shifts keypoints in another way in denoising. Variants are in the package's form ("objects") or, by the
changes below, in the original's ("published", "one_empty", "none"). All have the original's distance of coordinates to
0 and 1 in logits, 1e-3, where the package has 1e-5.
"""

import json
import math
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from libreyolo.models.ec import decoder, pose_denoising
from libreyolo.models.ec.nn import LibreECPoseModel
from libreyolo.models.ec.pose_loss import ECPoseCriterion, PoseHungarianMatcher
from weights import HERE, fill, grad_projection, make_input, rng_for, rule_for

NAME, SIDE, NUM_KEYPOINTS = "ecpose_s", 128, 17
INPUT = dict(seed=f"input:{NAME}", kind="image", shape=[2, 3, SIDE, SIDE])
SIZES = [[50, 61], [40, 33]]
COUNTS = {"objects": (3, 2), "published": (2, 3), "one_empty": (0, 3), "none": (0, 0)}
FIELDS = ("pred_logits", "pred_keypoints")
RULES = {
    "embedding.weight": "affine:0,1",
    "tgt_embed.weight": "affine:0,1",
    "_enc.weight": "affine:0,1",
    "register_token": "affine:0,0.5",
    "enc_pose_embed.layers.3.weight": "linear:4",
    "pre_pose_embed.layers.2.weight": "linear:3",
    "enc_out_class_embed.weight": "linear:3",
}


def make_targets(variant):
    """Return persons with points of every visibility, in pixels."""
    targets = []
    for image, count in enumerate(COUNTS[variant]):
        rng = rng_for(f"targets:{NAME}:{variant}:{image}")
        centers, sizes = 0.3 + 0.4 * rng.random((count, 2)), 0.15 + 0.35 * rng.random((count, 2))
        points = (centers[:, None] + (rng.random((count, NUM_KEYPOINTS, 2)) - 0.5) * sizes[:, None]) * SIDE
        visibility = rng.integers(0, 3, (count, NUM_KEYPOINTS, 1))
        visibility[:, 0] = 2
        targets.append(
            dict(
                labels=np.ones(count, np.int64),
                boxes=np.concatenate((centers, sizes), 1).astype(np.float32),
                keypoints=np.concatenate((points * (visibility > 0), visibility), axis=-1).astype(np.float32),
                areas=(sizes.prod(1) * (0.4 + 0.4 * rng.random(count)) * SIDE**2).astype(np.float32),
            )
        )
    return targets


def their_targets(targets, published):
    """Return targets as the package takes them; the original reads the same boxes, cxcywh, as if they were corners."""
    converted = []
    for target in targets:
        target = {name: torch.from_numpy(value) for name, value in target.items()}
        points, boxes = target["keypoints"].double(), target["boxes"].double()
        corners = torch.cat((boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2), dim=1)
        flat = torch.cat(((points[..., :2] / SIDE).flatten(1), points[..., 2].clamp(max=1)), dim=1)
        converted.append(
            dict(
                labels=target["labels"],
                boxes=boxes if published else corners,
                keypoints=flat,
                area=target["areas"].double() / SIDE**2,
            )
        )
    return converted


def noise_of(variant, count):
    """Return the random numbers for `count` copied targets: chances, labels, directions and shares."""
    rng = rng_for(f"draws:{NAME}:{variant}")
    shape = count, 1 + NUM_KEYPOINTS
    return rng.random(count), rng.integers(0, 80, count), rng.random((*shape, 2)), rng.random((*shape, 1))


@contextmanager
def given_noise(variant, targets, published):
    """Replace the random numbers of denoising by those of `noise_of`, and its directions by the original's."""
    counts = [len(target["labels"]) for target in targets]
    num_copies = 2 * max(20 // max(*counts, 1), 1)
    draws = [torch.from_numpy(x) for x in noise_of(variant, sum(counts) * num_copies)]
    chances, labels, directions, shares = draws
    is_negative = torch.tensor([False, True]).repeat(num_copies // 2).repeat_interleave(sum(counts))

    def uniform(self, low, high):
        chosen = shares[is_negative] if low > 0 else shares
        return self.copy_(low + (high - low) * chosen)

    def normalize(x, dim):
        return F_normalize(x, p=-1.0, dim=1) if published else F_normalize(x, dim=dim)

    F_normalize = F.normalize
    with (
        mock.patch.object(torch, "rand_like", lambda like: chances if like.ndim == 1 else directions),
        mock.patch.object(torch, "randint_like", lambda like, low, high: labels[like]),
        mock.patch.object(torch.Tensor, "uniform_", uniform),
        mock.patch.object(pose_denoising.F, "normalize", normalize),
    ):
        yield


def keep_positions(model):
    """Make positions stay in their tokens in training, as in the original; return the hooks."""
    positions, handles = {}, []
    for i, layer in enumerate(model.decoder.decoder.layers):
        layer.eval()  # its form in evaluation; nothing else depends on the mode

        def store(_, args, kwargs, i=i):
            positions[i] = kwargs["tgt_pose_query_pos"].detach()

        handles.append(layer.register_forward_pre_hook(store, with_kwargs=True))
        if i:
            # The sum of a layer's states and the previous ones, which share memory with what positions are added to.
            pose_embed = model.decoder.pose_embed[i]
            handles.append(pose_embed.register_forward_pre_hook(lambda _, args, i=i: (args[0] + positions[i],)))
    return handles


def build():
    """Return the network in float64 with its weights by rules, and their entries."""
    model = LibreECPoseModel("s", eval_spatial_size=None).double()
    entries, state = [], {}
    for key, value in model.state_dict().items():
        dtype = str(value.dtype).removeprefix("torch.").replace("float64", "float32")
        if key.endswith((".up", "reg_scale", "dim_t", "periods")):
            state[key] = value
            continue
        rule = next((rule for end, rule in RULES.items() if key.endswith(end)), rule_for(key, value.shape))
        entries.append([key, list(value.shape), dtype, rule])
        state[key] = torch.from_numpy(fill(key, value.shape, dtype, rule))
    model.load_state_dict(state)
    return model, entries


def postprocess(outputs):
    """Return scores, labels and keypoints (2, 60, 17, 2) of the best pairs of a query and a class."""
    logits, points = (outputs[name] for name in FIELDS)
    scores, best = logits.sigmoid().flatten(1).topk(60)
    sizes = torch.tensor(SIZES).flip(1).double()[:, None, None]
    chosen = (best // 2)[..., None].expand(-1, -1, 2 * NUM_KEYPOINTS)
    points = points.gather(1, chosen).unflatten(-1, (-1, 2)) * sizes
    return dict(scores=scores, labels=best % 2, keypoints=points)


def layers_of(outputs):
    """Return the outputs of each layer by name."""
    aux = {f"aux{i}": layer for i, layer in enumerate(outputs["aux_outputs"])}
    layers = {"last": outputs, **aux, "pre": outputs["aux_pre_outputs"], "enc": outputs["aux_interm_outputs"][0]}
    for i, layer in enumerate(outputs.get("dn_aux_outputs", [])):
        layers[f"dn{i}"] = layer
    if "dn_aux_pre_outputs" in outputs:
        layers["dn_pre"] = outputs["dn_aux_pre_outputs"]
    return layers


def main() -> None:
    torch.set_default_dtype(torch.float64)
    for module in (decoder, pose_denoising):
        module.inverse_sigmoid = partial(module.inverse_sigmoid, eps=1e-3)
    model, entries = build()
    images = torch.from_numpy(make_input(INPUT)).double()
    outputs, stored, losses, grads = {}, {}, {}, {}
    model.eval()
    with torch.no_grad():
        found = model(images)
    outputs |= {name: found[name] for name in FIELDS}
    outputs |= {f"post/{name}": value for name, value in postprocess(found).items()}

    matcher = PoseHungarianMatcher()
    criterion = ECPoseCriterion(matcher)
    references = {}
    model.decoder.decoder.register_forward_pre_hook(
        lambda _, args, kwargs: references.update(x=kwargs["refpoints_sigmoid"]), with_kwargs=True
    )
    for variant in COUNTS:
        published, targets = variant != "objects", make_targets(variant)
        theirs = their_targets(targets, published)
        model.train()
        handles = keep_positions(model) if published else []
        with given_noise(variant, targets, published):
            found = model(images, theirs)
        for handle in handles:
            handle.remove()
        terms, layers = criterion(found, theirs), layers_of(found)
        pairs = {name: matcher(layer, theirs) for name, layer in layers.items() if not name.startswith("dn")}
        others = [pair for name, pair in pairs.items() if name != "last"]
        pairs["union"] = [] if variant == "none" else criterion._get_go_indices(pairs["last"], others)
        indices = {name: [[side.tolist() for side in pair] for pair in images] for name, images in pairs.items()}
        total = sum(terms.values())
        losses[variant] = dict(
            terms={name: value.item() for name, value in terms.items()}, total=total.item(), indices=indices
        )
        model.zero_grad()
        total.backward()
        named = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
        grads[variant] = list(named)
        projections = [grad_projection(name, value) for name, value in named.items()]
        stored[f"grad/{variant}/norm"], stored[f"grad/{variant}/dot"] = map(np.array, zip(*projections, strict=True))
        if variant != "none":
            num_noised = references["x"].shape[1] - 60
            outputs[f"{variant}/noised"] = references["x"][:, :num_noised]
            for name, layer in layers.items():
                outputs |= {f"{variant}/{name}/{field}": layer[field] for field in FIELDS}
        for image, target in enumerate(targets):
            stored |= {f"tgt/{variant}/{image}/{field}": value for field, value in target.items()}

    described = {}
    for name, value in outputs.items():
        array = value.detach().numpy()
        array = array.astype(np.int64 if array.dtype == np.int64 else np.float32)
        stride = 7 if "/" in name and name.endswith(("keypoints", "noised")) else 1
        stored[f"out/{name}"] = array.reshape(-1)[::stride] if stride > 1 else array
        stats = {"mean": float(array.mean()), "std": float(array.std()), "l2": float(np.linalg.norm(array))}
        described[name] = dict(
            shape=list(array.shape), dtype=str(array.dtype), stride=stride, level="main", atol=1e-5, stats=stats
        )
    meta = dict(
        name=NAME,
        format=1,
        description="ECPose-S, positions kept and not, both kinds of noise, on two squares.",
        official=dict(repository="LibreYOLO/libreyolo", version=version("libreyolo")),
        settings=dict(side=SIDE, keypoints=NUM_KEYPOINTS),
        post=dict(target_sizes=SIZES),
        num_params=sum(p.numel() for p in model.parameters()),
        torch_version=torch.__version__,
        inputs=dict(images=INPUT),
        outputs=described,
        targets={
            variant: [
                {field: f"tgt/{variant}/{i}/{field}" for field in ("labels", "boxes", "keypoints", "areas")}
                for i in range(2)
            ]
            for variant in COUNTS
        },
        losses=losses,
        grads=grads,
        state_dict=entries,
    )
    assert math.isfinite(sum(loss["total"] for loss in losses.values()))
    (HERE / f"{NAME}.json").write_text(json.dumps(meta, separators=(",", ":")) + "\n", encoding="utf-8")
    np.savez_compressed(HERE / f"{NAME}.npz", **stored)


if __name__ == "__main__":
    main()
