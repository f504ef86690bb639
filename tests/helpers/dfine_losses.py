"""The inputs of the golden case dfine_criterion, and the names of the losses in the original."""

import torch
from golden.weights import Case

from vitkit.ops.box_distances import distance_bins

TERMS = {"labels": "loss_{}", "l1": "loss_bbox", "giou": "loss_giou", "fgl": "loss_fgl", "ddf": "loss_ddf"}
PREFIXES = {
    "": "",
    **{"aux0_": "_pre", "aux1_": "_aux_0", "aux2_": "_aux_1", "aux3_": "_aux_2"},
    "enc_": "_enc_0",
    **{"dn_": "_dn_3", "dn_aux0_": "_dn_pre", "dn_aux1_": "_dn_0", "dn_aux2_": "_dn_1", "dn_aux3_": "_dn_2"},
}
"""Prefix of our keys -> suffix of the original's, for 4 decoder layers."""
LAYER_FIELDS = ("pred_logits", "pred_boxes", "pred_corners")


def golden_outputs(case: Case, targets: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """Return the outputs of the golden case, and its inputs with gradients by their name."""
    leaves = {name: value.requires_grad_() for name, value in case.torch_inputs().items()}
    for queries in ("main", f"dn.{targets}"):
        # The plain prediction of the first layer is what the later layers refine.
        initial = leaves.pop(f"{queries}.initial_boxes").detach()
        leaves[f"{queries}.pre.pred_boxes"] = initial.clone().requires_grad_()

    def layers(queries: str) -> dict:
        plain, *refined = [
            {field: leaves[f"{queries}.{layer}.{field}"] for field in fields}
            for layer, fields in [("pre", LAYER_FIELDS[:2])] + [(f"layer{i}", LAYER_FIELDS) for i in range(4)]
        ]
        initial_boxes = plain["pred_boxes"].detach()
        return {**refined[-1], "initial_boxes": initial_boxes, "aux_outputs": [plain, *refined[:-1]]}

    denoising = case.meta["denoising"][targets]
    matches = [
        (torch.tensor(rows, dtype=torch.int64), torch.tensor(indices, dtype=torch.int64))
        for rows, indices in zip(denoising["positive_rows"], denoising["targets"], strict=True)
    ]
    settings = case.meta["settings"]
    reg_max, reg_scale, up = (settings[name] for name in ("reg_max", "reg_scale", "up"))
    encoder = {field: leaves[f"enc.{field}"] for field in LAYER_FIELDS[:2]}
    outputs = {
        **layers("main"),
        "distance_bins": distance_bins(reg_max, reg_scale, up),
        "reg_scale": reg_scale,
        "training_outputs": [
            dict(encoder, name="enc"),
            dict(layers(f"dn.{targets}"), name="dn", matches=matches, repeats=denoising["groups"]),
        ],
    }
    return outputs, leaves


def golden_targets(case: Case, targets: str) -> list[dict]:
    names = {"labels": "labels", "boxes": "boxes_cxcywh", "masks": "masks"}
    return [
        {names[name]: torch.from_numpy(value) for name, value in target.items()} for target in case.targets[targets]
    ]
