"""Selection of queries, or of their boxes, from the locations of the image."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.nn.deformable_transformer import Levels, anchor_boxes, check_locations, gather_rows
from vitkit.nn.detection import box_head, class_head
from vitkit.nn.layers import Linear
from vitkit.nn.queries import Queries


def usable_locations(memory: Tensor, levels: Levels) -> tuple[Tensor, Tensor]:
    """Return the memory (B, S, d_model), zero at locations whose anchors are unusable, and the anchors' logits."""
    anchors, unusable = (x.expand(memory.shape[0], -1, -1) for x in anchor_boxes(levels))
    # An unusable location stays at infinity: its box is the constant 1, without gradient.
    return memory.masked_fill(unusable, 0), torch.logit(anchors).masked_fill(unusable, torch.inf)


class LocationSelection(nn.Module):
    """Queries start from the content and the box of the locations with the best class scores.

    In RT-DETR (Zhao et al. 2023, section 4.3, https://arxiv.org/abs/2304.08069), the selection is "uncertainty-minimal"
    because the varifocal loss trains the scores by the IoU.

    Args:
        owner: name of the model in messages.
        d_model: channels of the memory.
        num_classes: number of logits of a location.
        activation: activation of the box head, see `MLP`.
        projects: whether the contents are a normalized projection of the memory; False: the memory itself.
    """

    def __init__(self, owner: str, d_model: int, num_classes: int, *, activation: str = "relu", projects: bool = True):
        super().__init__()
        self.owner = owner
        self.projects = projects
        if projects:
            self.enc_output = Linear(d_model, d_model)
            self.enc_output_norm = nn.LayerNorm(d_model)
            nn.init.xavier_uniform_(self.enc_output.weight)
        self.class_embed = class_head(d_model, num_classes)
        self.bbox_embed = box_head(d_model, activation=activation)

    def forward(self, memory: Tensor, levels: Levels, num_queries: int) -> tuple[dict[str, Any], Queries]:
        """Select the locations with the highest probability of any class; padding only if there are too few others.

        Args:
            memory: (B, S, d_model), the tokens of `levels`.
        Returns:
            the predictions at the selected locations, as one of `training_outputs`.
            queries: (B, num_queries, ...) without gradient, best first.
        Raises:
            DataError: there are fewer locations than queries.
        """
        check_locations(self.owner, levels, num_queries)
        memory, anchor_logits = usable_locations(memory, levels)
        # The originals have no padding. All its locations have one score, which may be the highest.
        content, logits, best = select_locations(self, memory, levels.padding_mask, num_queries)
        boxes = (self.bbox_embed(content).float() + gather_rows(anchor_logits, best)).sigmoid()
        selection = {
            "name": "enc",
            "pred_logits": logits,  # (B, Q, num_classes)
            "pred_boxes": boxes,  # (B, Q, 4)
        }
        return selection, Queries(content.detach(), references=boxes.detach())

    def contents(self, memory: Tensor) -> Tensor:
        """(B, N, d_model) -> the same."""
        return self.enc_output_norm(self.enc_output(memory)) if self.projects else memory


def select_locations(
    stage: nn.Module, memory: Tensor, unusable: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a stage's contents, class logits and indices of the locations with the highest logits, (B, count, ...).

    Args:
        memory: (B, S, d_model).
        unusable: (B, S) bool, locations that are selected only if there are too few others; None: there are none.
    """
    contents = stage.contents(memory)  # (B, S, d_model)
    logits = stage.class_embed(contents)
    scores = logits.amax(-1)
    if unusable is not None:
        scores = scores.masked_fill(unusable, -torch.inf)
    best = scores.topk(count, dim=1).indices
    if not torch.is_grad_enabled():
        return gather_rows(contents, best), gather_rows(logits, best), best
    # Computed again for them alone, so that nothing is stored for the others, whose gradient is zero.
    contents = stage.contents(gather_rows(memory, best))
    return contents, stage.class_embed(contents), best


class BoxSelection(nn.Module):
    """Mixed query selection: queries start from the boxes of the best locations; contents are learned (DINO, Zhang et
    al. 2022, section 3.4, https://arxiv.org/abs/2203.03605).

    Args:
        owner: name of the model in messages.
        d_model: channels of the memory.
        make_class_head: makes the head that a location's class logits are from.
        num_queries: number of learned contents.
    """

    def __init__(self, owner: str, d_model: int, make_class_head: Callable[[], nn.Module], num_queries: int):
        super().__init__()
        self.owner = owner
        self.enc_output = nn.Linear(d_model, d_model)
        self.enc_output_norm = nn.LayerNorm(d_model)
        nn.init.xavier_uniform_(self.enc_output.weight)
        self.class_embed = make_class_head()
        self.bbox_embed = box_head(d_model)
        self.content = nn.Embedding(num_queries, d_model)
        nn.init.xavier_uniform_(self.content.weight)

    def forward(
        self, memory: Tensor, levels: Levels, num_queries: int, *others: Tensor
    ) -> tuple[dict[str, Any], Tensor]:
        """Select the locations with the highest probability of any class.

        Args:
            memory: (B, S, d_model), the encoded `levels`.
            others: what the class head takes besides.
        Returns:
            the predictions at the selected locations, as one of `training_outputs`.
            boxes_cxcywh: (B, num_queries, 4), without gradient, best first.
        Raises:
            DataError: there are fewer locations than queries.
        """
        check_locations(self.owner, levels, num_queries)
        memory, anchor_logits = usable_locations(memory, levels)
        # Indices have no gradient, so nothing is stored for this pass. Under `no_grad`, autocast in torch 2.6 would
        # cache weights in lower precision without a gradient, and use them below as well.
        scores = self.class_embed(self.enc_output_norm(self.enc_output(memory)), *others).amax(-1)
        best = scores.topk(num_queries, dim=1).indices
        # Only the selected locations have a loss, so the boxes of others need not be computed.
        x = self.enc_output_norm(self.enc_output(gather_rows(memory, best)))
        box_logits = self.bbox_embed(x).float() + gather_rows(anchor_logits, best)
        boxes = box_logits.sigmoid()
        head_queries = slice(self.content.num_embeddings)  # those selected for added queries have no loss here
        selection = {
            "name": "enc",
            "pred_logits": self.class_embed(x, *others)[:, head_queries],  # (B, Q, num_classes)
            "pred_boxes": boxes[:, head_queries],  # (B, Q, 4)
        }
        return selection, boxes.detach()
