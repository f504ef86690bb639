"""All formats: the key names of the transformers library, and of the original repositories and other libraries."""

from vitkit.model_zoo.converters import (
    deformable_detr,
    deimv2,
    detr,
    dfine,
    ecdet,
    ecpose,
    eomt,
    fairseq,
    grounding_dino,
    language_models,
    maskformer,
    mvit,
    resnet,
    rf_detr,
    rt_detr,
    self_distillation,
    swin,
    transformer,
    vit,
)

# ECDet's decoder has all names of D-FINE's.
_DETR_LIKE = (grounding_dino, detr, deformable_detr, rt_detr, ecpose, ecdet, deimv2, dfine, rf_detr)
_MODELS = (*_DETR_LIKE, maskformer, eomt, self_distillation)
_BACKBONES_AND_TEXT = (vit, resnet, mvit, swin, transformer, fairseq, language_models)

TRANSFORMERS = [form for file in (*_MODELS, *_BACKBONES_AND_TEXT) for form in file.TRANSFORMERS]
"""The formats of the transformers library."""
OFFICIAL = [form for file in (*_MODELS, *_BACKBONES_AND_TEXT) for form in file.OFFICIAL]
"""The formats of the original repositories and of other libraries."""
MMDETECTION = [form for file in (grounding_dino, detr, deformable_detr, maskformer) for form in file.MMDETECTION]
"""The formats of mmdetection 3."""
DETREX = [form for file in (detr, deformable_detr) for form in file.DETREX]
"""The formats of detrex."""
READ_ORDER = [
    form
    for formats in (
        *(file.TRANSFORMERS for file in _MODELS),
        *(file.OFFICIAL for file in _MODELS),
        MMDETECTION,
        DETREX,
        *(file.TRANSFORMERS for file in _BACKBONES_AND_TEXT),
        *(file.OFFICIAL for file in _BACKBONES_AND_TEXT),
    )
    for form in formats
]
"""All formats. A file has the first one whose marks it contains, so models precede the backbones that are their parts,
also those of other projects: the official RF-DETR contains the transformers library's DINOv2."""
