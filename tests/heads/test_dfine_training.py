"""D-FINE's head with its whole loss: on the maps of two images it learns their objects."""

import torch

from vitkit.heads.dfine import DFINEHead
from vitkit.nn.queries import run_with_training_queries
from vitkit.ops.boxes import box_iou, cxcywh_to_xyxy
from vitkit.registry import CRITERIA
from vitkit.structures import FeatureInfo
from vitkit.training_queries.build import build_training_queries

NUM_CLASSES = 3
BOXES = [[[0.3, 0.4, 0.3, 0.4], [0.7, 0.6, 0.4, 0.3]], [[0.5, 0.5, 0.6, 0.5]]]
LABELS = [[0, 2], [1]]


def test_overfits_two_images_with_denoising():
    torch.manual_seed(0)
    info = {"res4": FeatureInfo(32, 16), "res5": FeatureInfo(32, 32)}
    layers = dict(d_model=32, num_heads=2, num_points=[3, 2], d_ffn=48, num_decoder_layers=2, reg_max=16)
    head = DFINEHead(info, NUM_CLASSES, num_queries=10, **layers)
    training_queries = build_training_queries([dict(type="BoxDenoising", num_queries=6)], head, NUM_CLASSES)
    criterion = CRITERIA.build(
        dict(
            type="DFINECriterion",
            weights=dict(labels=1.0, l1=5.0, giou=2.0, fgl=0.15, ddf=1.5),
            matcher=dict(type="HungarianMatcher", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0, activation="sigmoid"),
        )
    )
    maps = {"res4": torch.randn(2, 32, 8, 8), "res5": torch.randn(2, 32, 4, 4)}
    targets = [
        dict(labels=torch.tensor(labels), boxes_cxcywh=torch.tensor(boxes)) for labels, boxes in zip(LABELS, BOXES)
    ]
    parameters = [*head.parameters(), *training_queries.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=4e-3)
    for _ in range(80):
        outputs = run_with_training_queries(head, training_queries.values(), maps, None, targets)
        losses = criterion(outputs, targets)
        optimizer.zero_grad()
        sum(losses.values()).backward()
        assert all(parameter.grad is not None for parameter in parameters)
        optimizer.step()
    assert {"fgl", "aux1_ddf", "enc_l1", "dn_fgl", "dn_aux1_ddf"} <= losses.keys()

    with torch.no_grad():
        outputs = head.eval()(maps)
    for target, logits, boxes in zip(targets, outputs["pred_logits"], outputs["pred_boxes"]):
        scores = logits.sigmoid().amax(-1)
        best = scores.topk(len(target["labels"])).indices
        ious = box_iou(cxcywh_to_xyxy(target["boxes_cxcywh"])[:, None], cxcywh_to_xyxy(boxes[best]))
        overlap, row = ious.max(dim=1)
        assert scores[best].min() > 0.5 and overlap.min() > 0.8
        assert logits[best[row]].argmax(-1).tolist() == target["labels"].tolist()
