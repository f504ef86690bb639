"""The weights that a LoRA run starts from, which its checkpoints name instead of containing them."""

import logging
from pathlib import Path
from typing import Any

from torch import nn

from vitkit.distributed import first_rank_first
from vitkit.errors import CheckpointError, ConfigError
from vitkit.logging import print_line
from vitkit.nn.lora import LoRA, LoRAOptions, base_entries
from vitkit.protocols.model import child
from vitkit.text_format import pluralize
from vitkit.weights.contents import LORA, is_of_lora
from vitkit.weights.loading import load_base
from vitkit.weights.lora import describe_base
from vitkit.weights.names import BACKBONE_WEIGHTS
from vitkit.weights.pretrained import pretraining_run
from vitkit.weights.reading import read_metadata

logger = logging.getLogger("vitkit")


class LoRARun:
    """LoRA in a run: what its checkpoints contain, and what they say about the rest.

    In this order: build it with the model as constructed, load the initial weights and call `begin`, or call `resume`;
    then call `add_pairs`, after which `left_out` is known.

    Args:
        init: weights of the whole model that a new run starts from; None: those that the backbone names.
    Raises:
        ConfigError: the model is one of pretraining, or a pattern matches nothing.
    """

    def __init__(self, model: nn.Module, options: LoRAOptions, init: str | Path | None):
        if hasattr(model, "trained_backbone"):
            raise ConfigError(
                f"train.lora: {type(model).__name__} trains a backbone for other models, which take all its "
                "weights. Leave it out."
            )
        self.lora = LoRA(**options)
        self.trained = self.lora.trained_names(model)
        self._init = init
        self._constructed = {name: value.clone() for name, value in model.state_dict().items()}
        self._saved: set[str] = set()
        self.about: dict[str, Any] = {"rank": self.lora.rank, "alpha": self.lora.alpha}
        """What checkpoints say about LoRA."""
        self.left_out: set[str] = set()
        """Names of the weights that checkpoints leave out."""

    def begin(self, model: nn.Module) -> None:
        """Note where the weights of a new run have come from.

        Raises:
            ConfigError: they are random.
        """
        source, part = self._init, ""
        if source is None:
            backbone = child(model, "backbone")
            source = backbone.pretrained_source() if hasattr(backbone, "pretrained_source") else None
            part = "backbone"
        elif (run := pretraining_run(source)) is not None:
            source, part = run / BACKBONE_WEIGHTS, "backbone"  # all that a model takes of such a run
        if source is None:
            raise ConfigError(
                "train.lora: the frozen weights would be random. Start from weights (--init), or set "
                "model.backbone.pretrained."
            )
        with first_rank_first():
            self.about["base"] = describe_base(source, part)
        # What the base lacks, such as a new part that `train` does not name, is saved in checkpoints.
        state = model.state_dict()
        unchanged = {name for name, value in self._constructed.items() if value.equal(state[name])}
        self._saved = {name for name in unchanged if state[name].is_floating_point()}
        frozen = [name for name, p in model.named_parameters() if p.dim() > 1 and name in self._saved - self.trained]
        if frozen:
            logger.warning(
                "train.lora: %s frozen but not in %s, such as %s, and stays random. Name it in train.lora.train.",
                pluralize(len(frozen), "parameters", "are"),
                source,
                frozen[0],
            )

    def resume(self, model: nn.Module, checkpoint: Path) -> None:
        """Load the weights that a checkpoint was trained on.

        Raises:
            CheckpointError: they are missing or differ, or it is not of a LoRA run.
        """
        saved = read_metadata(checkpoint)
        if not is_of_lora(saved):
            raise CheckpointError(f"{checkpoint}: is not of a run with train.lora. Resume with the run's own config.")
        self.about["base"] = saved[LORA]["base"]
        self._saved = set(saved["model"])
        with first_rank_first():
            load_base(model, self.about["base"], str(checkpoint))

    def add_pairs(self, model: nn.Module) -> None:
        """Add the pairs to a model with these weights, and freeze them.

        Raises:
            ConfigError: see `LoRA.add_to`.
        """
        layers = self.lora.add_to(model)
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
        in_pairs = sum(size for name, size in sizes.items() if ".lora." in name)
        base = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
        print_line(
            f"LoRA: {in_pairs:,} trainable parameters of rank {self.lora.rank} in {pluralize(len(layers), 'layers')}, "
            f"{sum(sizes.values()) - in_pairs:,} trained in full, {base:,} frozen"
        )
        self.left_out = base_entries(model, self.trained) - self._saved
