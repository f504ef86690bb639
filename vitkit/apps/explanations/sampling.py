"""Records where deformable attention looks."""

from types import TracebackType

import torch
from torch import Tensor, nn

from vitkit.nn.deformable_attention import MultiScaleDeformableAttention


class SamplingRecorder:
    """Records where a model's deformable attention looks, and with what weights, inside a `with` block.

        with SamplingRecorder(model) as samples:
            model(images, padding_mask)
        locations, weights = samples["head.decoder.layers.5.cross_attn"][0]

    `samples` has one list per `MultiScaleDeformableAttention`, under its dotted name, with one entry per call:
    locations (B, L, heads, groups, points, 2) and weights (B, L, heads, groups, points), both in the autograd graph.
    Each level is one group, but with different numbers of points per level: the module's `levels` has each group's.
    Compiled models run uncompiled inside the block.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.samples: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def __enter__(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        self._eager = torch.compiler.set_stance("force_eager")
        self._eager.__enter__()
        for name, module in self._attentions():
            assert module.samples is None, "samples are already being recorded"
            module.samples = self.samples.setdefault(name, [])
        return self.samples

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, module in self._attentions():
            module.samples = None
        self._eager.__exit__(kind, error, trace)

    def _attentions(self) -> list[tuple[str, MultiScaleDeformableAttention]]:
        modules = self.model.named_modules()
        return [(name, module) for name, module in modules if isinstance(module, MultiScaleDeformableAttention)]
