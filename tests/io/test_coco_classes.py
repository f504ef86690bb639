from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights

from vitkit.io.coco_classes import COCO_CATEGORY_IDS, COCO_CLASSES, COCO_PANOPTIC_CATEGORY_IDS, COCO_PANOPTIC_CLASSES


def test_classes_and_ids_are_those_of_torchvision():
    names = FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    ids = tuple(id_ for id_, name in enumerate(names) if name not in ("__background__", "N/A"))
    assert ids == COCO_CATEGORY_IDS
    assert tuple(names[id_] for id_ in ids) == COCO_CLASSES


def test_panoptic_classes_begin_with_the_80():
    assert len(set(COCO_PANOPTIC_CLASSES)) == len(set(COCO_PANOPTIC_CATEGORY_IDS)) == 133
    assert COCO_PANOPTIC_CLASSES[:80] == COCO_CLASSES and COCO_PANOPTIC_CATEGORY_IDS[:80] == COCO_CATEGORY_IDS
