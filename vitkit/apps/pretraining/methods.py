"""The methods of `vitkit.pretrain`: the config of each, and its requirements."""

from collections.abc import Mapping
from dataclasses import dataclass

from vitkit.backbones.vit import ViT
from vitkit.errors import ConfigError
from vitkit.registry import nearest

WANTED_STEPS = 1000
"""The least number of steps for which a step may have more images than fit into it at first."""


@dataclass(frozen=True)
class Method:
    """A way of learning without labels."""

    config: str
    """Its config in configs/pretrain, whose `config(...)` takes backbone, data, size, epochs and images_per_step."""
    text: str
    backbone: str
    """The default backbone."""
    sizes: Mapping[int, int]
    """Sides of the crops in pixels, the smallest first, each with the number of steps that it must leave time for."""
    images: Mapping[str, int]
    """Images in a step, on a processor ("cpu") and on an accelerator ("other")."""
    wanted_images: int = 0
    """Images that a step should have, and has if there is time for `WANTED_STEPS` of such steps."""
    size: str = "size"
    """The name of its config's argument for the side of the crops."""
    has_teacher: bool = False
    network: type | None = None
    """The class of the backbones that it can train; None: it trains any."""
    small: tuple[str, ...] = ()
    """Lines of the config that fit the published recipe, which is for millions of images, to a few hours."""


METHODS = {
    "distil": Method(
        "distillation",
        "a frozen teacher's features are learned",
        "resnet18",
        {128: 0, 160: 4000, 224: 8000},
        {"cpu": 16, "other": 128},
        has_teacher=True,
    ),
    "mae": Method(
        "mae",
        "a ViT reconstructs the patches that it does not see",
        "vit_tiny_patch16",
        {128: 0, 160: 8000, 224: 16000},
        {"cpu": 32, "other": 256},
        size="image_size",
        network=ViT,
        small=(
            "# A shallow decoder reconstructs worse, and is as good for fine-tuning (the paper's table 1).",
            'cfg["model"].update(decoder_d_model=192, decoder_depth=2, decoder_num_heads=6)',
            "# That of the recipe is proportional to the images of a step, and too low for so few.",
            'cfg["optimizer"]["lr"] = 5e-4',
        ),
    ),
    "dino": Method(
        "self_distillation",
        "a student predicts from any crop what its moving average sees in large ones",
        "resnet18",
        {128: 0, 160: 8000, 224: 16000},
        {"cpu": 16, "other": 64},
        wanted_images=64,
        small=(
            'cfg["data"]["train"]["transforms"].update(small_size=64, num_small=4)',
            "# An untrained backbone has nearly the same features for all photos; centered, they become uniform.",
            'cfg["model"]["batch_norm"] = True',
            'cfg["train"]["hooks"][0].update(teacher_temperature=0.02, warmup_teacher_temperature=0.02)',
            "# That of the recipe is proportional to the images of a step, and too low for so few.",
            'cfg["optimizer"]["lr"] = 0.03 if cfg["optimizer"]["type"] == "SGD" else 5e-4',
        ),
    ),
}


def choose_method(method: str | None, teacher: str | None) -> str:
    """Return the method: the one that is asked for, or "distil" if there is a teacher, else "dino".

    Raises:
        ConfigError: it is unknown, or a teacher is missing or superfluous.
    """
    method = method or ("dino" if teacher is None else "distil")
    if method not in METHODS:
        raise ConfigError(f"--method {method}: unknown. {nearest(method, METHODS)}")
    if METHODS[method].has_teacher and teacher is None:
        raise ConfigError(
            f"--method {method}: needs a teacher. Give one whose weights there are, such as --teacher "
            "vit_small_patch16_dino, resnet50=FILE or the folder of a run, or choose --method dino."
        )
    if teacher is not None and not METHODS[method].has_teacher:
        raise ConfigError(f"--teacher {teacher}: only --method distil has a teacher. Leave it out.")
    return method
