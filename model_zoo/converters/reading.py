"""Convert the key names of official checkpoints to vitkit's, as `vitkit.load_weights` does."""

import re
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from vitkit.io.coco_classes import COCO_CATEGORY_IDS, COCO_CLASSES, COCO_PANOPTIC_CATEGORY_IDS, COCO_PANOPTIC_CLASSES
from vitkit.model_zoo.converters.formats import READ_ORDER
from vitkit.model_zoo.converters.key_table import Format, State
from vitkit.model_zoo.converters.objects365_classes import COCO_ROWS as OBJECTS365_ROWS
from vitkit.model_zoo.converters.objects365_classes import NUM_ROWS as OBJECTS365_NUM_ROWS

_PANOPTIC_ROWS = 251
"""Rows of the class head of DETR with masks: one for each raw id, including unused ones, and one for "no object"."""

REAL_TIME_MODELS = (
    *("lyuwenyu/RT-DETR", "lyuwenyu/RT-DETR, v2", "Peterande/D-FINE", "Intellindust-AI-Lab/DEIMv2"),
    "Intellindust-AI-Lab/EdgeCrafter",
    *("transformers RT-DETR", "transformers RT-DETRv2", "transformers D-FINE", "transformers DEIMv2"),
)
"""Formats whose class heads have a row for each class of COCO, not for each raw id."""
FOCAL_MODELS = (
    *("fundamentalvision/Deformable-DETR", "IDEA-Research/DINO", "transformers Deformable DETR"),
    *("roboflow/rf-detr", "roboflow/rf-detr, with masks"),
    *("transformers RF-DETR", "transformers RF-DETR, with masks"),
    *REAL_TIME_MODELS,
)
"""Formats whose class heads have no row for "no object"."""

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

    If an official head has a row for each raw COCO id and the model has COCO's 80 classes, or the 133 of its panoptic
    segmentation, the rows of these classes are selected; likewise of a head with a row for each raw Objects365 id.

    Args:
        state: the stored state dict, possibly wrapped as {"model": state}.
        model: the model that it will be loaded into.
        classes: the model's class names; None: 80 and 133 classes are assumed to be COCO's.
    Returns:
        the state dict, and its converter (None: not official).
    """
    if isinstance(state.get("model"), Mapping):
        state = state["model"]
    for converter in READ_ORDER:
        if converter.matches(state):
            state = converter.table.read(dict(state), model)
            is_coco = has_coco_head(state, converter)
            if (is_coco or has_objects365_head(state)) and (classes is None or tuple(classes) == converter.classes):
                state = select_coco_classes(state, model)
            if not is_coco and not has_coco_head(state, converter):
                # The original code was trained on other classes.
                converter = converter._replace(classes=None)
            return state, converter
    return dict(state), None


def select_coco_classes(state: State, model: nn.Module) -> State:
    """Take the rows of COCO's classes and the last row, "no object", of heads that have a row for each raw id.

    The same is done for DINO's label embedding, whose last row also stands for no class.
    """
    expected = model.state_dict()
    for key, value in state.items():
        if not re.search("class_embed|label_embed", key) or key not in expected:
            continue
        rows = len(value), len(expected[key])
        if rows == (_PANOPTIC_ROWS, len(COCO_PANOPTIC_CLASSES) + 1):
            state[key] = value[[*COCO_PANOPTIC_CATEGORY_IDS, _PANOPTIC_ROWS - 1]]
        elif rows == (92, 81):
            state[key] = value[[*COCO_CATEGORY_IDS, 91]]
        elif rows == (OBJECTS365_NUM_ROWS, 80):
            state[key] = value[list(OBJECTS365_ROWS)]
        elif rows == (OBJECTS365_NUM_ROWS + 1, 81):
            state[key] = value[[*OBJECTS365_ROWS, OBJECTS365_NUM_ROWS]]
        elif rows == (91, 80):
            # A first stage may rank locations by the first row, whatever its class; this row must then stay the first.
            by_first = "proposals" in key and key.replace("class_embed", "pos_trans") in expected
            first = 0 if by_first else COCO_CATEGORY_IDS[0]
            state[key] = value[[first, *COCO_CATEGORY_IDS[1:]]]
    return state


def has_coco_head(state: State, converter: Format) -> bool:
    """Whether a detector's class heads have as many rows as those of the official ones, which were trained on COCO."""
    rows = (len(COCO_CLASSES),) if converter.name in REAL_TIME_MODELS else (91, 92, _PANOPTIC_ROWS)
    return _all_heads_have(state, rows)


def has_objects365_head(state: State) -> bool:
    """Whether a detector's class heads have a row for each raw id of Objects365."""
    return _all_heads_have(state, (OBJECTS365_NUM_ROWS,))


def _all_heads_have(state: State, rows: Sequence[int]) -> bool:
    heads = [value for key, value in state.items() if "class_embed" in key and key.endswith("weight")]
    return bool(heads) and all(isinstance(head, Tensor) and head.ndim > 0 and len(head) in rows for head in heads)


def describe(state: State, converter: Format) -> str:
    """Describe the model and the classes of an official checkpoint, for error messages.

    Args:
        state: its tensors, under the stored names.
        converter: the converter of its format.
    """
    name = re.compile(r"(?:^|\.)(?:class_embed|dec_score_head)\.(?:\d+\.)?weight$")
    head = next((value for key, value in state.items() if name.search(key)), None)
    if head is None or head.ndim == 0:
        return converter.name
    num_classes = len(head) - (converter.name not in FOCAL_MODELS)  # those have no row for "no object"
    dataset = _DATASETS_BY_CLASSES.get(num_classes)
    return f"{converter.name} with {num_classes} classes{f' ({dataset})' if dataset else ''}"
