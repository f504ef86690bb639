import pytest
import torch
from torch import nn

from vitkit.errors import ConfigError
from vitkit.losses.feature_distillation import FeatureDistillationLoss


def outputs_of(generator, *, num_maps=1, size=(3, 2)):
    def random(*shape):
        return torch.randn(2, 5, *shape, generator=generator)

    return dict(
        pred_maps={f"res{i}": random(*size).requires_grad_() for i in range(num_maps)},
        pred_features=random().requires_grad_(),
        teacher_map=random(*size),
        teacher_features=random(),
    )


@pytest.mark.parametrize("num_maps", [1, 2])
def test_losses_and_gradients_are_those_of_the_formula(num_maps):
    outputs = outputs_of(torch.Generator().manual_seed(0), num_maps=num_maps)
    criterion = FeatureDistillationLoss(location_weight=0.9, image_weight=0.5)
    losses = criterion(outputs, [{}] * 2)
    predicted = [*outputs["pred_maps"].values(), outputs["pred_features"]]
    gradients = torch.autograd.grad(sum(losses.values()), predicted)

    def distance(prediction, target):  # by the lengths and angles of vectors, one location at a time
        terms = []
        for p, t in zip(prediction.flatten(2).transpose(1, 2).flatten(0, 1), target.flatten(2).mT.flatten(0, 1)):
            terms.append(1 - (p * t).sum() / (p.square().sum().sqrt() * t.square().sum().sqrt()))
        return sum(terms) / len(terms)

    location = sum(distance(x, outputs["teacher_map"]) for x in predicted[:-1]) / num_maps
    image = distance(predicted[-1][..., None], outputs["teacher_features"][..., None])
    torch.testing.assert_close(losses["location"], 0.9 * location)
    torch.testing.assert_close(losses["image"], 0.5 * image)
    for got, expected in zip(gradients, torch.autograd.grad(0.9 * location + 0.5 * image, predicted)):
        torch.testing.assert_close(got, expected)
    assert criterion.meters["location_cosine"].compute() == (pytest.approx(1 - location.item()), 2)
    assert criterion.meters["image_cosine"].compute() == (pytest.approx(1 - image.item()), 2)


def test_the_loss_is_0_for_equal_directions_whatever_their_scale_and_finite_for_zeros():
    outputs = outputs_of(torch.Generator().manual_seed(0))
    outputs["pred_maps"] = {"res5": 3 * outputs["teacher_map"]}
    outputs["pred_features"] = nn.Parameter(torch.zeros(2, 5))
    losses = FeatureDistillationLoss()(outputs, [{}] * 2)
    assert losses["location"].item() == pytest.approx(0, abs=1e-6) and losses["image"].item() == 1
    losses["image"].backward()
    assert outputs["pred_features"].grad.isfinite().all()


def test_low_precision_features_are_compared_in_float32():
    outputs = outputs_of(torch.Generator().manual_seed(0))
    outputs["pred_features"] = outputs["pred_features"].bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = FeatureDistillationLoss()(outputs, [{}] * 2)
    assert all(loss.dtype == torch.float32 for loss in losses.values())


@pytest.mark.parametrize("weights", [(0, 0), (-1, 1)])
def test_weights_without_a_loss_are_an_error(weights):
    with pytest.raises(ConfigError, match="expected at least 0, and one above"):
        FeatureDistillationLoss(location_weight=weights[0], image_weight=weights[1])
