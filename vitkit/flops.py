"""How many multiply-adds a model makes, by module and by operator.

They are counted as in the papers of vision models and by fvcore: one for a multiplication with its addition,
in matrix products, convolutions, attention and sampling; norms by fvcore's estimate (2 to 5 per value). Element-wise
work, activations, softmax and reductions are not counted. An operator of none of these kinds is reported, so that
nothing is left out in silence.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from vitkit.nn import deformable_attention, deformable_bag

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # fvcore uses torch.jit, which newer PyTorch calls deprecated
    from fvcore.nn import FlopCountAnalysis
    from fvcore.nn.jit_handles import get_shape

_MOVES = (
    "T _shape_as_tensor _unique2 alias all any argmax argsort as_strided atleast_1d bitwise_and bitwise_not "
    "broadcast_tensors cartesian_prod clone diff empty_like expand_as eye fill_ flip floor_ ge gt index_copy "
    "index_fill index_select isfinite isnan le lift_fresh linspace logical_and logical_not logical_or lt mT "
    "masked_fill masked_fill_ meshgrid movedim ne new_ones new_tensor numel numpy_T ones_like pad rand randn "
    "repeat repeat_interleave reshape_as resolve_conj roll scatter scatter_ set_ sort sum_to_size swapaxes "
    "take_along_dim tensor_split tile to topk triu unflatten view_as where zero_"
)
"""aten operators that fvcore does not know and that move, choose, compare or make values."""
_ELEMENTWISE = (
    "abs abs_ add add_ addcmul addcmul_ amax amin atan2 avg_pool1d bernoulli ceil clamp_max clamp_min cos cumsum "
    "div div_ elu exp exp_ expm1 feature_dropout gelu hardsigmoid hardsigmoid_ hardswish hardswish_ hardtanh "
    "hardtanh_ leaky_relu linalg_vector_norm log log1p log2 log_softmax logit logical_xor logsumexp max_pool2d "
    "max_pool3d maximum mean minimum mish mul mul_ neg norm normal_ pow pow_ prod reciprocal rms_norm round rsqrt "
    "rsub sigmoid sigmoid_ sign silu silu_ sin softmax softplus sqrt square std std_mean sub sub_ sum tan tanh "
    "true_divide uniform_ var var_mean"
)
"""aten operators that are not counted: element-wise work, activations, softmax, reductions."""


def _attention_flops(inputs: list, outputs: list) -> int:
    """Of scaled dot-product attention: scores and weighted sum."""
    (*batch, queries, d), keys, values = get_shape(inputs[0]), get_shape(inputs[1]), get_shape(inputs[2])
    return math.prod(batch) * queries * keys[-2] * (d + values[-1])


def _sampling_flops(inputs: list, outputs: list) -> Counter[str]:
    """Of deformable attention: each sample is a weighted sum of four places."""
    values, weights = get_shape(inputs[0]), get_shape(inputs[2])
    return Counter(deformable_attend=4 * math.prod(weights) * values[-1])


def _window_weights_flops(inputs: list, outputs: list) -> int:
    """Of a local relation's similarities."""
    batch_size, channels, height, width = get_shape(inputs[0])
    return batch_size * channels * height * width * get_shape(inputs[2])[-1] ** 2


def _window_sum_flops(inputs: list, outputs: list) -> int:
    """Of a local relation's weighted sums."""
    return math.prod(get_shape(outputs[0])) * get_shape(inputs[0])[1]


def _added_product_flops(inputs: list, outputs: list) -> int:
    """Of `baddbmm`."""
    batch_size, rows, inner = get_shape(inputs[1])
    return batch_size * rows * inner * get_shape(inputs[2])[-1]


def _per_output(count: int) -> Callable:
    return lambda inputs, outputs: count * math.prod(get_shape(outputs[0]))


def _per_input(inputs: list, outputs: list) -> int:
    return math.prod(get_shape(inputs[0]))


def _nothing(inputs: list, outputs: list) -> Counter:
    """Of an autograd function, for which fvcore takes no None."""
    return Counter()


HANDLERS: dict[str, Callable | None] = {
    "aten::scaled_dot_product_attention": _attention_flops,
    "aten::baddbmm": _added_product_flops,
    "prim::PythonOp._Sampling": _sampling_flops,
    "vitkit::window_weights": _window_weights_flops,
    "vitkit::window_sum": _window_sum_flops,
    "aten::avg_pool2d": _per_input,
    "aten::avg_pool3d": _per_input,
    "aten::adaptive_avg_pool3d": _per_input,
    "aten::upsample_linear1d": _per_output(2),
    "aten::upsample_bicubic2d": _per_output(16),
    "aten::_upsample_bicubic2d_aa": _per_output(16),
    "prim::PythonOp._Cut": _nothing,  # windows of a map: a selection, and back
    "prim::PythonOp._Join": _nothing,
    **{f"aten::{name}": None for name in _MOVES.split()},
}
"""fvcore's own handlers apart. None: the operator computes nothing."""


@dataclass
class Flops:
    """Multiply-adds."""

    by_module: Counter[str]
    by_operator: Counter[str]
    elementwise: Counter[str]
    """How often operators were called that are not counted, as papers do not."""
    unknown: Counter[str]
    """How often operators were called that should perhaps be counted, and are not."""

    @property
    def total(self) -> int:
        return self.by_module[""]


def count_flops(model: nn.Module, *inputs: Tensor) -> Flops:
    """Runs the model once, in evaluation mode, and counts. What no output depends on is not counted.

    Args:
        inputs: of `forward`, on the model's device.
    """
    was_training = model.training
    model.eval()
    tensors_only = model.register_forward_hook(
        lambda module, args, outputs: [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
    )
    try:
        with torch.no_grad(), warnings.catch_warnings(), _one_operator_each():
            warnings.simplefilter("ignore")
            analysis = FlopCountAnalysis(model, inputs).set_op_handle(**HANDLERS)
            analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
            by_module = Counter({name: int(count) for name, count in analysis.by_module().items()})
            by_operator = Counter({name: int(count) for name, count in analysis.by_operator().items()})
            others = analysis.unsupported_ops()
    finally:
        tensors_only.remove()
        model.train(was_training)
    known = {f"aten::{name}" for name in _ELEMENTWISE.split()}
    elementwise = Counter({name.removeprefix("aten::"): n for name, n in others.items() if name in known})
    return Flops(by_module, by_operator, elementwise, Counter({k: n for k, n in others.items() if k not in known}))


class _Sampling(torch.autograd.Function):
    """Deformable attention as one operator of a trace; the one that it is in a run takes no traced sizes."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, locations: Tensor, weights: Tensor, shapes: Sequence[tuple[int, int]]
    ) -> Tensor:
        return deformable_bag.attend(values, [(int(h), int(w)) for h, w in shapes], locations, weights)


@contextmanager
def _one_operator_each() -> Iterator[None]:
    """Keeps deformable attention one operator in a trace, which is made here for counting and not for an export."""
    original = deformable_attention._attend_by_gathering
    deformable_attention._attend_by_gathering = lambda values, shapes, locations, weights: _Sampling.apply(
        values, locations, weights, shapes
    )
    try:
        yield
    finally:
        deformable_attention._attend_by_gathering = original
