"""Convert the key names of official checkpoints to vitkit's, as `vitkit.load_weights` does."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vitkit.io.coco_classes import COCO_CATEGORY_IDS, COCO_CLASSES, COCO_PANOPTIC_CATEGORY_IDS, COCO_PANOPTIC_CLASSES
from vitkit.model_zoo.converters.formats import READ_ORDER
from vitkit.model_zoo.converters.key_table import Format, State
from vitkit.model_zoo.converters.objects365_classes import COCO_ROWS as OBJECTS365_ROWS
from vitkit.model_zoo.converters.objects365_classes import NUM_ROWS as OBJECTS365_NUM_ROWS
from vitkit.model_zoo.converters.objects365_classes import OBJECTS365_CLASSES

_PANOPTIC_ROWS = 251
"""Rows of the class head of DETR with masks: one for each raw id, including unused ones, and one for "no object"."""

REAL_TIME_MODELS = (
    *("lyuwenyu/RT-DETR", "lyuwenyu/RT-DETR, v2", "Peterande/D-FINE", "Intellindust-AI-Lab/DEIMv2"),
    "Intellindust-AI-Lab/EdgeCrafter",
    *("transformers RT-DETR", "transformers RT-DETRv2", "transformers D-FINE", "transformers DEIMv2"),
)
"""Formats whose class heads have a row for each class of COCO, not for each raw id."""
POSE_MODELS = ("Intellindust-AI-Lab/EdgeCrafter, poses",)
"""Formats whose class heads have one row, that of persons, for a model with one class."""
TOOLBOX_MODELS = (
    *(f"open-mmlab/mmdetection {name}" for name in ("DETR", "Deformable DETR", "DINO", "Mask2Former", "MaskFormer")),
    *(f"IDEA-Research/detrex {name}" for name in ("DETR", "Deformable DETR", "DINO")),
)
"""Formats of toolboxes, whose files are of any classes."""
FOCAL_MODELS = (
    *("fundamentalvision/Deformable-DETR", "IDEA-Research/DINO", "transformers Deformable DETR"),
    *("roboflow/rf-detr", "roboflow/rf-detr, with masks"),
    *("transformers RF-DETR", "transformers RF-DETR, with masks"),
    *REAL_TIME_MODELS,
    *POSE_MODELS,
    *(name for name in TOOLBOX_MODELS if name.endswith((" Deformable DETR", " DINO"))),
)
"""Formats whose class heads have no row for "no object"."""

OTHER_MODELS = (
    *(
        ("a Conditional DETR or DAB-DETR", [f"decoder.layers.0.{name}."])
        for name in ("cross_attn.qcontent_proj", "ca_qcontent_proj", "attentions.1.query_content_proj")
    ),
    ("a DDQ-DETR", ["dn_query_generator.", "query_map."]),
    ("a Co-DETR", ["query_head.", "rpn_head."]),
    ("a Sparse R-CNN or QueryInst", ["init_proposal_bboxes."]),
    ("a cascade of R-CNNs", ["roi_head.bbox_head.1."]),
    ("a Mask R-CNN", ["roi_head.mask_head."]),
    ("a Faster R-CNN", ["roi_head.bbox_head."]),
    ("a cascade of R-CNNs", ["roi_heads.box_predictor.1."]),
    ("a Mask R-CNN", ["roi_heads.mask_head."]),
    ("a Keypoint R-CNN", ["roi_heads.keypoint_head."]),
    ("a Faster R-CNN", ["roi_heads."]),
    ("a RetinaNet", ["bbox_head.retina_"]),
    ("a RetinaNet or FCOS", ["head.cls_subnet.", "head.bbox_subnet."]),
    ("a YOLOX", ["bbox_head.multi_level_"]),
    ("a YOLO", ["bbox_head.convs_pred."]),
    ("an RTMDet", ["bbox_head.rtm_"]),
    ("a one-stage detector on anchors or points (FCOS, ATSS, GFL, SSD or the like)", ["bbox_head.", "cls"]),
    ("a SOLO", ["mask_head.conv_cls."]),
    ("a SOLOv2", ["mask_head.mask_feature_head."]),
    ("a YOLO", ["model.0.conv.weight", "model.1.conv.weight"]),
)
"""Models of mmdetection, detectron2, detrex and ultralytics that vitkit does not have, and parts of names by which they
are known; the first that fits."""

_COCO_ROWS = {
    91: COCO_CATEGORY_IDS,
    92: (*COCO_CATEGORY_IDS, 91),
    _PANOPTIC_ROWS: (*COCO_PANOPTIC_CATEGORY_IDS, _PANOPTIC_ROWS - 1),
    OBJECTS365_NUM_ROWS: OBJECTS365_ROWS,
    OBJECTS365_NUM_ROWS + 1: (*OBJECTS365_ROWS, OBJECTS365_NUM_ROWS),
}
"""Rows of a class head with one for each raw id -> those of COCO's classes, in order, and of "no object"."""
_OBJECTS365_ROWS = {n: range(1, n) for n in (OBJECTS365_NUM_ROWS, OBJECTS365_NUM_ROWS + 1)}
"""The same for all classes of Objects365, whose ids begin with 1."""
_DATASETS_BY_CLASSES = {
    8: "Cityscapes' things",
    19: "Cityscapes",
    80: "COCO's things",
    91: "COCO's raw ids",
    100: "ADE20K's things",
    133: "COCO panoptic",
    150: "ADE20K",
    250: "COCO panoptic's raw ids",
    365: "Objects365",
    366: "Objects365's raw ids",
    847: "ADE20K full",
}
"""Number of classes -> the dataset that official models with that number were trained on."""


