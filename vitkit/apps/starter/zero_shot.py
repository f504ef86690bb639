"""Score a text-prompted detector on own data before anything is trained, as a baseline."""

from collections.abc import Mapping
from typing import Any

from vitkit.apps.inference.load import TrainedModel, find_trained
from vitkit.apps.training import api
from vitkit.errors import ConfigError
from vitkit.registry import MODELS


def find_text_prompted(name: str) -> TrainedModel:
    """Return the config and the weights of a text-prompted detector, which are downloaded if they have to be.

    Raises:
        ConfigError: it is another kind of model, or there is no such one.
    """
    found = find_trained(name)
    if "text" not in MODELS.resolve(found.config["model"])[0].takes:
        raise ConfigError(
            f"zero_shot={name!r}: takes no text, so it can find only the classes that it was trained on. Give a "
            "text-prompted detector, such as grounding_dino_swin_tiny."
        )
    return found


def score_zero_shot(found: TrainedModel, config: Mapping[str, Any], *, device: str) -> dict[str, float]:
    """Return the metrics of a text-prompted detector that looks for the class names of a config's validation data.

    Raises:
        VitkitError: a class name cannot be a phrase, or the images cannot be evaluated.
    """
    own, theirs = config["data"], found.config["data"]
    kept = {key: own[key] for key in ("root", "max_image_pixels", "classes") if key in own}
    val = own["val"] | {"transforms": theirs["val"].get("transforms")}
    data = kept | {"train": own["train"], "val": val, "prompts": {"negatives": None}}
    content = {**found.config, "data": data, "evaluator": config["evaluator"]}
    return api.test(content, str(found.weights), device=device).metrics
