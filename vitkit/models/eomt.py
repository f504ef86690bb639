"""EoMT (Kerssies et al. 2025, https://arxiv.org/abs/2503.19108): a plain ViT whose last blocks also process queries."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.backbones.vit import Tokens, ViT
from vitkit.errors import ConfigError, DataError
from vitkit.heads.eomt import EoMTHead
from vitkit.models.base import ModelOnBackbone
from vitkit.models.windows import WindowedMaskResults, cut_windows
from vitkit.nn.attention import mask_bias
from vitkit.ops.images import float_statistics, normalize_images, per_channel, pixel_statistics, unpadded_sizes
from vitkit.ops.masks import mask_logits
from vitkit.protocols.learning import Hook
from vitkit.registry import BACKBONES, HOOKS, MODELS, Spec
from vitkit.structures import AttentionLayers


@MODELS.register
class EoMT(WindowedMaskResults, ModelOnBackbone):
    """Encoder-only mask transformer.

    Before each of the last blocks, the queries predict masks; in that block, patches outside its mask are masked for a
    query. `attn_mask_probs` has the fraction of queries, chosen at random, for which each block does this; training
    decreases it from one to zero (the hook `MaskAnnealing`), after which inference is that of a plain ViT.

    Images are (B, 3, H, W), uint8 RGB, zero-padded at the right and bottom; or float, already normalized. As in the
    original, they are padded with black to the size that the backbone is made for, `image_size`. Larger images are
    evaluated in windows if the only task is "semantic"; otherwise their sides must be multiples of the patch size.

    Args:
        backbone: a `ViT` with global attention, or its spec.
        num_queries: number of masks predicted per image.
        num_classes: number of classes without "no object"; a run sets its dataset's.
        num_blocks: number of the last blocks that process queries.
        masked_attention: False: queries attend to all patches from the start, and only predict after the last block.
        tasks, things, num_instances, object_threshold, overlap_threshold: what `postprocess` returns, see
            `MaskResults.set_results`; a run sets its dataset's things.
    Raises:
        ConfigError: queries cannot join the backbone, or a number is out of range; see `MaskResults`.
    """

    class_head = ("head.class_embed.",)
    learned_queries = ("head.query_embed.weight",)

    def __init__(
        self,
        backbone: Spec | nn.Module,
        *,
        num_queries: int = 200,
        num_classes: int = 80,
        num_blocks: int = 4,
        masked_attention: bool = True,
        tasks: Sequence[Literal["semantic", "instance", "panoptic"]] = ("instance",),
        things: Sequence[bool] | None = None,
        num_instances: int = 100,
        object_threshold: float = 0.8,
        overlap_threshold: float = 0.8,
    ):
        super().__init__()
        self.backbone = BACKBONES.build(backbone)
        _check_backbone(self.backbone)
        depth = len(self.backbone.blocks)
        (info,) = self.backbone.feature_info.values()
        if not 1 <= num_blocks <= depth:
            raise ConfigError(f"num_blocks={num_blocks}: expected 1 to {depth}, the number of the backbone's blocks.")
        if num_queries < 1:
            raise ConfigError(f"num_queries={num_queries}: expected at least 1.")
        self.num_blocks = num_blocks
        self.masked_attention = masked_attention
        self.image_size = self.backbone.image_size
        self.patch_size = info.stride
        self.head = EoMTHead(info.channels, num_classes, num_queries=num_queries, patch_size=info.stride)
        self.register_buffer("attn_mask_probs", torch.ones(num_blocks))
        self._masked_blocks = [masked_attention] * num_blocks
        self.register_load_state_dict_post_hook(_note_masked_blocks)
        self.set_results(
            num_classes,
            tasks=tasks,
            things=things,
            num_instances=num_instances,
            object_threshold=object_threshold,
            overlap_threshold=overlap_threshold,
        )

    def attention_layers(self) -> AttentionLayers:
        """Return the attention of all blocks; the last ones also process the queries."""
        layers = [block.attn for block in self.backbone.blocks]
        num_queries = self.head.query_embed.num_embeddings
        return AttentionLayers(layers, layers[-self.num_blocks :], num_joint_queries=num_queries)

    def set_mask_probabilities(self, probabilities: Sequence[float]) -> None:
        """Set the fraction of queries that each of the last blocks masks, first to last."""
        self.attn_mask_probs.copy_(torch.tensor(probabilities))
        _note_masked_blocks(self)

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> dict[str, Any]:
        """Predict class logits and a mask per query.

        Returns:
            pred_logits: (B, Q, num_classes + 1), the last class being "no object".
            pred_masks: (B, Q, h, w) logits.
            mask_embed, mask_features: factors of the masks, see the head.
            aux_outputs: the same, without pred_masks, from before each block that masks; in training from before all.
            input_size: (height, width) of the padded images, which the masks cover.
            image_sizes: (B, 2) int64, height and width of each image without padding.
            windows: only if images were evaluated in windows, (N, 3) int64: the index of the image, and the top and
                left of the window; the first three outputs are then for windows, with N instead of B, of size
                `input_size`.
        """
        image_sizes = unpadded_sizes(images, padding_mask)
        images = self.prepare(images, padding_mask)
        extra = {}
        if self._takes_windows() and tuple(images.shape[-2:]) != tuple(self.image_size):
            images, extra["windows"] = cut_windows(images, image_sizes, self.image_size)
        *aux_outputs, last = self._predict(images)
        last["pred_masks"] = mask_logits(last["mask_embed"], last["mask_features"])
        input_size = tuple(images.shape[-2:])
        return {**last, "aux_outputs": aux_outputs, "input_size": input_size, "image_sizes": image_sizes, **extra}

    def prepare(self, images: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Normalize images and pad them with black, as the backbone requires."""
        is_normalized = images.is_floating_point()
        statistics = float_statistics(self.backbone)
        images = normalize_images(images, **statistics)
        # Black is not 0 after normalization.
        black = -per_channel(statistics["mean"], images) / per_channel(statistics["std"], images)
        if is_normalized and padding_mask is not None:
            images = torch.where(padding_mask[:, None], black, images)
        height, width = images.shape[-2:]
        patch, windowed = self.patch_size, self._takes_windows()
        if not windowed and any(n > minimum and n % patch for n, minimum in zip((height, width), self.image_size)):
            raise DataError(
                f"EoMT: images of {height}x{width} pixels are not divisible into patches of {patch}x{patch}. Expected "
                f"at most {self.image_size[0]}x{self.image_size[1]}, which smaller ones are padded to, or multiples of "
                f"{patch}: resize them (EvalResize), or set model.backbone.image_size."
            )
        margins = [max(0, minimum - n) for n, minimum in zip((height, width), self.image_size)]
        if any(margins):
            padded = black.expand(images.shape[0], -1, height + margins[0], width + margins[1]).clone()
            padded[:, :, :height, :width] = images
            images = padded
        return normalize_images(images, **pixel_statistics(self.backbone))

    def _takes_windows(self) -> bool:
        return not self.training and self.tasks == ("semantic",)

    def _predict(self, images: Tensor) -> list[dict[str, Tensor]]:
        """Return the head's predictions, in the order in which they are made."""
        depth = len(self.backbone.blocks)
        start = depth - self.num_blocks
        tokens = self.backbone.run_blocks(self.backbone.tokens(images), stop=start)
        tokens = self.backbone.prepend(tokens, self.head.query_embed.weight)
        predictions = []
        for i in range(start, depth):
            bias = None
            if self._masks(i - start):
                predictions.append(self._head_outputs(tokens))
                bias = self._mask_bias(predictions[-1], tokens, i - start)
            tokens = self.backbone.run_blocks(tokens, i, i + 1, bias=bias)
        return [*predictions, self._head_outputs(tokens)]

    def _head_outputs(self, tokens: Tokens) -> dict[str, Tensor]:
        return self.head(self.backbone.norm(tokens.x), tokens.size)

    def _masks(self, block: int) -> bool:
        """Whether the head predicts before a block."""
        # In training always, as each prediction has a loss; at inference only where the block masks by it.
        return self.masked_attention if self.training else self._masked_blocks[block]

    def _mask_bias(self, prediction: Mapping[str, Tensor], tokens: Tokens, block: int) -> Tensor:
        """Return the bias that masks the patches outside each query's mask, (B, 1, L, L)."""
        # Resizing and the product with the queries commute, so the features are resized instead of every mask.
        features = F.interpolate(prediction["mask_features"].detach(), size=tokens.size, mode="bilinear")
        outside = ~(mask_logits(prediction["mask_embed"].detach(), features).flatten(2) > 0)  # (B, Q, h * w)
        opened = self.draw(block, outside.shape[:2], tokens.x.device) > self.attn_mask_probs[block]
        outside &= ~opened[:, :, None]
        num_tokens, num_queries = tokens.x.shape[1], outside.shape[1]
        bias = mask_bias(F.pad(outside, (num_tokens - outside.shape[2], 0)), tokens.x.dtype)
        return F.pad(bias, (0, 0, 0, num_tokens - num_queries))[:, None]

    def draw(self, block: int, shape: tuple[int, int], device: torch.device) -> Tensor:
        """Draw (B, Q) uniform in 0..1: queries with more than the block's `attn_mask_probs` attend to all patches."""
        return torch.rand(shape, device=device)

    def variant_of(self, names: Mapping[str, Tensor]) -> str:
        expected = self.state_dict()  # a state dict that is not of an EoMT is rejected elsewhere
        queries, blocks = (len(names.get(key, expected[key])) for key in ("head.query_embed.weight", "attn_mask_probs"))
        return f"with num_queries={queries} and num_blocks={blocks}"


