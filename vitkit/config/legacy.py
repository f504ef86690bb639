"""Converts config keys of earlier versions, which saved runs may contain."""

from typing import Any


def upgrade(cfg: dict[str, Any]) -> None:
    """Rename, in place, the outdated names in a saved config; an up-to-date config stays unchanged."""
    optimizer, schedule = cfg.get("optimizer"), cfg.get("schedule")
    if isinstance(optimizer, dict):
        kinds = []
        if optimizer.pop("decay_norms_and_biases", True) is False:
            kinds.append("vectors")
        if optimizer.pop("decay_norms_and_embeddings", True) is False:
            kinds += ["norms", "embeddings"]
        if names := [*kinds, *optimizer.pop("no_decay", ())]:
            optimizer["no_weight_decay"] = names
    if isinstance(schedule, dict) and schedule.get("type") == "StepLR":
        schedule["type"] = "MultiStepLR"
        if "drop_at_epoch" in schedule:
            schedule["drop_at_epochs"] = [schedule.pop("drop_at_epoch")]
