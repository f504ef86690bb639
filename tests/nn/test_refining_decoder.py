"""The decoder that refines boxes: near the border, predicted boxes and those of the next layer are clamped apart."""

import pytest
import torch
from helpers.grounding_models import grounding_config
from torch import nn

from vitkit.config import load_config
from vitkit.engine.build import build_model
from vitkit.nn.deformable_transformer import Levels
from vitkit.nn.queries import Queries
from vitkit.nn.refining_decoder import RefiningDecoder


class Nothing(nn.Module):
    """A layer that leaves queries as they are."""

    def forward(self, x, memory, **others):
        return x


ONE_IMAGE = Levels(torch.zeros(1, 1, 8), None, [(1, 1)], padding_mask=None, valid_ratios=torch.ones(1, 1, 2))


@pytest.mark.parametrize(("eps", "predicted"), [(1e-3, 1e-3), (1e-5, 1e-4)])
def test_boxes_at_the_border_are_clamped_by_their_own_eps(eps, predicted):
    decoder = RefiningDecoder([Nothing(), Nothing()], 8, 1, look_forward_twice=True, prediction_eps=eps)
    for parameter in decoder.bbox_embed.parameters():
        nn.init.zeros_(parameter)  # no refinement: a box is what its reference is clamped to
    references = torch.tensor([[[1e-4, 0.5, 0.3, 0.2]]])
    first, second = decoder(Queries(torch.randn(1, 1, 8), references=references), ONE_IMAGE.tokens, ONE_IMAGE)
    assert first[2][0, 0].tolist() == pytest.approx([predicted, 0.5, 0.3, 0.2], rel=1e-3)
    assert second[1][0, 0].tolist() == pytest.approx([1e-3, 0.5, 0.3, 0.2], rel=1e-3)  # as in both originals


def test_only_mm_predicts_closer_to_the_border():
    names = ("grounding_dino_swin_tiny", "mm_grounding_dino_swin_tiny")
    eps = [load_config(name)["model"]["head"]["box_eps"] for name in names]
    assert eps == [1e-3, 1e-5]
    head = grounding_config()["head"] | {"box_eps": eps[1]}
    assert build_model(grounding_config(head=head)).head.decoder.prediction_eps == 1e-5
