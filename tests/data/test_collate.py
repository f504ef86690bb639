import torch

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
