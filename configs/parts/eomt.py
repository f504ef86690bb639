"""The image transforms of EoMT (Kerssies et al. 2025, appendix A, https://arxiv.org/abs/2503.19108).

Two details differ: the original draws a crop again that shows no object, which is trained on here; and the colors are
changed in the ranges of `ColorDistortion`, where the original turns the hue by half as much at most.
"""


def fitted_to_square(data, size):
    """Train on jittered crops padded with black; evaluate images fitted into the square. Changes `data` in place."""
    data["train"]["transforms"] = dict(type="LargeScaleJitter", size=size, pad_value=0)
    data["val"]["transforms"] = dict(type="EvalResize", short_side=size, max_size=size, rounding="nearest")
    return data


def covering_square(data, size):
    """Train on jittered crops with changed colors; evaluate with the short side at `size`. Changes `data` in place."""
    data["train"]["transforms"] = dict(
        type="LargeScaleJitter", size=size, scale_range=[0.5, 2.0], pad_value=0, color_probability=1.0
    )
    data["val"]["transforms"] = dict(type="EvalResize", short_side=size, max_size=None, rounding="nearest")
    return data
