"""Official checkpoints' key names to vitkit's."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from vitkit.model_zoo.convert_deformable_detr import converters as deformable_detr_converters
from vitkit.model_zoo.convert_mask_classification import CONVERTERS as MASK_CLASSIFICATION_CONVERTERS
from vitkit.model_zoo.convert_mvit import CONVERTERS as MVIT_CONVERTERS
from vitkit.model_zoo.convert_nonlocal import CONVERTERS as NON_LOCAL_CONVERTERS
from vitkit.model_zoo.convert_swin import CONVERTERS as SWIN_CONVERTERS
from vitkit.model_zoo.convert_vit import CONVERTERS as VIT_CONVERTERS
from vitkit.model_zoo.converter import Converter, State

# fmt: off
COCO_CATEGORY_IDS = (
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 27, 28, 31, 32, 33, 34, 35,
    36, 37, 38, 39, 40, 41, 42, 43, 44, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65,
    67, 70, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 84, 85, 86, 87, 88, 89, 90,
)
"""COCO's raw ids of its 80 classes, in the order of their contiguous labels."""

COCO_CLASSES = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet",
    "tv", "laptop", "mouse", "remote", "keyboard", "cell phone", "microwave", "oven", "toaster", "sink",
    "refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)
"""Their names."""
# fmt: on


DETR_RENAMES = (
    (r"^backbone\.0\.(?:body\.)?", "backbone."),
    (r"^input_proj\.", "neck.projections.res5."),
    (r"^transformer\.", "head."),
    (r"\.multihead_attn\.", ".cross_attn."),
    (r"\.(linear[12])\.", r".ffn.\1."),
    (r"^(class_embed|bbox_embed|query_embed)\.", r"head.\1."),
)

CONVERTERS = [
    *MASK_CLASSIFICATION_CONVERTERS,
    *deformable_detr_converters(COCO_CLASSES),
    Converter(
        name="facebookresearch/detr, with masks",
        marks=("detr.transformer.decoder.norm.weight", "mask_head.lay1.weight"),
        renames=((r"^detr\.", ""), *DETR_RENAMES),
    ),
    Converter(
        name="facebookresearch/detr",
        marks=("backbone.0.body.conv1.weight", "transformer.decoder.norm.weight", "input_proj.weight"),
        renames=DETR_RENAMES,
        classes=COCO_CLASSES,
    ),
    *VIT_CONVERTERS,
    *NON_LOCAL_CONVERTERS,
    *MVIT_CONVERTERS,
    *SWIN_CONVERTERS,
]


def convert_official(
    state: Mapping[str, Tensor], model: nn.Module, classes: Sequence[str] | None = None
) -> tuple[State, Converter | None]:
    """Renames an official state dict for `model`; one that no converter knows is returned as it is.

    Where an official head has a row for each raw COCO id and the model has COCO's 80 classes, their rows are taken.

    Args:
        state: as stored; also wrapped as {"model": state}.
        model: what it will be loaded into.
        classes: the model's class names; None: 80 classes are taken for COCO's.
    Returns:
        the state dict, and its format (None: not official).
    """
    if isinstance(state.get("model"), Mapping):
        state = state["model"]
    for converter in CONVERTERS:
        if converter.matches(state):
            state = converter.convert(state, model)
            if not has_coco_head(state):
                # Someone's own classes, trained by the original code.
                converter = converter._replace(classes=None)
            elif classes is None or tuple(classes) == COCO_CLASSES:
                state = select_coco_classes(state, model)
            return state, converter
    return dict(state), None


def select_coco_classes(state: State, model: nn.Module) -> State:
    """Takes the rows of COCO's 80 classes, and the last, no object, where a head has one for each of the 91 raw ids."""
    own = model.state_dict()
    for key, value in state.items():
        if "class_embed" not in key or key not in own:
            continue
        if len(value) == 92 and len(own[key]) == 81:
            state[key] = value[[*COCO_CATEGORY_IDS, 91]]
        elif len(value) == 91 and len(own[key]) == 80:
            # A first stage ranks places by the first row, whatever class that is; it must stay the first.
            first = 0 if "proposals" in key else COCO_CATEGORY_IDS[0]
            state[key] = value[[first, *COCO_CATEGORY_IDS[1:]]]
    return state


def has_coco_head(state: State) -> bool:
    """Whether a detector's classes are COCO's raw ids, as those of all official ones are."""
    heads = [value for key, value in state.items() if "class_embed" in key and key.endswith("weight")]
    return bool(heads) and all(len(value) in (91, 92) for value in heads)
