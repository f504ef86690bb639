"""Boxes, masks, losses, matching and text against the numbers in other projects' tests.

The inputs and expected numbers are theirs, as named at each; the code is not.
"""

import itertools

import numpy as np
import pytest
import torch
from peers.coco_cases import Case
from pycocotools import mask as coco_mask

from vitkit.evaluation.coco import CocoEvaluator, masks_to_rle
from vitkit.evaluation.text import TextEvaluator
from vitkit.io.segmentations import encode_segmentation
from vitkit.losses.class_losses import focal_loss
from vitkit.losses.matched import MatchedLayers
from vitkit.matchers.hungarian import HungarianMatcher
from vitkit.matchers.hungarian_masks import HungarianMaskMatcher
from vitkit.ops.boxes import box_iou, cxcywh_to_xyxy, generalized_box_iou, xyxy_to_cxcywh
from vitkit.ops.masks import boxes_around_masks

pytestmark = pytest.mark.peers


def test_pairwise_iou_of_detectron2():
    """detectron2 (Apache-2.0, commit 0263797), tests/structures/test_boxes.py: TestBoxIOU."""
    whole = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
    others = torch.tensor(
        [
            *([0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.5, 1.0], [0.0, 0.0, 1.0, 0.5]),
            *([0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 1.0, 1.0], [0.5, 0.5, 1.5, 1.5]),
        ]
    )
    expected = torch.tensor([1.0, 0.5, 0.5, 0.25, 0.25, 0.25 / (2 - 0.25)]).expand(2, 6)
    torch.testing.assert_close(box_iou(whole[:, None], others), expected)


def test_box_formats_of_detectron2():
    """The same file: boxes of angle 0, by center and size, and their corners."""
    centered = torch.tensor([[50.0, 50, 30, 20], [1, 1, 2, 2], [65, 60, 30, 20]])
    corners = torch.tensor([[35.0, 40, 65, 60], [0, 0, 2, 2], [50, 50, 80, 70]])
    assert torch.equal(cxcywh_to_xyxy(centered), corners)
    assert torch.equal(xyxy_to_cxcywh(corners), centered)


def test_boxes_around_masks_of_detectron2():
    """detectron2 (012c898), tests/structures/test_masks.py: TestBitMask, from masks to boxes and back by polygons."""
    rows = [["...#", "..##", ".##.", ".##."], ["....", "..#.", ".##.", ".##."], ["...."] * 4]
    masks = torch.tensor([[[pixel == "#" for pixel in row] for row in mask] for mask in rows])
    expected = torch.tensor([[1.0, 0, 4, 4], [1, 1, 3, 4], [0, 0, 0, 0]])
    assert torch.equal(boxes_around_masks(masks), expected)
    for box in expected[:2]:
        polygon = box[[0, 1, 2, 1, 2, 3, 0, 3]].tolist()
        mask = torch.from_numpy(coco_mask.decode(encode_segmentation([polygon], 4, 4))).bool()
        assert torch.equal(boxes_around_masks(mask[None])[0], box)


@pytest.mark.parametrize(("shape", "area"), [("square", 1.0), ("triangle", 0.5)])
def test_areas_of_polygons_of_detectron2(shape, area):
    """detectron2 (1d650ef), tests/layers/test_mask_ops.py: d^2 and d^2 / 2.

    Pixels are counted here, so along a triangle's diagonal one row more or less may be covered.
    """
    for d in (5, 10, 1000):
        polygon = [0, 0, 0, d, d, d, *((d, 0) if shape == "square" else ())]
        got = int(coco_mask.area(encode_segmentation([polygon], d, d)))
        assert abs(got - area * d**2) <= (0 if shape == "square" else d)


def test_giou_of_fvcore():
    """fvcore (Apache-2.0, commit 242366f), tests/test_giou_loss.py: losses of pairs, 1 - GIoU."""
    whole, quarter, beside, diagonal = torch.tensor([[-1.0, -1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 2], [1, 1, 2, 2]])
    pairs = [(whole, whole, 0.0), (whole, quarter, 0.75), (quarter, beside, 1.0), (quarter, diagonal, 1.5)]
    for a, b, loss in pairs:
        assert float(1 - generalized_box_iou(a, b)) == pytest.approx(loss, abs=1e-6)
    assert generalized_box_iou(torch.zeros(0, 4), torch.zeros(0, 4)).shape == (0,)


BOXES = torch.tensor(
    [[296.55, 93.96, 314.97, 152.79], [328.94, 97.05, 342.49, 122.98], [356.62, 95.47, 372.33, 147.55]]
)
TRUE_BOXES = torch.tensor([[300.0, 100, 315, 150], [330, 100, 350, 125], [350, 100, 375, 150]])


