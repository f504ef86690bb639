"""The classes of COCO, and their raw ids in its annotation files."""

_UNUSED_IDS = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)
COCO_CATEGORY_IDS = tuple(id_ for id_ in range(1, 91) if id_ not in _UNUSED_IDS)
"""COCO's raw ids of its 80 classes, in the order of their contiguous labels."""

# fmt: off
COCO_CLASSES = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet",
    "tv", "laptop", "mouse", "remote", "keyboard", "cell phone", "microwave", "oven", "toaster", "sink", "refrigerator",
    "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)
"""The names of COCO's 80 classes, in the same order."""

COCO_PANOPTIC_CATEGORY_IDS = (
    *COCO_CATEGORY_IDS,
    92, 93, 95, 100, 107, 109, 112, 118, 119, 122, 125, 128, 130, 133, 138, 141, 144, 145, 147, 148, 149, 151, 154,
    155, 156, 159, 161, 166, 168, 171, 175, 176, 177, 178, 180, 181, 184, 185, 186, 187, 188, 189, 190, 191, 192, 193,
    194, 195, 196, 197, 198, 199, 200,
)
"""The raw ids of the 133 classes of COCO's panoptic segmentation."""

COCO_PANOPTIC_CLASSES = (
    *COCO_CLASSES,
    "banner", "blanket", "bridge", "cardboard", "counter", "curtain", "door-stuff", "floor-wood", "flower", "fruit",
    "gravel", "house", "light", "mirror-stuff", "net", "pillow", "platform", "playingfield", "railroad", "river",
    "road", "roof", "sand", "sea", "shelf", "snow", "stairs", "tent", "towel", "wall-brick", "wall-stone", "wall-tile",
    "wall-wood", "water-other", "window-blind", "window-other", "tree-merged", "fence-merged", "ceiling-merged",
    "sky-other-merged", "cabinet-merged", "table-merged", "floor-other-merged", "pavement-merged", "mountain-merged",
    "grass-merged", "dirt-merged", "paper-merged", "food-other-merged", "building-other-merged", "rock-merged",
    "wall-other-merged", "rug-merged",
)
"""The names of the 133 classes of COCO's panoptic segmentation, in the same order."""
# fmt: on
