"""One layer of a published head replaced: DETR whose cross-attention has a gate."""
