import numpy as np
import pytest
import torch
from helpers.plain_dataset import PlainDataset
from torchvision.ops import sigmoid_focal_loss

from vitkit.engine.build import build_criterion
from vitkit.errors import ConfigError
from vitkit.losses.federated import sample_classes
from vitkit.losses.set_criterion import SetCriterion

COUNTS = [1, 0, 100, 25, 9, 400, 4, 16]
COSTS = dict(type="HungarianMatcher", cost_labels=1.0, cost_l1=5.0, cost_giou=2.0)
TERMS = dict(labels=1.0, l1=5.0, giou=2.0)
SIGMOID = dict(matcher={**COSTS, "activation": "sigmoid"}, weights=TERMS)


def detectron2_classes(labels, num_classes, counts):
    """The classes that detectron2's get_fed_loss_classes returns, with weights by its get_fed_loss_cls_weights."""
    present = torch.unique(labels)
    if len(present) >= num_classes:
        return present
    probabilities = torch.tensor(counts).float() ** 0.5
    probabilities[present] = 0
    return torch.cat([present, torch.multinomial(probabilities, num_classes - len(present), replacement=False)])


@pytest.mark.parametrize("labels", [[2, 5, 2], [], [1], [0, 1, 2, 3, 4, 6, 7]])
def test_sampled_classes_are_those_of_detectron2(labels):
    labels = torch.tensor(labels, dtype=torch.int64)
    for seed in range(20):
        torch.manual_seed(seed)
        expected = detectron2_classes(labels, 5, COUNTS)
        torch.manual_seed(seed)
        chosen = sample_classes(labels, torch.tensor(COUNTS).float().sqrt(), 5)
        assert chosen.nonzero()[:, 0].tolist() == sorted(expected.tolist())


def test_classes_without_images_are_never_drawn():
    assert sample_classes(torch.tensor([2]), torch.tensor([0.0, 1.0, 1.0]), 3).tolist() == [False, True, True]


def criterion_of(**options):
    return SetCriterion(**SIGMOID, **{"class_loss": "focal", **options})


def wide_case():
    torch.manual_seed(0)
    layers = [
        dict(pred_logits=torch.randn(2, 6, len(COUNTS), requires_grad=True), pred_boxes=torch.rand(2, 6, 4))
        for _ in range(3)
    ]
    encoder = dict(layers[2], name="enc", class_agnostic=True)
    outputs = dict(layers[0], aux_outputs=[layers[1]], training_outputs=[encoder])
    targets = [dict(labels=torch.tensor(labels), boxes_cxcywh=torch.rand(len(labels), 4)) for labels in ([1, 0], [2])]
    return outputs, targets


def test_class_loss_is_the_focal_loss_of_the_sampled_classes_only():
    outputs, targets = wide_case()
    del outputs["training_outputs"]
    torch.manual_seed(3)
    losses = criterion_of(federated_classes=5, image_counts=COUNTS)(outputs, targets)
    torch.manual_seed(3)
    chosen = detectron2_classes(torch.tensor([1, 0, 2]), 5, COUNTS)
    ((matches,),) = criterion_of().matcher([([outputs], targets)])
    truth = torch.zeros(2, 6, len(COUNTS))
    for image, (query, index) in enumerate(matches):
        truth[image, query, targets[image]["labels"][index]] = 1
    weight = torch.zeros(len(COUNTS)).index_fill(0, chosen, 1)
    expected = (sigmoid_focal_loss(outputs["pred_logits"], truth, alpha=0.25, gamma=2.0) * weight).sum() / 3
    torch.testing.assert_close(losses["labels"], expected)
    losses["labels"].backward()
    assert (outputs["pred_logits"].grad.abs().amax((0, 1)) > 0).tolist() == weight.bool().tolist()


@pytest.mark.parametrize("class_loss", ["focal", "varifocal", "mal", "iou_aware"])
def test_all_classes_count_if_as_many_are_sampled_and_in_evaluation(class_loss):
    outputs, targets = wide_case()
    plain = criterion_of(class_loss=class_loss)(outputs, targets)
    torch.testing.assert_close(criterion_of(class_loss=class_loss, federated_classes=8)(outputs, targets), plain)
    few = criterion_of(class_loss=class_loss, federated_classes=2)
    federated = few(outputs, targets)
    assert federated["labels"] < plain["labels"] and federated["aux0_labels"] < plain["aux0_labels"]
    for name in ("l1", "giou", "enc_labels"):  # the first stage only knows objects
        torch.testing.assert_close(federated[name], plain[name])
    torch.testing.assert_close(
        few.eval()(outputs, targets), criterion_of(class_loss=class_loss).eval()(outputs, targets)
    )


def test_images_are_counted_in_the_training_data():
    images, labels = np.array([0, 0, 1, 2, 3]), np.array([0, 1, 1, 1, 2])
    dataset = PlainDataset(
        classes=["a", "b", "c"], image_classes=lambda: (images, labels), training_indices=lambda: [0, 1, 2]
    )
    spec = dict(type="SetCriterion", **SIGMOID, class_loss="focal", federated_classes=2)
    criterion = build_criterion(spec, dataset.classes, dataset)
    torch.testing.assert_close(criterion.class_frequencies, torch.tensor([1.0, 3.0, 0.0]).sqrt())
    assert build_criterion({**spec, "image_counts": [4, 4, 4]}, None, dataset).class_frequencies.tolist() == [2.0] * 3
    assert not criterion.state_dict()
    with pytest.raises(ConfigError, match=r"federated_classes: PlainDataset does not list the classes in its images"):
        build_criterion(spec, None, PlainDataset(image_classes=lambda: None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(federated_classes=0), "federated_classes=0: expected a number from 1"),
        (dict(federated_classes=5, image_counts=[1, -1]), "image_counts=.*expected numbers of images, at least 0"),
    ],
)
def test_wrong_arguments_are_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        criterion_of(**options)


def test_softmax_has_no_federated_loss():
    with pytest.raises(ConfigError, match="a sigmoid loss of every class; class_loss is 'cross_entropy'"):
        SetCriterion(COSTS, TERMS, no_object_weight=0.1, federated_classes=50)


def test_counts_for_other_classes_are_an_error():
    with pytest.raises(ConfigError, match="got 3 numbers of images; the model has 8 classes"):
        criterion_of(federated_classes=2, image_counts=[1, 2, 3])(*wide_case())
