"""Key names of Transformers for translation: torch.nn.Transformer's and those of the transformers library's Marian.

A `torch.nn.Transformer` is called `transformer`, and has its user's embeddings and output projection beside it: source,
target and output share one `embedding`; or there are `source_embedding`, `target_embedding` and, if the target and the
output do not share a table, `output`. vitkit's model of it has `final_norm`.

Marian's position codes are all sines, then all cosines; vitkit's alternate, as in the paper. Since nothing else depends
on the order of the residual stream's channels, they are reordered in all weights that read or write the stream.
"""

import torch
from torch import Tensor, nn

from vitkit.errors import CheckpointError
from vitkit.model_zoo.converters.key_table import Alias, Custom, Format, KeyTable, Rename, State
from vitkit.model_zoo.converters.layers import DECODER_NORMS, ENCODER_NORMS, library_stack, torch_stack

_READ = ("in_proj_weight", "linear1.weight", "embedding.weight", "output.weight")
"""Endings of the names of weights whose second axis is the residual stream."""
_WRITTEN = ("out_proj.weight", "out_proj.bias", "linear2.weight", "linear2.bias")
"""Endings of the names of weights whose first axis is the residual stream, as also that of norms is."""


def _alternating(d_model: int) -> Tensor:
    """Return the channel order with which codes of all sines, then all cosines, become alternating."""
    return torch.arange(d_model).unflatten(0, (2, -1)).T.flatten()


def _reorder(state: State, order: Tensor) -> State:
    result = {}
    for key, value in state.items():
        if key.endswith(_READ):
            value = value[:, order]
        elif key.endswith(_WRITTEN) or ".norm" in key:
            value = value[order]
        result[key] = value
    return result


def _read_embeddings(state: State, model: nn.Module) -> State:
    """Take one copy of each table that the library stores under several names.

    Raises:
        CheckpointError: the output has a bias, which the model does not have.
    """
    bias = state.pop("final_logits_bias", None)
    if "decoder.output_bias" in model.state_dict() and bias is not None:
        state["decoder.output_bias"] = bias[0]
    elif bias is not None and bias.any():
        raise CheckpointError("final_logits_bias is not zero, but the model has no such bias: set model.output_bias.")
    for side in ("encoder", "decoder"):
        state.pop(f"model.{side}.embed_positions.weight", None)
    shared = state.pop("model.shared.weight", None)
    source = state.pop("model.encoder.embed_tokens.weight", shared)
    target = state.pop("model.decoder.embed_tokens.weight", shared)
    output = state.pop("lm_head.weight", target)
    target = output if target is None else target
    if target is None:
        return state
    state["decoder.embedding.weight"] = target
    if "source_embedding.weight" in model.state_dict() and source is not None:
        state["source_embedding.weight"] = source
    if not torch.equal(output, target):
        state["decoder.output.weight"] = output
    return _reorder(state, _alternating(target.shape[1]))


def _write_embeddings(state: State, model: nn.Module) -> State:
    """Store each table under all names that the library has for it."""
    order = _alternating(state["decoder.embedding.weight"].shape[1]).argsort()
    state = _reorder(state, order)
    target = state.pop("decoder.embedding.weight")
    source = state.pop("source_embedding.weight", None)
    for side, table in (("encoder", target if source is None else source), ("decoder", target)):
        state[f"model.{side}.embed_tokens.weight"] = table.clone()
        state[f"model.{side}.embed_positions.weight"] = model.source_positions.codes[:, order].clone()
    if source is None:
        state["model.shared.weight"] = target
    state["lm_head.weight"] = state.pop("decoder.output.weight", target).clone()
    state["final_logits_bias"] = state.pop("decoder.output_bias", torch.zeros(len(target)))[None]
    return state


def _write_shared(state: State, model: nn.Module) -> State:
    """Name the embedding "embedding" if it is shared, otherwise "target_embedding"."""
    name = "target_embedding" if "source_embedding.weight" in state else "embedding"
    state[f"{name}.weight"] = state.pop("decoder.embedding.weight")
    return state


TRANSFORMERS = [
    Format(
        "transformers Marian",
        KeyTable(
            [
                *library_stack("model.encoder.", "encoder.", ENCODER_NORMS, joined=["self_attn"]),
                *library_stack("model.decoder.", "decoder.stack.", DECODER_NORMS, joined=["self_attn", "cross_attn"]),
                Rename("^model.encoder.layer_norm.", "^encoder.norm."),
                Rename("^model.decoder.layer_norm.", "^decoder.stack.norm."),
                Custom(_read_embeddings, _write_embeddings),
            ]
        ),
        marks=(
            "model.encoder.layers.0.self_attn_layer_norm.weight",
            "model.decoder.layers.0.encoder_attn_layer_norm.weight",
            "final_logits_bias",
        ),
        model="Transformer",
    )
]
OFFICIAL = [
    Format(
        "torch.nn.Transformer",
        KeyTable(
            [
                *torch_stack("transformer.encoder.", "encoder."),
                *torch_stack("transformer.decoder.", "decoder.stack."),
                Rename("^output.", "^decoder.output."),
                Alias("^embedding.", "^decoder.embedding."),
                Alias("^target_embedding.", "^decoder.embedding."),
                Custom(writing=_write_shared),
            ]
        ),
        marks=(
            "transformer.encoder.layers.0.self_attn.in_proj_weight",
            "transformer.encoder.norm.weight",
            "transformer.decoder.layers.0.multihead_attn.in_proj_weight",
        ),
        model="Transformer",
        ours=("encoder.norm.weight",),
    )
]