def test_iou_and_giou_of_torchmetrics():
    """torchmetrics (Apache-2.0, commit 1c14524), base_iou_test.py, test_iou.py and test_giou.py."""
    iou = torch.diag(torch.tensor([0.6898, 0.5086, 0.5654]))
    giou = torch.tensor([[0.6895, -0.4964, -0.4944], [-0.5105, 0.4673, -0.3434], [-0.6024, -0.4021, 0.5345]])
    torch.testing.assert_close(box_iou(BOXES[:, None], TRUE_BOXES), iou, atol=5e-5, rtol=0)
    torch.testing.assert_close(generalized_box_iou(BOXES[:, None], TRUE_BOXES), giou, atol=5e-5, rtol=0)


def test_iou_and_giou_beside_torchmetrics_on_random_and_degenerate_boxes():
    functional = pytest.importorskip("torchmetrics.functional.detection")
    generator = torch.Generator().manual_seed(0)
    corners = torch.randint(0, 12, (200, 2, 2), generator=generator).sort(1).values.flatten(1).float()
    a, b = corners[:100], corners[100:]  # of small integers: many touch, are equal, or have no area
    iou = functional.intersection_over_union(a, b, aggregate=False)
    giou = functional.generalized_intersection_over_union(a, b, aggregate=False)
    # torchvision, which computes these, divides 0 by 0 for two boxes without area.
    has_area = (area(a)[:, None] > 0) | (area(b) > 0)
    assert not has_area.all() and iou[~has_area].isnan().all() and giou[~has_area].isnan().all()
    hull = area(torch.cat([torch.minimum(a[:, None], b)[..., :2], torch.maximum(a[:, None], b)[..., 2:]], -1))
    got_iou, got_giou = box_iou(a[:, None], b), generalized_box_iou(a[:, None], b)
    torch.testing.assert_close(got_iou, iou.where(has_area, 0.0))
    torch.testing.assert_close(got_giou, giou.where(has_area, -(hull > 0).float()), atol=1e-6, rtol=0)


def area(boxes):
    return (boxes[..., 2:] - boxes[..., :2]).prod(-1)


def logit(*probabilities):
    p = torch.tensor(probabilities, dtype=torch.float64)
    return (p / (1 - p)).log()


@pytest.mark.parametrize("gamma", [0, 2])
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_focal_loss_of_fvcore(alpha, gamma):
    """fvcore (1256a64), tests/test_focal_loss.py: alpha 1 ignores negatives, alpha 0 positives.

    Examples of probability p cost cross entropy times alpha (1 - p)^gamma if positive, (1 - alpha) p^gamma if not.
    """
    p = [[0.05, 0.9], [0.52, 0.45], [0.89, 0.8], [0.39, 0.5]]
    positive = [(0, 0), (1, 0), (2, 1), (3, 1)]  # theirs has two positives in the third row; a query has one label
    logits = torch.stack([logit(*row) for row in p])[None, None]
    queries, labels = (torch.tensor([list(column)]) for column in zip(*positive))
    indices = torch.zeros_like(queries), torch.zeros_like(queries), queries
    matched = MatchedLayers(logits, indices, labels, labels, torch.ones(()), torch.ones(()), None)
    got = focal_loss(matched, alpha=alpha, gamma=gamma)
    costs = []
    for row, column in itertools.product(range(4), range(2)):
        probability = p[row][column]
        if (row, column) in positive:
            costs.append(alpha * (1 - probability) ** gamma * -np.log(probability))
        else:
            costs.append((1 - alpha) * probability**gamma * -np.log(1 - probability))
    assert got.tolist() == pytest.approx([sum(costs)], abs=1e-12)


