import pytest
import torch
from torchvision import ops as torchvision_ops

from vitkit.ops.boxes import (
    box_iou,
    clamp_sizes,
    cxcywh_to_xyxy,
    duplicates,
    generalized_box_iou,
    scale_boxes,
    xyxy_to_cxcywh,
)


def random_boxes_xyxy(*shape: int) -> torch.Tensor:
    return cxcywh_to_xyxy(torch.rand(*shape, 4))


def test_box_formats_convert_back_and_forth():
    boxes_cxcywh = torch.tensor([[[0.5, 0.4, 0.2, 0.6]]])
    boxes_xyxy = cxcywh_to_xyxy(boxes_cxcywh)
    torch.testing.assert_close(boxes_xyxy, torch.tensor([[[0.4, 0.1, 0.6, 0.7]]]))
    torch.testing.assert_close(xyxy_to_cxcywh(boxes_xyxy), boxes_cxcywh)


def test_boxes_are_scaled_by_their_own_image_size():
    boxes = torch.tensor([0.0, 0.5, 1.0, 1.0]).expand(2, 1, 4)
    scaled = scale_boxes(boxes, [(100, 200), (40, 10)])
    assert scaled.tolist() == [[[0, 50, 200, 100]], [[0, 20, 10, 40]]]


def test_giou_by_hand():
    a = torch.tensor([0.0, 0.0, 2.0, 2.0])
    b = torch.tensor([[0.0, 0.0, 2.0, 2.0], [1.0, 1.0, 3.0, 3.0], [3.0, 0.0, 4.0, 2.0]])
    torch.testing.assert_close(generalized_box_iou(a, b), torch.tensor([1, 1 / 7 - 2 / 9, -2 / 8]))


def test_broadcast_pairs_equal_torchvision():
    torch.manual_seed(0)
    a, b = random_boxes_xyxy(3, 5), random_boxes_xyxy(3, 4)
    giou = generalized_box_iou(a[:, :, None], b[:, None])
    for i in range(3):
        torch.testing.assert_close(giou[i], torchvision_ops.generalized_box_iou(a[i], b[i]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_boxes_in_half_precision_have_finite_areas(dtype):
    a, b = torch.tensor([[0, 0, 512, 512.0]], dtype=dtype), torch.tensor([[256, 0, 768, 512.0]], dtype=dtype)
    assert box_iou(a, b).item() == pytest.approx(1 / 3) and box_iou(a, a).item() == 1
    assert generalized_box_iou(a, b).item() == pytest.approx(1 / 3)


def test_giou_of_small_boxes_has_no_epsilon():
    a = torch.tensor([0.5, 0.5, 0.5001, 0.5001], dtype=torch.float64)
    b = a + torch.tensor([0, 0, 0.0001, 0], dtype=torch.float64)  # twice as wide
    torch.testing.assert_close(generalized_box_iou(a, b), torch.tensor(0.5, dtype=torch.float64))


def test_boxes_without_area_give_finite_values_and_gradients():
    point, line = [0.5, 0.5, 0.5, 0.5], [0.5, 0.1, 0.5, 0.9]
    a = torch.tensor([point, line, point], requires_grad=True)
    b = torch.tensor([point, line, [0.2, 0.2, 0.2, 0.2]])
    giou = generalized_box_iou(a, b)
    assert giou.tolist() == [0, 0, -1]
    giou.sum().backward()
    assert a.grad.isfinite().all()


def test_giou_gradient_equals_finite_differences():
    torch.manual_seed(0)
    a, b = random_boxes_xyxy(6).double().requires_grad_(), random_boxes_xyxy(6).double().requires_grad_()
    assert torch.autograd.gradcheck(generalized_box_iou, (a, b))


def test_negative_sizes_are_clamped_around_the_center():
    boxes = torch.tensor([[0.5, 0.4, -0.2, 0.6], [-0.1, 0.2, 0.3, -0.1]])
    assert clamp_sizes(boxes).tolist() == torch.tensor([[0.5, 0.4, 0, 0.6], [-0.1, 0.2, 0.3, 0]]).tolist()


def test_duplicates_are_those_that_nms_removes_if_each_object_has_two_boxes():
    torch.manual_seed(0)
    centers = torch.rand(3, 12, 2) * 900
    objects = torch.cat([centers, centers + 20 + torch.rand(3, 12, 2) * 60], dim=-1)
    boxes = torch.cat([objects, objects + torch.rand(3, 12, 4) * 12], dim=1)
    labels = torch.randint(2, (3, 12)).repeat(1, 2)
    found = duplicates(boxes, labels, iou=0.5)
    scores = torch.linspace(1, 0.1, 24)
    for b, l, removed in zip(boxes, labels, found):
        kept = torchvision_ops.batched_nms(b, scores, l, 0.5)
        assert removed[12:].sum() > 6
        # Only sequential NMS keeps a box that overlaps only removed ones; no object touches two others here.
        assert (~removed).nonzero()[:, 0].tolist() == sorted(kept.tolist())


def test_boxes_of_another_class_or_below_the_iou_are_not_duplicates():
    boxes = torch.tensor([[[0.0, 0, 10, 10], [0, 0, 10, 10], [0, 0, 10, 9], [0, 0, 10, 5]]])
    assert duplicates(boxes, torch.tensor([[0, 1, 0, 0]]), iou=0.6).tolist() == [[False, False, True, False]]
