"""The formats of the transformers library."""

from vitkit.model_zoo.dfine import TRANSFORMERS_DFINE
from vitkit.model_zoo.formats import Format
from vitkit.model_zoo.rf_detr import transformers_formats as rf_detr_formats
from vitkit.model_zoo.transformers_backbones import RESNET, SWIN, SWIN_V2, TIMESFORMER, VIT
from vitkit.model_zoo.transformers_detectors import DEFORMABLE_DETR, DETR, DETR_WITH_MASKS
from vitkit.model_zoo.transformers_masks import MASK2FORMER_RESNET, MASK2FORMER_SWIN, MASKFORMER_RESNET, MASKFORMER_SWIN
from vitkit.model_zoo.transformers_rt_detr import RT_DETR, RT_DETR_V2
from vitkit.model_zoo.transformers_text import MARIAN

_PATCHES = ".embeddings.patch_embeddings.projection.weight"
_MASK2FORMER = ("model.transformer_module.queries_features.weight", "model.pixel_level_module.decoder.level_embed")
_MASKFORMER = ("model.transformer_module.queries_embedder.weight", "model.pixel_level_module.decoder.fpn.stem.0.weight")
_OUR_MASK2FORMER = ("head.query_feat.weight", "neck.level_embed")
_OUR_MASKFORMER = ("head.query_embed.weight", "neck.top.0.weight", "head.decoder.norm.weight")
_RT_DETR = (
    "model.backbone.model.embedder.embedder.2.convolution.weight",
    "model.encoder_input_proj.0.0.weight",
    "model.enc_score_head.weight",
)
_OUR_RT_DETR = ("backbone.conv1.6.weight", "neck.pan_blocks.0.conv1.0.weight", "head.proposals.class_embed.weight")
_RESNET, _SWIN = "backbone.conv1.weight", "backbone.layers.0.blocks.0.attn.relative_position_bias_table"


def formats(coco: tuple[str, ...], coco_panoptic: tuple[str, ...]) -> list[Format]:
    """Return the formats; a file has the first one whose marks it contains.

    Args:
        coco, coco_panoptic: the classes that the published detectors were trained on.
    """
    return [
        Format(
            "transformers RT-DETRv2",
            (*_RT_DETR, "model.decoder.layers.0.encoder_attn.n_points_scale"),
            RT_DETR_V2,
            "RTDETRv2",
            _OUR_RT_DETR,
            coco,
        ),
        Format(
            "transformers D-FINE",
            ("model.decoder.pre_bbox_head.layers.0.weight", "model.decoder.lqe_layers.0.reg_conf.layers.0.weight"),
            TRANSFORMERS_DFINE,
            "DFINE",
            ("backbone.net.stem.stem1.conv.weight", "head.quality_embed.0.reg_conf.layers.0.weight"),
            coco,
        ),
        Format("transformers RT-DETR", _RT_DETR, RT_DETR, "RTDETR", _OUR_RT_DETR, coco),
        Format(
            "transformers DETR, with masks",
            ("detr.class_labels_classifier.weight", "detr.model.query_position_embeddings.weight"),
            DETR_WITH_MASKS,
            "DETRSegmentation",
            ("neck.projections.res5.weight", _RESNET),
            coco_panoptic,
        ),
        Format(
            "transformers DETR",
            (
                "class_labels_classifier.weight",
                "model.query_position_embeddings.weight",
                "model.input_projection.weight",
            ),
            DETR,
            "DETR",
            ("neck.projections.res5.weight", _RESNET),
            coco,
        ),
        Format(
            "transformers Deformable DETR",
            ("model.level_embed", "model.input_proj.0.0.weight"),
            DEFORMABLE_DETR,
            "DeformableDETR",
            ("neck.levels.0.0.weight", _RESNET),
            coco,
        ),
        *rf_detr_formats(coco),
        Format(
            "transformers Mask2Former, Swin",
            (*_MASK2FORMER, _PATCHES),
            MASK2FORMER_SWIN,
            "Mask2Former",
            (*_OUR_MASK2FORMER, _SWIN),
        ),
        Format(
            "transformers Mask2Former", _MASK2FORMER, MASK2FORMER_RESNET, "Mask2Former", (*_OUR_MASK2FORMER, _RESNET)
        ),
        Format(
            "transformers MaskFormer, Swin",
            (*_MASKFORMER, _PATCHES),
            MASKFORMER_SWIN,
            "MaskFormer",
            (*_OUR_MASKFORMER, _SWIN),
        ),
        Format("transformers MaskFormer", _MASKFORMER, MASKFORMER_RESNET, "MaskFormer", (*_OUR_MASKFORMER, _RESNET)),
        Format(
            "transformers TimeSformer",
            (".embeddings.position_embeddings", ".encoder.layer.0.attention.attention.qkv.weight"),
            TIMESFORMER,
            "TimeSformer",
        ),
        Format(
            "transformers Swin V2",
            (_PATCHES, ".encoder.layers.0.blocks.0.attention.self.logit_scale"),
            SWIN_V2,
            "SwinV2",
        ),
        Format("transformers Swin", (_PATCHES, ".encoder.layers.0.blocks.0.layernorm_before.weight"), SWIN, "Swin"),
        Format(
            "transformers ViT",
            (".embeddings.cls_token", ".embeddings.position_embeddings", _PATCHES, ".0.layernorm_before.weight"),
            VIT,
            "ViT",
            ("cls_token",),
        ),
        Format(
            "transformers ResNet",
            (".embedder.embedder.convolution.weight", ".encoder.stages.0.layers.0.layer.0.convolution.weight"),
            RESNET,
            "ResNet",
        ),
        Format(
            "transformers Marian",
            (
                "model.encoder.layers.0.self_attn_layer_norm.weight",
                "model.decoder.layers.0.encoder_attn_layer_norm.weight",
                "final_logits_bias",
            ),
            MARIAN,
            "Transformer",
        ),
    ]
