"""LVIS: more than a thousand classes, for each of which only some images are annotated (Gupta et al. 2019,
https://arxiv.org/abs/1908.03195)."""

from typing import Any

from vitkit.data.datasets.coco import CocoDetection
from vitkit.io.coco_schema import ANNOTATED_CLASSES, lvis_issues
from vitkit.registry import DATASETS


@DATASETS.register
class LvisDetection(CocoDetection):
    """Images of COCO with LVIS's boxes and masks, for `LvisEvaluator`.

    The files name images by their address in COCO, so `images` is the folder that contains train2017 and val2017.
    Beside the fields of COCO, each image lists the classes that it certainly does not show (`neg_category_ids`), and
    those of which it shows more than is annotated (`not_exhaustive_category_ids`); of a class in neither list and
    without an object, nothing is known. Each class has a `frequency`: "r", rare (1 to 10 training images), "c", common
    (11 to 100), or "f", frequent. The arguments are those of `CocoDetection`.
    """

    _issues = staticmethod(lvis_issues)

    def ground_truth(self) -> dict[str, Any]:
        """See `CocoDetection`; the images list classes by the ids of `category_ids`."""
        content = super().ground_truth()
        for image in content["images"] if self._id_of_raw else ():
            for field in ANNOTATED_CLASSES:
                ids = map(self._id_of_raw.get, image[field])
                image[field] = [category_id for category_id in ids if category_id is not None]
        return content
