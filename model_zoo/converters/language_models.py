"""Key names of the transformers library's language models: BERT and GPT-2.

BERT adds a vector for the sentence that a token belongs to; a single text only has the first, which vitkit adds to all
position codes. GPT-2 stores the matrices of its layers transposed.
"""

import torch
from torch import nn

from vitkit.errors import CheckpointError
from vitkit.model_zoo.converters.key_table import Alias, Custom, Drop, Format, KeyTable, Rename, Rule, State, below
from vitkit.model_zoo.converters.layers import join_qkv
from vitkit.structures import EOS

_TRANSPOSED = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")


def bert_encoder(theirs: str, ours: str) -> list[Rule]:
    """Return the rules of BERT's encoder below these prefixes; vitkit's has no pooler."""
    layer, our_layer = f"{theirs}encoder.layer.{{i}}.", f"{ours}encoder.layers.{{i}}."
    types, codes = f"{theirs}embeddings.token_type_embeddings.weight", f"{ours}positions.codes"

    def read(state: State, model: nn.Module) -> State:
        """Add the vector of the first sentence to the positions."""
        if types in state and codes in state:
            state[codes] = state[codes] + state.pop(types)[0]
        return state

    def write(state: State, model: nn.Module) -> State:
        state[types] = torch.zeros(2, state[codes].shape[1])
        return state

    return [
        # The names of the first published files.
        Alias("LayerNorm.gamma$", "LayerNorm.weight$"),
        Alias("LayerNorm.beta$", "LayerNorm.bias$"),
        Drop(f"^{theirs}pooler."),
        Drop(f"^{theirs}embeddings.position_ids"),
        join_qkv(f"{layer}attention.self.", f"{layer}self_attn.in_proj_", names=("query", "key", "value")),
        *below(
            layer,
            our_layer,
            [
                ("self_attn.", "self_attn."),
                ("attention.output.dense.", "self_attn.out_proj."),
                ("attention.output.LayerNorm.", "norm1."),
                ("intermediate.dense.", "ffn.linear1."),
                ("output.dense.", "ffn.linear2."),
                ("output.LayerNorm.", "norm2."),
            ],
        ),
        Rename(f"^{theirs}embeddings.word_embeddings.", f"^{ours}embedding."),
        Rename(f"^{theirs}embeddings.position_embeddings.weight", f"^{codes}"),
        Rename(f"^{theirs}embeddings.LayerNorm.", f"^{ours}positions.norm."),
        Custom(read, write),
    ]


def _read_bert(state: State, model: nn.Module) -> State:
    """Take one copy of the output's table and bias."""
    # With an output of its own, the library computes with this copy.
    if "cls.predictions.decoder.bias" in state:
        state["output_bias"] = state.pop("cls.predictions.decoder.bias")
    return _without_tied_output(state, model)


def _write_bert(state: State, model: nn.Module) -> State:
    if model.output is None:
        state["output.weight"] = state["embedding.weight"].clone()
    state["cls.predictions.decoder.bias"] = state["output_bias"].clone()
    return state


def _without_tied_output(state: State, model: nn.Module) -> State:
    if model.output is None:
        state.pop("output.weight", None)
    return state


def _read_gpt2(state: State, model: nn.Module) -> State:
    """Transpose the layers' matrices."""
    if "output_bias" in model.state_dict() and "embedding.weight" in state:
        state.setdefault("output_bias", torch.zeros(len(state["embedding.weight"])))
    return _without_tied_output(_transpose(state), model)


def _write_gpt2(state: State, model: nn.Module) -> State:
    """Transpose the layers' matrices, and leave out the bias of special tokens, which the library does not have.

    Raises:
        CheckpointError: other tokens also have a bias.
    """
    bias = state.pop("output_bias", None)
    if bias is not None and bias[EOS:].any():
        raise CheckpointError("transformers GPT-2: its logits have no bias; the model has one (model.output_bias).")
    if model.output is None:
        state["output.weight"] = state["embedding.weight"].clone()
    return _transpose(state)


def _transpose(state: State) -> State:
    return {key: value.T.contiguous() if key.endswith(_TRANSPOSED) else value for key, value in state.items()}


_GPT2_LAYER, _GPT2_OURS = "transformer.h.{i}.", "stack.layers.{i}."

OFFICIAL: list[Format] = []
TRANSFORMERS = [
    Format(
        "transformers BERT",
        KeyTable(
            [
                Drop("^cls.seq_relationship."),
                *bert_encoder("bert.", ""),
                Rename("^cls.predictions.transform.dense.", "^head.0."),
                Rename("^cls.predictions.transform.LayerNorm.", "^head.2."),
                Rename("^cls.predictions.decoder.weight", "^output.weight"),
                Rename("^cls.predictions.bias", "^output_bias"),
                Custom(_read_bert, _write_bert),
            ]
        ),
        marks=("bert.embeddings.word_embeddings.weight", "cls.predictions.transform.dense.weight"),
        model="MaskedLanguageModel",
        ours=("positions.norm.weight",),
    ),
    Format(
        "transformers GPT-2",
        KeyTable(
            [
                # Published files contain the part without the output.
                *(Alias(f"^{name}.", f"^transformer.{name}.") for name in ("wte", "wpe", "h", "ln_f")),
                Drop("^transformer.h.{i}.attn.bias$"),
                Drop("^transformer.h.{i}.attn.masked_bias$"),
                *below(
                    _GPT2_LAYER,
                    _GPT2_OURS,
                    [
                        ("attn.c_attn.", "self_attn.in_proj_"),
                        ("attn.c_proj.", "self_attn.out_proj."),
                        ("ln_1.", "norm1."),
                        ("ln_2.", "norm2."),
                        ("mlp.c_fc.", "ffn.linear1."),
                        ("mlp.c_proj.", "ffn.linear2."),
                    ],
                ),
                Rename("^transformer.ln_f.", "^stack.norm."),
                Rename("^transformer.wte.", "^embedding."),
                Rename("^transformer.wpe.weight", "^positions.codes"),
                Rename("^lm_head.weight", "^output.weight"),
                Rename("^lm_head.bias", "^output_bias"),
                Custom(_read_gpt2, _write_gpt2),
            ]
        ),
        marks=(".wte.weight", ".wpe.weight", ".h.0.attn.c_attn.weight"),
        model="CausalLanguageModel",
    ),
]
