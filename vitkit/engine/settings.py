"""The `train` section of a config."""

from dataclasses import dataclass
from typing import Literal

from vitkit.registry import SECTIONS


@SECTIONS.register(name="train")
@dataclass(kw_only=True)
class TrainSettings:
    """How a run is trained, whatever the task."""

    epochs: int
    seed: int = 42
    clip_grad_norm: float | None = None
    """Largest norm of all gradients together; None leaves them."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Under "bf16" and "fp16" autocast chooses per operation; "fp16" also scales the loss."""
    accumulate: int = 1
    """Batches whose gradients are averaged before each optimiser step."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights, and evaluate and export that."""
    activation_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """torch.compile the model."""
    channels_last: bool = False
    """Convolution weights in channels-last layout (faster with bf16 on GPUs)."""
    reference_batch_size: int | None = None
    """Images per optimiser step for which `optimizer.lr` is declared; a run with another number warns."""
    log_every: int = 50
    """Steps between progress lines."""
    eval_every: int = 1
    """Epochs between evaluations (the last epoch is always evaluated)."""
    best_metric: str = "bbox/AP"
    """The evaluator's number by which the best checkpoint is chosen (higher is better)."""
    patience: int | None = None
    """Stop after this many evaluations in a row without a better `best_metric`."""
