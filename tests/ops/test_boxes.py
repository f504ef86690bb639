import torch
from torchvision import ops as torchvision_ops

from vitkit.ops.boxes import clamp_sizes, cxcywh_to_xyxy, generalized_box_iou, scale_boxes, xyxy_to_cxcywh


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


def test_negative_sizes_are_clamped_around_the_centre():
    boxes = torch.tensor([[0.5, 0.4, -0.2, 0.6], [-0.1, 0.2, 0.3, -0.1]])
    assert clamp_sizes(boxes).tolist() == torch.tensor([[0.5, 0.4, 0, 0.6], [-0.1, 0.2, 0.3, 0]]).tolist()
