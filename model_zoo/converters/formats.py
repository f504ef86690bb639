"""All formats: the key names of the transformers library, and of the original repositories and other libraries."""

from vitkit.model_zoo.converters import (
    deformable_detr,
    detr,
    dfine,
    eomt,
    fairseq,
    language_models,
    maskformer,
    mvit,
    resnet,
    rf_detr,
    rt_detr,
    swin,
    transformer,
    vit,
)

# A file has the first format whose marks it contains, so models precede the backbones that are their parts.
TRANSFORMERS = [
    form
    for file in (
        *(detr, deformable_detr, rt_detr, dfine, rf_detr, maskformer, eomt),
        *(vit, resnet, swin, transformer, language_models),
    )
    for form in file.TRANSFORMERS
]
"""The formats of the transformers library."""
OFFICIAL = [
    form
    for file in (
        *(detr, deformable_detr, rt_detr, dfine, rf_detr, maskformer, eomt),
        *(vit, resnet, mvit, swin, transformer, fairseq),
    )
    for form in file.OFFICIAL
]
"""The formats of the original repositories and of other libraries."""