@HOOKS.register
@dataclass(eq=False, kw_only=True)
class MaskAnnealing(Hook):
    """Mask fewer and fewer queries of an `EoMT`, one block after another (section 3.3 of the paper).

    A block masks all queries until its start, then a fraction of (1 - progress) ** power, and none from its end on.

    Args:
        start_steps, end_steps: optimizer steps for each block, first to last. None: a sixth of the run each, spread
            evenly from a sixth to five sixths of it, as in the original's schedules.
    Raises:
        ConfigError: only one of the two is set, their lengths differ, an end is not after its start, or the power is
            not positive.
    """

    start_steps: Sequence[int] | None = None
    end_steps: Sequence[int] | None = None
    power: float = 0.9

    def __post_init__(self):
        if (self.start_steps is None) != (self.end_steps is None):
            raise ConfigError("MaskAnnealing: expected both start_steps and end_steps, or neither.")
        if self.start_steps is not None and self.end_steps is not None:
            starts, ends = list(self.start_steps), list(self.end_steps)
            if len(starts) != len(ends) or any(start >= end for start, end in zip(starts, ends)):
                raise ConfigError(
                    f"MaskAnnealing: start_steps={starts}, end_steps={ends}: expected an end after each start."
                )
        if not self.power > 0:
            raise ConfigError(f"MaskAnnealing: power={self.power}: expected a value above 0.")

    @contextmanager
    def during_training(self, run: Any) -> Iterator[None]:
        """See `Hook`.

        Raises:
            ConfigError: the model has no masked attention, or a different number of blocks.
        """
        model = run.model
        if not isinstance(model, EoMT):
            raise ConfigError(
                f"train.hooks: MaskAnnealing: {type(model).__name__} has no masked attention to anneal; EoMT has."
            )
        if self.start_steps is not None and len(self.start_steps) != model.num_blocks:
            raise ConfigError(
                f"train.hooks: MaskAnnealing: start_steps and end_steps are for {len(self.start_steps)} blocks, but "
                f"model.num_blocks={model.num_blocks}. Expected one of each per block."
            )
        yield

    def before_epoch(self, run: Any) -> None:
        """Set the mask probabilities for the first step."""
        self._set(run)

    def after_step(self, run: Any, step: Any) -> None:
        """Set the mask probabilities for the next step."""
        self._set(run)

    def _set(self, run: Any) -> None:
        steps = run.settings.epochs * run.settings.steps_per_epoch(len(run.loader))
        probabilities = self.probabilities(run.progress.step, steps, run.model.num_blocks)
        run.model.set_mask_probabilities(probabilities)
        if run.ema is not None:  # the average includes buffers, but this buffer is a setting
            run.ema.module.set_mask_probabilities(probabilities)

    def probabilities(self, step: int, total_steps: int, num_blocks: int) -> list[float]:
        """Return the fraction of queries that each block masks in the step after `step` steps."""
        if self.start_steps is None or self.end_steps is None:
            gap = total_steps / 2 / max(1, num_blocks - 1)
            starts = [total_steps / 6 + i * gap for i in range(num_blocks)]
            spans = [(start, start + total_steps / 6) for start in starts]
        else:
            spans = [(float(start), float(end)) for start, end in zip(self.start_steps, self.end_steps)]
        progress = [min(max((step - start) / (end - start), 0.0), 1.0) for start, end in spans]
        return [(1 - share) ** self.power for share in progress]


def _check_backbone(backbone: nn.Module) -> None:
    remedy = "Choose one such as vit_base_patch14_reg4_dinov2 with patch_size=16."
    if not isinstance(backbone, ViT):
        raise ConfigError(f"backbone: EoMT's queries join the blocks of a ViT; got {type(backbone).__name__}. {remedy}")
    if backbone.is_classifier or not backbone.attends_globally:
        raise ConfigError(f"backbone: EoMT needs a ViT without windows, relative positions or num_classes. {remedy}")
    (info,) = backbone.feature_info.values()
    if any(side % info.stride for side in backbone.image_size):
        height, width = backbone.image_size
        raise ConfigError(
            f"backbone.image_size: EoMT pads images to {height}x{width} pixels, which are not divisible into "
            f"patches of {info.stride}x{info.stride}. Expected multiples of {info.stride}."
        )


def _note_masked_blocks(model: EoMT, _: Any = None) -> None:
    """Note which blocks mask; also called after loading weights."""
    # Read once rather than in each forward pass, which would have to wait for the device. A module-level function: the
    # model could not be pickled with a lambda or a nested one.
    if not model.attn_mask_probs.is_meta:
        model._masked_blocks = [model.masked_attention and p > 0 for p in model.attn_mask_probs.tolist()]
