"""The width of the small detectors in the ablations, which were measured before quickstart/detr became narrower."""


def wide_detr_settings():
    """Return overrides of quickstart/detr and quickstart/deformable_detr."""
    return {
        "model.backbone.base_channels": 64,
        "model.neck.out_channels": 128,
        "model.head.d_model": 128,
        "model.head.d_ffn": 512,
    }
