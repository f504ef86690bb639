"""Prepares a run that trains low-rank updates of a model's weights."""

import logging

from torch import nn

from vitkit.engine.preparation import Preparation, Start
from vitkit.errors import ConfigError
from vitkit.logging import print_line
from vitkit.nn.lora import LoRA
from vitkit.protocols.model import Model
from vitkit.text_format import pluralize
from vitkit.weights.contents import LORA

logger = logging.getLogger("vitkit")


class LoRARun(Preparation):
    """LoRA in a run.

    Raises:
        ConfigError: the model is one of pretraining, or a pattern matches nothing.
    """

    def __init__(self, model: Model, start: Start):
        super().__init__(model, start)
        if model.trained_backbone is not None:
            raise ConfigError(
                f"train.lora: {type(model).__name__} trains a backbone for other models, which take all its "
                "weights. Leave it out."
            )
        self.lora = LoRA(**(start.settings.lora or {}))
        trained = self.lora.list_trained_names(model)
        self._constructed = {
            name: value.detach().clone()
            for name, value in model.named_parameters()
            if value.dim() > 1 and name not in trained
        }
        self.about = {LORA: {"rank": self.lora.rank, "alpha": self.lora.alpha}}

    @classmethod
    def is_needed(cls, model: Model, start: Start) -> bool:
        """Return whether the run's settings have LoRA."""
        return start.settings.lora is not None

    def begin(self, model: Model) -> None:
        """Check that the frozen weights of a new run have been loaded.

        Raises:
            ConfigError: all are random.
        """
        random = [name for name, value in self._constructed.items() if value.equal(model.get_parameter(name).cpu())]
        if random and len(random) == len(self._constructed):
            raise ConfigError(
                "train.lora: the frozen weights would be random. Start from weights (--init), or set "
                "model.backbone.pretrained."
            )
        if random:
            logger.warning(
                f"train.lora: {pluralize(len(random), 'parameters', 'are')} frozen but not in the weights that the run "
                f"starts from, such as {random[0]}, and stays random. Name it in train.lora.train."
            )

    def finish(self, model: nn.Module) -> None:
        """Add the pairs to a model, and freeze its weights.

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