@pytest.mark.parametrize("num_targets", [0, 2])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("costs", [(1, 5, 2), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_assignments_of_mmdetection(num_targets, activation, costs):
    """mmdetection (Apache-2.0, commit 19bceba), test_hungarian_assigner.py.

    Each of the two objects gets one of ten random queries; without objects, none is assigned.
    """
    boxes, labels = torch.tensor([[0.0, 0, 5, 7], [3, 5, 7, 8]]), torch.tensor([1, 20])
    generator = torch.Generator().manual_seed(0)
    outputs = dict(
        pred_logits=torch.rand(1, 10, 81, generator=generator), pred_boxes=torch.rand(1, 10, 4, generator=generator)
    )
    relative = xyxy_to_cxcywh(boxes / torch.tensor([8.0, 10, 8, 10]))
    targets = [dict(labels=labels[:num_targets], boxes_cxcywh=relative[:num_targets])]
    matcher = HungarianMatcher(*costs, activation=activation)
    (((queries, objects),),) = matcher([([outputs], targets)])[0]
    assert sorted(objects.tolist()) == list(range(num_targets)) and len(set(queries.tolist())) == num_targets


@pytest.mark.parametrize("costs", [(0, 0, 1), (0, 1, 0)])
@pytest.mark.parametrize("mask_cost", ["points", "focal"])
def test_assignments_of_masks_of_mmdetection(costs, mask_cost):
    """The same file: four random masks, two of which are assigned by dice, cross entropy or focal loss."""
    generator = torch.Generator().manual_seed(0)
    masks = torch.randint(0, 2, (2, 10, 10), generator=generator).bool()
    outputs = dict(
        pred_logits=torch.rand(1, 4, 26, generator=generator), pred_masks=torch.rand(1, 4, 10, 10, generator=generator)
    )
    matcher = HungarianMaskMatcher(*costs, mask_cost=mask_cost)
    targets = [dict(labels=torch.tensor([1, 20]), masks=masks)]
    (((queries, objects),),) = matcher([([outputs], targets)], input_size=(10, 10))[0]
    assert sorted(objects.tolist()) == [0, 1] and len(set(queries.tolist())) == 2


def test_coco_metrics_of_mmdetection():
    """mmdetection (16bb3f6), test_coco_metric.py: right boxes and masks score 1 at every size.

    A category and the image have id 0. Theirs has masks of 10 by 10 pixels in an image of 640 by 640; here, a mask has
    the size of its image.
    """
    boxes = torch.tensor([[50.0, 60, 70, 80], [100, 120, 130, 150], [150, 160, 190, 200], [250, 260, 350, 360]])
    labels, areas = torch.tensor([0, 0, 1, 0]), [400, 900, 1600, 10000]
    masks = torch.zeros(4, 640, 640, dtype=torch.bool)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes.int().tolist()):
        mask[y0:y1, x0:x1] = True
    annotations = [
        dict(
            id=i + 1,
            image_id=0,
            category_id=int(labels[i]),
            area=areas[i],
            iscrowd=0,
            bbox=[*boxes[i, :2].tolist(), *(boxes[i, 2:] - boxes[i, :2]).tolist()],
            segmentation=masks_to_rle(masks[i][None])[0],
        )
        for i in range(4)
    ]
    truth = dict(
        images=[dict(id=0, width=640, height=640, file_name="fake_name.jpg")],
        categories=[dict(id=0, name="car"), dict(id=1, name="bicycle")],
        annotations=annotations,
    )
    evaluator = CocoEvaluator(Case(truth, {}).dataset, iou_types=["bbox", "segm"])
    found = dict(boxes_xyxy=boxes, scores=torch.tensor([1.0, 0.98, 0.96, 0.95]), labels=labels, masks=masks)
    evaluator.update([found], [dict(image_id=0)])
    evaluator.gather()
    metrics = evaluator.compute()
    names = ("AP", "AP50", "AP75", "APs", "APm", "APl")
    assert [metrics[f"{kind}/{name}"] for kind in ("bbox", "segm") for name in names] == pytest.approx([1.0] * 12)
    assert evaluator.per_class() == pytest.approx({"car": 1.0, "bicycle": 1.0})


def scored(texts, references, **options):
    evaluator = TextEvaluator(range(len(texts)), **options)
    targets = [dict(index=i, source_text="", references=list(r)) for i, r in enumerate(references)]
    evaluator.update([dict(text=text) for text in texts], targets)
    evaluator.gather()
    return evaluator.compute()


DOG = [
    ("The dog bit the man.", "The dog had bit the man."),
    ("It was not unexpected.", "No one was surprised."),
    ("The man bit him first.", "The man had bitten the dog."),
]
BITES = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]


@pytest.mark.parametrize(("tokenize", "bleu"), [("13a", 48.530827), ("none", 49.1919566), ("intl", 43.91623493)])
def test_bleu_of_sacrebleu(tokenize, bleu):
    """sacrebleu 2.6 (Apache-2.0), test/test_bleu.py."""
    assert scored(BITES, DOG, tokenize=tokenize)["bleu"] == pytest.approx(bleu, abs=1e-6)
    assert scored(["", "", ""], DOG, tokenize=tokenize)["bleu"] == 0


@pytest.mark.parametrize(
    ("text", "reference", "chrf"),
    [
        ("Niemand hat die Absicht, eine Mauer zu errichten", "Niemand hat die Absicht, eine Mauer zu errichten", 100.0),
        ("a b c", "abc", 100.0),
        ("a", "b", 0.0),
    ],
)
def test_chrf_of_sacrebleu(text, reference, chrf):
    """sacrebleu 2.6, test/test_chrf.py: cases that do not depend on beta, 3 there and 2 here, as in WMT."""
    assert scored([text], [[reference]])["chrf"] == pytest.approx(chrf, abs=1e-4)
