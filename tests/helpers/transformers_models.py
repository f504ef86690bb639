"""Small models of the transformers library with random weights, for tests."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitkit.ops.images import IMAGENET_MEAN, IMAGENET_STD

_DETECTOR = dict(
    encoder_layers=1, decoder_layers=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=5, num_labels=3,
    encoder_attention_heads=2, decoder_attention_heads=2, d_model=32,
)  # fmt: skip
_TIMM = dict(backbone="resnet18", use_timm_backbone=True, use_pretrained_backbone=False)
_STAGES = ["stage1", "stage2", "stage3", "stage4"]
_RESNET = dict(depths=[2, 2, 2, 2], layer_type="basic", hidden_sizes=[64, 128, 256, 512])
_SWIN = dict(embed_dim=8, depths=[2, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4, image_size=128)
_MASKS = dict(feature_size=32, mask_feature_size=16, num_labels=3, num_queries=5, hidden_dim=32)
_MASKED = dict(
    encoder_layers=1, decoder_layers=3, num_attention_heads=2, dim_feedforward=16, encoder_feedforward_dim=16
)
_PATCHES = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32, num_labels=3,
    layer_norm_eps=1e-6,
)  # fmt: skip
_MARIAN = dict(
    vocab_size=20, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=16,
    decoder_attention_heads=2, decoder_ffn_dim=16, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    scale_embedding=True, max_position_embeddings=16,
)  # fmt: skip
_BERT = dict(
    vocab_size=110, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=20,
)  # fmt: skip
_GPT2 = dict(
    vocab_size=30, n_embd=16, n_layer=2, n_head=2, n_positions=20, bos_token_id=3, eos_token_id=3,
    layer_norm_epsilon=1e-6,
)  # fmt: skip
TEXT_MODELS = ("marian", "marian_swish", "bert", "bert_untied", "gpt2", "gpt2_untied")


def _detr(transformers, name="DetrForObjectDetection", **options):
    return getattr(transformers, name)(transformers.DetrConfig(**_DETECTOR | options))


def _deformable(transformers, **options):
    config = transformers.DeformableDetrConfig(**_DETECTOR | _TIMM, two_stage_num_proposals=5, **options)
    return transformers.DeformableDetrForObjectDetection(config)


def _rt_detr(transformers, version="", **options):
    backbone = transformers.RTDetrResNetConfig(**_RESNET, out_indices=[2, 3, 4])
    config = getattr(transformers, f"RTDetr{version}Config")(
        backbone_config=backbone, **_DETECTOR | dict(num_queries=20), encoder_hidden_dim=32, hidden_expansion=0.5,
        decoder_in_channels=[32] * 3, encoder_in_channels=[128, 256, 512], **options,
    )  # fmt: skip
    return getattr(transformers, f"RTDetr{version}ForObjectDetection")(config)


def _d_fine(transformers, **options):
    channels, blocks, layers = [64, 256, 512, 1024], [1, 1, 2, 1], [3, 3, 3, 3]
    backbone = transformers.HGNetV2Config(
        stem_channels=[3, 16, 16], stage_in_channels=[16, 64, 256, 512], stage_mid_channels=[16, 32, 64, 128],
        stage_out_channels=channels, hidden_sizes=channels, stage_num_blocks=blocks, depths=blocks,
        stage_numb_of_layers=layers, use_learnable_affine_block=True, out_indices=[3, 4],
    )  # fmt: skip
    config = transformers.DFineConfig(
        backbone_config=backbone, **_DETECTOR | dict(num_queries=20), encoder_hidden_dim=32, hidden_expansion=0.5,
        depth_mult=0.34, encoder_in_channels=channels[2:], decoder_in_channels=[32] * 2, feat_strides=[16, 32],
        encode_proj_layers=[1], num_feature_levels=2, reg_scale=8.0, **dict(decoder_n_points=[2, 4]) | options,
    )  # fmt: skip
    return transformers.DFineForObjectDetection(config)


def _deimv2(transformers, backbone, strides=(8, 16, 32), **options):
    levels = len(strides)
    config = transformers.Deimv2Config(
        backbone_config=backbone, **_DETECTOR | dict(num_queries=20), encoder_hidden_dim=32, hidden_expansion=0.5,
        depth_mult=0.34, decoder_in_channels=[32] * levels, feat_strides=list(strides),
        encode_proj_layers=[levels - 1], num_feature_levels=levels,
        **dict(encoder_in_channels=[32] * levels, decoder_n_points=[3, 6, 3][-levels:]) | options,
    )  # fmt: skip
    return transformers.Deimv2ForObjectDetection(config)


def _deimv2_atto(transformers):
    backbone = transformers.HGNetV2Config(
        stem_channels=[3, 16, 16], stage_in_channels=[16, 64, 256], stage_mid_channels=[16, 32, 64],
        stage_out_channels=[64, 256, 256], hidden_sizes=[64, 256, 256], stage_num_blocks=[1, 1, 1], depths=[1, 1, 1],
        stage_numb_of_layers=[3, 3, 3], stage_downsample=[False, True, True], stage_light_block=[False, False, True],
        stage_kernel_size=[3, 3, 3], use_learnable_affine_block=True, out_features=["stage3"],
    )  # fmt: skip
    return _deimv2(
        transformers, backbone, (16, 32), encoder_type="lite", encoder_in_channels=[256], use_gateway=False,
        share_bbox_head=True, decoder_n_points=[4, 2], decoder_activation_function="silu",
    )  # fmt: skip


def _deimv2_vit(transformers, vit, **options):
    backbone = transformers.DINOv3ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64,
        out_features=["stage1", "stage2", "stage4"], **vit,
    )  # fmt: skip
    return _deimv2(transformers, backbone, encoder_has_trailing_conv=False, **options)


def _as_published(model):
    """Turn the library's DEIMv2, whose layers before the selection are the identity, into the paper's: without these,
    positions of queries once, one activation in all heads, and no norm of the last map if there is none of the others.
    """
    model = copy.deepcopy(model)
    model.model.enc_output = nn.Identity()
    for key, module in model.named_modules():
        if type(module).__name__ == "Deimv2MLP" and not key.startswith("model.encoder."):
            module.act = nn.SiLU() if model.config.decoder_activation_function == "silu" else nn.ReLU()
    positions: list[Tensor] = []

    def embed_once(embed: nn.Module, boxes: tuple[Tensor], output: Tensor) -> Tensor:
        positions.append(output)
        return positions[0]

    model.model.decoder.query_pos_head.register_forward_hook(embed_once)
    backbone = model.config.backbone_config
    if backbone.model_type == "dinov3_vit" and not backbone.apply_layernorm:
        model.model.conv_encoder.backbone.norm = nn.Identity()
    return model


def _rf_detr(transformers, name="RfDetrForObjectDetection", blocks=4, **options):
    backbone = transformers.RfDetrDinov2Config(
        hidden_size=32, num_attention_heads=2, num_hidden_layers=blocks, image_size=64, patch_size=16,
        num_windows=2, out_features=["stage2", "stage4"],
    )  # fmt: skip
    config = transformers.RfDetrConfig(
        backbone_config=backbone, d_model=32, decoder_n_points=2, decoder_layers=2, decoder_ffn_dim=16,
        decoder_self_attention_heads=2, decoder_cross_attention_heads=4, num_queries=5, num_labels=3,
        intermediate_size=128, layer_norm_eps=1e-6, **dict(group_detr=2) | options,
    )  # fmt: skip
    return getattr(transformers, name)(config)


def _resnet(transformers):
    return transformers.ResNetConfig(**_RESNET, out_features=_STAGES)


def _swin(transformers):
    return transformers.SwinConfig(**_SWIN, out_features=_STAGES)


def _maskformer(transformers, backbone):
    decoder = transformers.DetrConfig(**{key: value for key, value in _DETECTOR.items() if key != "num_labels"})
    config = transformers.MaskFormerConfig(
        fpn_feature_size=32, mask_feature_size=16, num_labels=3, backbone_config=backbone, decoder_config=decoder
    )
    return transformers.MaskFormerForInstanceSegmentation(config)


def _mask2former(transformers, backbone):
    config = transformers.Mask2FormerConfig(backbone_config=backbone, **_MASKS | _MASKED)
    return transformers.Mask2FormerForUniversalSegmentation(config)


def _timesformer(transformers, **options):
    return transformers.TimesformerForVideoClassification(
        transformers.TimesformerConfig(**_PATCHES, num_frames=2, **options)
    )


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "detr": lambda t: _detr(t, **_TIMM),
    "detr_own_resnet": lambda t: _detr(t, use_timm_backbone=False, backbone_config=_resnet(t)),
    "detr_masks": lambda t: _detr(
        t, "DetrForSegmentation", **_TIMM, d_model=128, encoder_attention_heads=8, decoder_attention_heads=8
    ),
    "deformable_detr": _deformable,
    "deformable_detr_refine": lambda t: _deformable(t, with_box_refine=True),
    "deformable_detr_two_stage": lambda t: _deformable(t, with_box_refine=True, two_stage=True),
    "rt_detr": _rt_detr,
    "rt_detr_v2": lambda t: _rt_detr(t, "V2", decoder_n_points=3, decoder_offset_scale=0.25),
    "rt_detr_v2_discrete": lambda t: _rt_detr(t, "V2", decoder_method="discrete", num_denoising=0),
    "d_fine": _d_fine,
    "d_fine_unfrozen": lambda t: _d_fine(t, freeze_backbone_batch_norms=False, decoder_n_points=3, num_denoising=0),
    "deimv2_atto": _deimv2_atto,
    "deimv2_n": lambda t: _deimv2(t, _d_fine(t).config.backbone_config, (16, 32), freeze_backbone_batch_norms=False),
    "deimv2_tiny": lambda t: _deimv2_vit(
        t, dict(apply_layernorm=False, key_bias=True, layer_norm_eps=1e-6, pos_embed_rescale=None), num_denoising=0
    ),
    "deimv2_dinov3": lambda t: _deimv2_vit(
        t,
        dict(use_gated_mlp=True, hidden_act="silu", num_register_tokens=4, layerscale_value=0.1),
        decoder_activation_function="silu",
    ),
    "rf_detr": _rf_detr,
    "rf_detr_masks": lambda t: _rf_detr(t, "RfDetrForInstanceSegmentation"),
    "rf_detr_ungrouped": lambda t: _rf_detr(t, group_detr=1, c2f_num_blocks=1),
    # As in the library's default settings, no map comes after the last block.
    "rf_detr_unused_block": lambda t: _rf_detr(t, blocks=5),
    "maskformer_swin": lambda t: _maskformer(t, _swin(t)),
    "maskformer_resnet": lambda t: _maskformer(t, _resnet(t)),
    "mask2former_swin": lambda t: _mask2former(t, _swin(t)),
    "mask2former_resnet": lambda t: _mask2former(t, _resnet(t)),
    "swin": lambda t: t.SwinForImageClassification(t.SwinConfig(**_SWIN, num_labels=3)),
    "swinv2": lambda t: t.Swinv2ForImageClassification(t.Swinv2Config(**_SWIN, num_labels=3)),
    "vit": lambda t: t.ViTForImageClassification(t.ViTConfig(**_PATCHES)),
    "resnet": lambda t: t.ResNetForImageClassification(t.ResNetConfig(**_RESNET, num_labels=3)),
    "timesformer_divided": _timesformer,
    "timesformer_joint": lambda t: _timesformer(t, attention_type="joint_space_time"),
    "timesformer_space": lambda t: _timesformer(t, attention_type="space_only"),
    "marian": lambda t: t.MarianMTModel(t.MarianConfig(**_MARIAN, activation_function="relu")),
    "bert": lambda t: t.BertForMaskedLM(t.BertConfig(**_BERT)),
    "bert_untied": lambda t: t.BertForMaskedLM(t.BertConfig(**_BERT, tie_word_embeddings=False)),
    "gpt2": lambda t: t.GPT2LMHeadModel(t.GPT2Config(**_GPT2)),
    "gpt2_untied": lambda t: t.GPT2LMHeadModel(t.GPT2Config(**_GPT2, tie_word_embeddings=False)),
    "marian_swish": lambda t: t.MarianMTModel(t.MarianConfig(**_MARIAN, activation_function="swish")),
}


def build_theirs(transformers, name: str, *, num_labels: int = 3) -> nn.Module:
    """Build a model with random values, so that every weight and statistic affects its outputs."""
    torch.manual_seed(0)
    model = BUILDERS[name](transformers)
    if num_labels != model.config.num_labels:
        config = model.config
        config.num_labels = num_labels
        model = type(model)(config)
    model.eval()
    for key, parameter in model.named_parameters():
        if name.startswith(("d_fine", "deimv2")) and parameter.dim() > 1:
            nn.init.kaiming_normal_(parameter, nonlinearity="linear")  # smaller ones leave maps nearly constant
        elif "embed_positions" not in key and not key.endswith(("reg_scale", ".up")):
            is_scale = ("norm" in key.lower() and "weight" in key) or key.endswith("lab.scale")
            nn.init.normal_(parameter, mean=float(is_scale), std=0.1)
    if name.startswith("deimv2"):
        _make_loadable(model)
    for key, buffer in model.named_buffers():
        if key.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
        elif key.endswith("running_mean"):
            buffer.normal_(std=0.1)
    return model


@torch.no_grad()
def _make_loadable(model: nn.Module) -> None:
    """Set what the library's DEIMv2 has besides the paper's to what it is in converted files."""
    linear, norm = model.model.enc_output
    nn.init.eye_(linear.weight)
    nn.init.zeros_(linear.bias)
    nn.init.ones_(norm.weight)
    nn.init.zeros_(norm.bias)
    backbone = model.config.backbone_config
    if backbone.model_type == "dinov3_vit" and not backbone.apply_layernorm:
        for key, parameter in model.named_parameters():
            if key.endswith("lambda1"):
                nn.init.ones_(parameter)


@torch.no_grad()
def compare(theirs: nn.Module, ours: nn.Module) -> None:
    """Assert that both models have the same outputs for random inputs."""
    torch.manual_seed(1)
    kind = theirs.config.model_type
    if kind == "marian":
        source, target = torch.randint(3, 20, (2, 7)), torch.randint(3, 20, (2, 5))
        expected = theirs(input_ids=source, attention_mask=torch.ones_like(source), decoder_input_ids=target).logits
        return _close(ours(source, None, target)["logits"], expected)
    if kind == "bert":
        tokens, padding = torch.randint(4, 110, (2, 7)), torch.zeros(2, 7, dtype=torch.bool)
        padding[1, 4:] = True
        with_class = torch.nn.functional.pad(tokens, (1, 0), value=2)  # vitkit's model adds this token by itself
        attended = torch.nn.functional.pad(~padding, (1, 0), value=True)
        expected = theirs(input_ids=with_class, attention_mask=attended.long()).logits[:, 1:]
        return _close(ours.predict(tokens, padding), expected)
    if kind == "gpt2":
        tokens = torch.randint(4, 30, (2, 7))
        return _close(ours(tokens)["logits"], theirs(input_ids=tokens).logits)
    if kind == "timesformer":
        clips = torch.randn(2, 2, 3, 32, 32)
        expected = theirs(clips).logits
        if theirs.config.attention_type == "space_only":
            # It gives the logits of each frame. The original averages the frames' class tokens before the last norm.
            inner = theirs.timesformer
            tokens = inner.encoder(inner.embeddings(clips)).last_hidden_state[:, 0]
            torch.testing.assert_close(theirs.classifier(inner.layernorm(tokens)), expected)
            expected = theirs.classifier(inner.layernorm(tokens.view(2, 2, -1).mean(dim=1)))
        return _close(ours.backbone(clips.transpose(1, 2)), expected)
    images = torch.randn(2, 3, 128, 160)
    if kind in ("swin", "swinv2", "vit"):
        images = images[..., : theirs.config.image_size, : theirs.config.image_size]
    if kind == "rf_detr":  # the library confuses height and width
        images = images[..., :64, :64]
    is_real_time = kind.startswith(("rt_detr", "d_fine", "deimv2"))
    if kind == "deimv2":
        theirs = _as_published(theirs)
    if (
        is_real_time or kind == "rf_detr"
    ):  # rounding would change the order of locations whose scores are nearly the same
        theirs, ours, images = theirs.double(), ours.double(), images.double()
    expected = theirs(images)
    if (
        is_real_time and theirs.config.backbone_config.model_type != "dinov3_vit"
    ):  # these have pixels without statistics, and vitkit's models are given normalized ones
        mean, std = (images.new_tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
        images = (images - mean) / std
    outputs = ours(images)
    if "class_queries_logits" in expected:
        _close(outputs["pred_logits"], expected.class_queries_logits)
        return _close(outputs["pred_masks"], expected.masks_queries_logits)
    if "logits" in outputs:
        return _close(outputs["logits"], expected.logits)
    for key, value in (("pred_logits", expected.logits), ("pred_boxes", expected.pred_boxes)):
        _close(outputs[key], value)
    if "pred_masks" in outputs:
        _close(outputs["pred_masks"], expected.pred_masks)


def _close(outputs: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max())
    assert expected.std() > 1e-3 * scale  # the outputs vary, so that the comparison is meaningful
    torch.testing.assert_close(outputs.to(expected.dtype), expected, atol=2e-5 * max(scale, 1.0), rtol=1e-4)
