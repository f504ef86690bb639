"""Record mmdetection.json and .npz: small models of mmdetection 3.3.0 with weights made by rules, in float64.

Run:  pip install mmengine==0.10.7 mmcv-lite==2.1.0 terminaltables shapely six && pip install --no-deps mmdet==3.3.0
      python tests/golden/record_mmdetection.py

mmcv's compiled operators, which the models do not use on processors, are left out. tests/peers/test_mmdetection.py
compares the same models, built anew, with vitkit's.
"""

import copy
import json
import sys
from types import ModuleType

import numpy as np
import torch
from golden.weights import HERE, fill, make_input, rule_for

NAME, SIZE, PADDED = "mmdetection", (128, 160), (96, 128)
INPUT = dict(seed=f"input:{NAME}", kind="image", shape=[2, 3, *SIZE])
WIDTH, HEADS, QUERIES, CLASSES = 64, 4, 12, 7
"""Channels of the models, heads of their attentions, queries, and classes."""
RULES = {
    **dict.fromkeys(("fc_reg.", "fc_cls.", "cls_branches.", "cls_embed.", ".4.weight"), "linear:3"),
    **dict.fromkeys(("query_embedding.", "level_encoding."), "affine:0,1"),
}
"""Parts of names -> the rules of matrices that have another one than those of the same name elsewhere."""


def resnet(*maps):
    return dict(type="ResNet", depth=18, out_indices=maps, norm_cfg=dict(type="BN", requires_grad=False))


def swin(*maps):
    depths, heads = [1, 2, 1, 1], [1, 2, 4, 8]
    return dict(type="SwinTransformer", embed_dims=32, depths=depths, num_heads=heads, window_size=4, out_indices=maps)


def channels(backbone):
    base = 64 if backbone["type"] == "ResNet" else 32
    return [base << i for i in backbone["out_indices"]]


def attention(width=WIDTH, **more):
    return dict(embed_dims=width, num_heads=HEADS, dropout=0.0, batch_first=True, **more)


def layers(number, **attentions):
    width = attentions["self_attn_cfg"]["embed_dims"]
    act = dict(type="ReLU", inplace=True)
    ffn = dict(embed_dims=width, feedforward_channels=96, num_fcs=2, ffn_drop=0.0, act_cfg=act)
    return dict(num_layers=number, layer_cfg=dict(**attentions, ffn_cfg=ffn))


