"""Image backbones: `backbone(images) -> dict of feature maps`, fine to coarse."""
