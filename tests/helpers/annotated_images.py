"""Small images with boxes, labels and masks, and checks that these agree."""

import numpy as np

from vitkit.data.loading.splits import build_dataset
from vitkit.data.transforms.annotated_image import AnnotatedImage

SHAPES = dict(type="ShapesDetection", num_images=6, image_size=64)


def blocks(height=480, width=640):
    """Return an image with a flat rectangle in each color channel, with boxes and masks; labels are the channels."""
    corners = np.array([(20, 30, 220, 180), (300, 40, 630, 200), (100, 250, 400, 470)])
    boxes = (corners * np.array([width / 640, height / 480] * 2)).round().astype(np.float32)
    image = np.zeros((height, width, 3), np.uint8)
    masks = np.zeros((3, height, width), np.uint8)
    for channel, (x0, y0, x1, y1) in enumerate(boxes.astype(int)):
        image[y0:y1, x0:x1, channel] = 255
        masks[channel, y0:y1, x0:x1] = 1
    return AnnotatedImage(image, boxes, np.arange(3), masks)


def assert_consistent(result):
    """Check that the box, the mask and the colored pixels of each object agree within a pixel."""
    image, boxes_xyxy, labels, masks = result[:4]
    assert len(boxes_xyxy) == len(labels) == len(masks)
    assert masks.shape[1:] == image.shape[:2] and image.dtype == np.uint8 and boxes_xyxy.dtype == np.float32
    for box, label, mask in zip(boxes_xyxy, labels, masks):
        for pixels in (mask > 0, image[..., label] > 127):
            ys, xs = np.nonzero(pixels)
            np.testing.assert_allclose(box, [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1], atol=1)


def flat(value, boxes, labels, *, size=(8, 8), masks=True):
    """An image of one value, with rectangular objects."""
    boxes = np.array(boxes, np.float32).reshape(-1, 4)
    drawn = np.zeros((len(boxes), *size), np.uint8)
    for mask, (x0, y0, x1, y1) in zip(drawn, boxes.astype(int)):
        mask[y0:y1, x0:x1] = 1
    image = np.full((*size, 3), value, np.uint8)
    return AnnotatedImage(image, boxes, np.array(labels, np.int64), drawn if masks else None)


def shapes(transforms, **others):
    return build_dataset(SHAPES | dict(transforms=transforms, masks=True) | others)