def convert_official(
    state: Mapping[str, Tensor], model: nn.Module, classes: Sequence[str] | None = None
) -> tuple[State, Format | None]:
    """Rename an official state dict for `model`; one that no converter recognizes is returned as is.

    If an official head has a row for each raw COCO id, the rows of COCO's 80 classes, or of the 133 of its panoptic
    segmentation, are selected; of a head with a row for each raw Objects365 id, those of COCO's classes for a model of
    COCO's, and those of all 365 for others.

    Args:
        state: the stored state dict, possibly wrapped as {"model": state}.
        model: the model that it will be loaded into.
        classes: the model's class names; None: 80 and 133 classes are assumed to be COCO's, and a model of another
            number of classes gets all rows.
    Returns:
        the state dict, and its converter (None: not official).
    """
    if isinstance(state.get("model"), Mapping):
        state = state["model"]
    for converter in READ_ORDER:
        if converter.matches(state):
            state = converter.table.read(dict(state), model)
            if (assumed := _classes_of_toolbox(state, converter)) is not None:
                return state, converter._replace(classes=assumed)
            if not has_coco_head(state, converter) and not has_objects365_head(state):
                # The original code was trained on other classes.
                return state, converter._replace(classes=None)
            if classes is None or converter.classes is None or tuple(classes) == converter.classes:
                return select_rows(state, model, _COCO_ROWS), converter
            if has_objects365_head(state):
                converter = converter._replace(classes=OBJECTS365_CLASSES)
                return select_rows(state, model, _OBJECTS365_ROWS, of_any_size=True), converter
            return select_rows(state, model, _COCO_ROWS, of_any_size=True), converter
    return dict(state), None


def select_rows(
    state: State, model: nn.Module, rows_of: Mapping[int, Sequence[int]], *, of_any_size: bool = False
) -> State:
    """Take the rows of classes and the last row, "no object", of heads that have a row for each raw id.

    The same is done for DINO's label embedding, whose last row also stands for no class.

    Args:
        rows_of: the rows to take, by the number that there are.
        of_any_size: do so whatever the number of the model's classes.
    """
    expected = model.state_dict()
    for key, value in state.items():
        if not re.search("class_embed|label_embed", key) or key not in expected:
            continue
        rows = rows_of.get(len(value))
        if rows is not None and (of_any_size or len(rows) == len(expected[key])):
            state[key] = value[[0, *rows[1:]] if ranks_by_first_row(key, expected) else [*rows]]
    return state


def ranks_by_first_row(key: str, expected: Mapping[str, Tensor]) -> bool:
    """Whether an entry is of a first stage that ranks locations by the first row, whatever its class: this row must
    stay the first."""
    return "proposals" in key and key.replace("class_embed", "pos_trans") in expected


def has_coco_head(state: State, converter: Format) -> bool:
    """Whether a detector's class heads have as many rows as those of the official ones, which were trained on COCO."""
    if converter.name in POSE_MODELS:
        return _all_heads_have(state, (1,))
    rows = (len(COCO_CLASSES),) if converter.name in REAL_TIME_MODELS else (91, 92, _PANOPTIC_ROWS)
    return _all_heads_have(state, rows)


def has_objects365_head(state: State) -> bool:
    """Whether a detector's class heads have a row for each raw id of Objects365."""
    return _all_heads_have(state, (OBJECTS365_NUM_ROWS,))


def _classes_of_toolbox(state: State, converter: Format) -> tuple[str, ...] | None:
    """Return COCO's classes, panoptic or not, for a toolbox's model of as many; None for all others."""
    no_object = converter.name not in FOCAL_MODELS
    coco = COCO_CLASSES, COCO_PANOPTIC_CLASSES
    of_toolbox = converter.name in TOOLBOX_MODELS
    return next((names for names in coco if of_toolbox and _all_heads_have(state, (len(names) + no_object,))), None)


def describe_other(state: Mapping[str, Any]) -> str | None:
    """Describe the weights of another toolbox's model that vitkit does not have; None for all others."""
    return next((name for name, marks in OTHER_MODELS if all(any(m in key for key in state) for m in marks)), None)


def _all_heads_have(state: State, rows: Sequence[int]) -> bool:
    heads = [value for key, value in state.items() if "class_embed" in key and key.endswith("weight")]
    return bool(heads) and all(isinstance(head, Tensor) and head.ndim > 0 and len(head) in rows for head in heads)


def describe(state: State, converter: Format) -> str:
    """Describe the model and the classes of an official checkpoint, for error messages.

    Args:
        state: its tensors, under the stored names.
        converter: the converter of its format.
    """
    name = re.compile(r"(?:^|\.)(?:class_embed|dec_score_head|fc_cls|cls_branches|cls_embed)\.(?:\d+\.)?weight$")
    head = next((value for key, value in state.items() if name.search(key)), None)
    if head is None or head.ndim == 0:
        return converter.name
    num_classes = len(head) - (converter.name not in FOCAL_MODELS)  # those have no row for "no object"
    dataset = _DATASETS_BY_CLASSES.get(num_classes)
    return f"{converter.name} with {num_classes} classes{f' ({dataset})' if dataset else ''}"