PIXELS = dict(type="DetDataPreprocessor", mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=True)
POSITIONS = dict(num_feats=WIDTH // 2, normalize=True)


def detr(backbone):
    one = dict(kernel_size=1, out_channels=WIDTH, act_cfg=None, norm_cfg=None, num_outs=1)
    decoder = layers(2, self_attn_cfg=attention(), cross_attn_cfg=attention())
    return dict(
        type="DETR", num_queries=QUERIES, data_preprocessor=PIXELS, backbone=backbone,
        neck=dict(type="ChannelMapper", in_channels=channels(backbone), **one),
        encoder=layers(2, self_attn_cfg=attention()), decoder=dict(decoder, return_intermediate=True),
        positional_encoding=POSITIONS, bbox_head=dict(type="DETRHead", num_classes=CLASSES, embed_dims=WIDTH),
    )  # fmt: skip


def deformable(kind, backbone, num_levels, positions, *, refine=False, two_stage=False, width=WIDTH, **more):
    levels = attention(width, num_levels=num_levels)
    one = dict(kernel_size=1, out_channels=width, act_cfg=None, norm_cfg=dict(type="GN", num_groups=32))
    decoder = layers(2, self_attn_cfg=attention(width), cross_attn_cfg=levels)
    focal = dict(type="FocalLoss", use_sigmoid=True)
    head = dict(type=f"{kind}Head", num_classes=CLASSES, embed_dims=width, sync_cls_avg_factor=True, loss_cls=focal)
    return dict(
        type=kind, num_queries=QUERIES, num_feature_levels=num_levels, with_box_refine=refine, as_two_stage=two_stage,
        data_preprocessor=PIXELS, backbone=backbone,
        neck=dict(type="ChannelMapper", in_channels=channels(backbone), num_outs=num_levels, **one),
        encoder=layers(2, self_attn_cfg=levels),
        decoder=dict(decoder, return_intermediate=True, post_norm_cfg=None),
        positional_encoding=dict(num_feats=width // 2, normalize=True) | positions,
        bbox_head=head, test_cfg=dict(max_per_img=50), **more,
    )  # fmt: skip


def mask_model(kind, backbone, things, stuff, pixel_decoder, decoder, **head):
    counts = dict(num_things_classes=things, num_stuff_classes=stuff)
    losses = dict(loss_cls=dict(type="CrossEntropyLoss", class_weight=[1.0] * (things + stuff) + [0.1]))
    losses |= dict(loss_mask=dict(type="FocalLoss"), loss_dice=dict(type="DiceLoss"))
    return dict(
        type=kind, data_preprocessor=PIXELS, backbone=backbone,
        panoptic_head=dict(
            type=f"{kind}Head", in_channels=channels(backbone), feat_channels=WIDTH, out_channels=WIDTH, **counts,
            num_queries=QUERIES, positional_encoding=POSITIONS, pixel_decoder=pixel_decoder,
            transformer_decoder=dict(decoder, return_intermediate=True), **losses, **head,
        ),
        panoptic_fusion_head=dict(type="MaskFormerFusionHead", **counts),
    )  # fmt: skip


def mask2former(backbone, things, stuff):
    norms = dict(norm_cfg=dict(type="GN", num_groups=32), act_cfg=dict(type="ReLU"))
    encoder = layers(2, self_attn_cfg=attention(num_levels=3, num_points=4))
    pixels = dict(type="MSDeformAttnPixelDecoder", num_outs=3, encoder=encoder, positional_encoding=POSITIONS, **norms)
    decoder = layers(3, self_attn_cfg=attention(), cross_attn_cfg=attention())
    head = dict(num_transformer_feat_level=3, strides=[4, 8, 16, 32])
    return mask_model("Mask2Former", backbone, things, stuff, pixels, decoder, **head)


def maskformer(backbone, things, stuff, *, encodes):
    pixels = dict(type="PixelDecoder", norm_cfg=dict(type="GN", num_groups=32), act_cfg=dict(type="ReLU"))
    if encodes:
        encoder = layers(2, self_attn_cfg=attention())
        pixels |= dict(type="TransformerEncoderPixelDecoder", encoder=encoder, positional_encoding=POSITIONS)
    decoder = layers(2, self_attn_cfg=attention(), cross_attn_cfg=attention())
    head = dict(enforce_decoder_input_project=not encodes)
    return mask_model("MaskFormer", backbone, things, stuff, pixels, decoder, **head)


PLAIN, SINES = dict(offset=-0.5), dict(offset=0.0, temperature=20)
TWO_STAGE = dict(refine=True, two_stage=True, width=256)
"""mmdetection's first stage is for 256 channels only."""
NOISE = dict(label_noise_scale=0.5, box_noise_scale=1.0, group_cfg=dict(dynamic=True, num_dn_queries=10))
MODELS = {
    "detr": detr(resnet(3)),
    "deformable_detr": deformable("DeformableDETR", resnet(1, 2, 3), 4, PLAIN),
    "deformable_detr_refine": deformable("DeformableDETR", swin(1, 2, 3), 4, PLAIN, refine=True),
    "deformable_detr_two_stage": deformable("DeformableDETR", swin(1, 2, 3), 4, PLAIN, **TWO_STAGE),
    "dino": deformable("DINO", swin(0, 1, 2, 3), 5, SINES, **TWO_STAGE, dn_cfg=NOISE),
    "mask2former_instance": mask2former(resnet(0, 1, 2, 3), CLASSES, 0),
    "mask2former_panoptic": mask2former(swin(0, 1, 2, 3), 4, 3),
    "maskformer_panoptic": maskformer(resnet(0, 1, 2, 3), 4, 3, encodes=True),
    "maskformer_without_encoder": maskformer(swin(0, 1, 2, 3), 4, 3, encodes=False),
}
"""Name -> the config of a model of mmdetection."""


def fill_state(shapes):
    """Return weights of these names and shapes."""

    def rule(name, shape):
        own = next((rule for part, rule in RULES.items() if part in name), None)
        return own if own and len(shape) > 1 else rule_for(name, shape)

    return {name: torch.from_numpy(fill(name, shape, "float32", rule(name, shape))) for name, shape in shapes.items()}


def build(config):
    """Return a model of mmdetection with weights made by rules, in evaluation."""
    extension = ModuleType("mmcv._ext")
    extension.__getattr__ = lambda name: None if not name.startswith("__") else (_ for _ in ()).throw(AttributeError)
    sys.modules.setdefault("mmcv._ext", extension)
    import mmdet.models  # noqa: F401, which registers the models
    from mmdet.registry import MODELS as REGISTRY
    from mmengine.config import ConfigDict
    from mmengine.registry import init_default_scope

    init_default_scope("mmdet")
    model = REGISTRY.build(ConfigDict(copy.deepcopy(config))).eval()
    # Layers that share a head have it under several names, of which the last one counts.
    names = {id(value): name for name, value in model.state_dict(keep_vars=True).items()}
    state = model.state_dict(keep_vars=True)
    filled = fill_state({names[id(v)]: list(v.shape) for v in state.values() if v.is_floating_point()})
    model.load_state_dict({name: filled.get(names[id(v)], v) for name, v in state.items()})
    return model.double()


@torch.no_grad()
def run(model, images):
    """Return the last layer's logits, and boxes or masks; the second image is padded if the model regards it."""
    from mmdet.structures import DetDataSample

    samples = [DetDataSample(metainfo=dict(img_shape=size, batch_input_shape=SIZE)) for size in (SIZE, PADDED)]
    maps = model.extract_feat(images)
    if hasattr(model, "panoptic_head"):
        samples[1].set_metainfo(dict(img_shape=SIZE))
        logits, masks = model.panoptic_head(maps, samples)
        return dict(pred_logits=logits[-1], pred_masks=masks[-1])
    logits, boxes = model.bbox_head(**model.forward_transformer(maps, samples))
    return dict(pred_logits=logits[-1], pred_boxes=boxes[-1])


def make_images():
    """Return the images, the second of which is padded."""
    images = torch.from_numpy(make_input(INPUT)).double()
    images[1, :, PADDED[0] :] = 0
    images[1, :, :, PADDED[1] :] = 0
    return images


def main():
    content, arrays = {}, {}
    for name, config in MODELS.items():
        model = build(config)
        shapes = {key: [*value.shape] for key, value in model.state_dict().items() if value.is_floating_point()}
        content[name] = shapes
        for output, value in run(model, make_images()).items():
            arrays[f"{name}.{output}"] = value.numpy()[..., ::4, ::4] if output == "pred_masks" else value.numpy()
    text = json.dumps(content, separators=(",", ":")).replace('},"', '},\n"')
    (HERE / f"{NAME}.json").write_text(text + "\n", encoding="utf-8")
    np.savez_compressed(HERE / f"{NAME}.npz", **arrays)


if __name__ == "__main__":
    main()
