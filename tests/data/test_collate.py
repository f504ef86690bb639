import pytest
import torch

from vitkit.data.loading.loader import check_batch
from vitkit.errors import DataError
from vitkit.structures import Batch


def sample(height, width, value=7):
    return {"image": torch.full((3, height, width), value, dtype=torch.uint8), "target": {"image_id": value}}


def test_images_are_padded_at_the_right_and_bottom():
    batch = Batch.collate([sample(4, 6, 1), sample(5, 3, 2)])
    images, padding_mask = batch.inputs["images"], batch.inputs["padding_mask"]
    assert images.shape == (2, 3, 5, 6) and images.dtype == torch.uint8
    assert padding_mask.shape == (2, 5, 6) and padding_mask.dtype == torch.bool
    assert (images[0, :, :4, :6] == 1).all() and (images[1, :, :5, :3] == 2).all()
    assert torch.equal(images.eq(0).all(dim=1), padding_mask)
    assert (~padding_mask).sum(dim=(1, 2)).tolist() == [24, 15]
    assert [target["image_id"] for target in batch.targets] == [1, 2] and len(batch) == 2


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.rand(3, 4, 6), r"image 5: is \(3, 4, 6\) torch.float32, and \(3, 4, 6\) torch.uint8 is in its"),
        (torch.ones(1, 4, 6, dtype=torch.uint8), r"image 5: is \(1, 4, 6\) torch.uint8, and \(3, 4, 6\) torch.uint8"),
    ],
)
def test_an_image_of_another_type_in_a_batch_is_named(image, message):
    with pytest.raises(DataError, match=message):
        check_batch([sample(4, 6), {"image": image, "target": {"image_id": 5}}])


@pytest.mark.parametrize("labels", [torch.zeros(2), torch.zeros(1, dtype=torch.int64), torch.zeros(2, 1).long()])
def test_labels_that_do_not_go_with_the_boxes_are_named(labels):
    target = {"image_id": 5, "labels": labels, "boxes_cxcywh": torch.full((2, 4), 0.5)}
    with pytest.raises(DataError, match=r"image 5: its target has labels .* and boxes_cxcywh \(2, 4\); expected"):
        check_batch([{"image": torch.zeros(3, 4, 6, dtype=torch.uint8), "target": target}])
