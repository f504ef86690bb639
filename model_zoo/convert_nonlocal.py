"""Key names of SlowFast's single-pathway ResNets (C2D, I3D, Slow), with and without non-local blocks."""

from vitkit.model_zoo.converter import Converter

CONVERTERS = [
    Converter(
        name="facebookresearch/SlowFast ResNet",
        marks=(".s1.pathway0_stem.conv.weight", ".s2.pathway0_res0.branch2.a.weight"),
        renames=(
            (r"(^|\.)s1\.pathway0_stem\.", r"\1stem."),
            (r"(^|\.)s([2-5])\.pathway0_(res|nonlocal)(\d+)\.", r"\1layers.res\2.\g<3>\4."),
            (r"(\.nonlocal\d+)\.bn\.", r"\1.norm."),
            (r"(^|\.)head\.projection\.", r"\1fc."),
        ),
    )
]
