"""Masks of targets that are stored as bits: read like any tensor, in less than an eighth of the memory."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitkit.ops.masks import pad_masks, sample_masks
from vitkit.ops.packed_masks import PackedMasks
from vitkit.structures import Batch

SIZES = [(5, 31, 47), (4, 40, 64), (3, 1, 1), (1, 8, 8), (0, 5, 9)]


@pytest.fixture(params=SIZES, ids=str)
def masks(request):
    """Random masks; of three and more the second is empty, the third a pixel, and the fourth full."""
    torch.manual_seed(0)
    masks = torch.rand(request.param) > 0.7
    if len(masks) > 2:
        masks[1:3] = False
        masks[2, -1, -1] = True
        masks[3:4] = True
        masks[0, :, : masks.shape[2] // 2] = False
    return masks


def pack(masks):
    return PackedMasks.pack(masks.numpy(), masks.shape[1:])


def test_they_are_read_like_the_masks(masks):
    packed = pack(masks)
    assert (packed.shape, packed.dtype, packed.device) == (masks.shape, masks.dtype, masks.device)
    assert (len(packed), packed.ndim, packed.numel(), packed.size(1)) == (len(masks), 3, masks.numel(), masks.size(1))
    assert isinstance(packed, torch.Tensor) and type(packed.clone()) is torch.Tensor and repr(packed) == repr(masks)
    assert torch.equal(packed, masks) and torch.equal(~packed, ~masks) and torch.equal(masks & packed, masks)
    assert np.array_equal(np.asarray(packed), masks.numpy()) and packed.tolist() == masks.tolist()
    assert torch.equal(packed.float(), masks.float()) and torch.equal(packed.to(torch.float64), masks.double())
    assert torch.equal(packed.flatten(1).any(1), masks.flatten(1).any(1)) and torch.equal(packed.any(0), masks.any(0))
    assert torch.equal(packed.is_empty(), ~masks.flatten(1).any(1))
    assert torch.equal(packed[:, 1:7, 3:9], masks[:, 1:7, 3:9]) and torch.equal(packed[None], masks[None])
    assert torch.equal(packed[True], masks[True])
    assert torch.equal(packed[..., 0], masks[..., 0]) and packed[masks].all()
    assert [mask.tolist() for mask in packed] == masks.tolist()
    for i in range(-len(masks), len(masks)):
        assert torch.equal(packed[i], masks[i]) and torch.equal(packed[torch.tensor(i)], masks[i])
        assert torch.equal(packed[i, :3], masks[i, :3])
    with pytest.raises(IndexError):
        packed[len(masks)]


def test_what_chooses_joins_and_moves_leaves_them_packed(masks):
    packed, count = pack(masks), len(masks)
    index = torch.randint(max(count, 1), (7 if count else 0,))
    is_chosen = torch.rand(count) > 0.5
    height, width = (side + 3 for side in masks.shape[1:])
    for got, expected in (
        (packed[index], masks[index]),
        (packed[is_chosen], masks[is_chosen]),
        (packed[index.tolist()], masks[index.tolist()]),
        (packed[index.numpy()], masks[index.numpy()]),
        (packed[1:3], masks[1:3]),
        (packed[index][::2], masks[index][::2]),
        (torch.cat([packed, packed[index], packed]), torch.cat([masks, masks[index], masks])),
        (torch.cat([masks, packed]), torch.cat([masks, masks])),
        (torch.cat(list(packed.split(2))), masks),
        (pad_masks(packed, (height, width)), F.pad(masks, (0, 3, 0, 3))),
        (pickle.loads(pickle.dumps(packed)), masks),
        (copy.copy(packed), masks),
        (copy.deepcopy({"masks": packed})["masks"], masks),
        (packed.to("cpu", non_blocking=True), masks),
        (Batch({}, [{"masks": packed}]).to("cpu").targets[0]["masks"], masks),
    ):
        assert type(got) is PackedMasks and torch.equal(got, expected)
    assert [len(part) for part in packed.split(2)] == [len(part) for part in masks.split(2)]
    moved = packed.to("meta", non_blocking=True)
    assert type(moved) is PackedMasks and {moved.device, moved.bits.device, moved.extents.device} == {
        torch.device("meta")
    }
    assert torch.equal(torch.cat([packed, masks.float()]), torch.cat([masks, masks]).float())
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([packed, pad_masks(packed, (height, width))])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_they_are_pinned_and_decoded_on_a_gpu(masks):
    batch = Batch({}, [{"masks": pack(masks)}]).pin_memory()
    pinned = batch.targets[0]["masks"]
    assert pinned.bits.is_pinned() and pinned.extents.is_pinned() and torch.equal(pinned, masks)
    on_gpu = batch.to("cuda").targets[0]["masks"]
    assert type(on_gpu) is PackedMasks and torch.equal(on_gpu.clone().cpu(), masks)


def test_they_are_decoded_at_once_for_devices_as_mask_by_mask(masks):
    for dtype in (torch.bool, torch.float32, torch.bfloat16):
        got = pack(masks)._decode_at_once(dtype)
        assert torch.equal(got, masks.to(dtype)) and torch.equal(got, pack(masks).decode(dtype)) and got.is_contiguous()


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_points_have_exactly_the_values_of_the_masks(masks, mode):
    packed, size = pack(masks), (masks.shape[1] + 5, masks.shape[2] + 2)
    index = torch.randint(max(len(masks), 1), (9 if len(masks) else 0,))
    for chosen, points in ((None, torch.rand(1, 300, 2)), (index, torch.rand(len(index), 300, 2) * 1.4 - 0.2)):
        got, expected = (sample_masks(points, each, size, index=chosen, mode=mode) for each in (packed, masks))
        assert torch.equal(got, expected)


def test_writing_to_them_is_an_error_that_names_the_remedy():
    packed = pack(torch.ones(2, 3, 4, dtype=torch.bool))
    others = [lambda: packed.__ior__(packed), lambda: torch.logical_or(packed, packed, out=packed)]
    for write in (packed.zero_, lambda: packed.__setitem__(0, False), packed.logical_not_, *others):
        with pytest.raises(RuntimeError, match=r"cannot be written to. Write to their clone\(\)"):
            write()
    other = torch.zeros(2, 3, 4, dtype=torch.bool)
    other[:1] = packed[:1]
    assert other.sum() == 12 and other.copy_(packed).all()


def test_2000_masks_of_a_photo_fit_in_200_mib():
    random, (height, width) = np.random.default_rng(0), (800, 1333)

    def ellipses():
        y, x = np.ogrid[:height, :width]
        for _ in range(2000):
            radii = random.uniform(0.05, 0.25, 2) * (height, width)
            center = random.uniform(radii, np.array([height, width]) - radii)
            box = [slice(int(c - r), int(c + r) + 1) for c, r in zip(center, radii)]
            mask = np.zeros((height, width), bool)
            mask[tuple(box)] = ((y[box[0]] - center[0]) / radii[0]) ** 2 + (
                (x[:, box[1]] - center[1]) / radii[1]
            ) ** 2 <= 1
            yield mask

    packed = PackedMasks.pack(ellipses(), (height, width))
    assert packed.shape == (2000, height, width)
    assert packed.bits.nbytes + packed.extents.nbytes < 200 << 20
    assert len(pickle.dumps(packed)) < 200 << 20
