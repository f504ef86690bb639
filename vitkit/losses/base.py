"""What all criteria have."""

from torch import nn

from vitkit.distributed import RatioMeter


class Criterion(nn.Module):
    """Base of criteria: `criterion(outputs, targets)` returns weighted losses, whose sum is minimised.

    The losses have the same keys for any targets, even for none. Registered in CRITERIA.
    """

    class_activation: str | None = None
    """The class logits that the criterion expects: "softmax", whose last class is "no object", or "sigmoid", one for
    each class; None if it does not say."""

    meters: dict[str, RatioMeter]
    """Quantities other than losses that the criterion measures, such as the share of correct classes; {} by default."""

    def __init__(self):
        super().__init__()
        self.meters = {}
