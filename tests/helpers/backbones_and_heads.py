"""The backbone families and the heads in tiny settings, to combine."""

BACKBONES = {
    "resnet": dict(type="ResNet", depth=18, pretrained=False),
    "vit": dict(type="ViT", d_model=32, depth=2, num_heads=2, image_size=64),
    "vit_windows": dict(
        type="ViTDet", d_model=32, depth=4, num_heads=2, image_size=64, window_size=2, relative_positions=None
    ),
    "swin": dict(type="Swin", embed_dim=16, depths=[1, 2, 1, 1], num_heads=[1, 2, 2, 4], window=3),
    "swinv2": dict(type="SwinV2", embed_dim=16, depths=[1, 2, 1, 1], num_heads=[1, 2, 2, 4], window=3),
    "mvit": dict(type="MViT", embed_dim=16, depths=[1, 1, 2, 1], num_heads=1, image_size=64),
    "lrnet": dict(type="LRNet", depth=26, kernel_size=3),
    "nonlocal": dict(type="NonLocalResNet", depth=50, pretrained=False, positions={"res4": [1]}),
    "timm": "timm/test_resnet.r160_in1k",
    "dinov2": dict(type="timm/vit_small_patch14_reg4_dinov2", patch_size=16),
    "dinov3": "timm/vit_small_patch16_dinov3",
}
HEADS = {
    "detr": dict(
        type="DETR",
        neck=dict(type="ChannelProjection", out_channels=32),
        head=dict(type="DETRHead", d_model=32, num_heads=2, d_ffn=32, num_encoder_layers=1, num_decoder_layers=2),
    ),
    "deformable_detr": dict(
        type="DeformableDETR",
        neck=dict(type="PyramidProjection", out_channels=32, num_levels=4, num_groups=4),
        head=dict(
            type="DeformableDETRHead",
            d_model=32,
            num_heads=2,
            num_points=2,
            d_ffn=32,
            num_encoder_layers=1,
            num_decoder_layers=2,
            refine_boxes=True,
            two_stage=True,
        ),
    ),
    "maskformer": dict(
        type="MaskFormer",
        neck=dict(type="FPNPixelDecoder", out_channels=32, mask_channels=16),
        head=dict(type="MaskFormerHead", d_model=32, num_heads=2, d_ffn=32, num_decoder_layers=2),
    ),
    "mask2former": dict(
        type="Mask2Former",
        neck=dict(type="DeformablePixelDecoder", out_channels=32, mask_channels=16, num_heads=2, num_layers=1),
        head=dict(type="Mask2FormerHead", d_model=32, num_heads=2, d_ffn=32, num_decoder_layers=3),
    ),
}
