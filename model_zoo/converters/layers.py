"""The key names of stacks of transformer layers, as torch.nn.Transformer and the transformers library have them."""

from collections.abc import Sequence

from vitkit.model_zoo.converters.key_table import Alias, Join, Rename, Rule, below

TORCH_FEED_FORWARD = (("linear1.", "ffn.linear1."), ("linear2.", "ffn.linear2."))

ENCODER_NORMS = (("self_attn_layer_norm.", "norm1."), ("final_layer_norm.", "norm2."))
DECODER_NORMS = (
    ("self_attn_layer_norm.", "norm1."),
    ("encoder_attn_layer_norm.", "norm2."),
    ("final_layer_norm.", "norm3."),
)
DEFORMABLE_DECODER_NORMS = (
    ("self_attn_layer_norm.", "norm2."),
    ("encoder_attn_layer_norm.", "norm1."),
    ("final_layer_norm.", "norm3."),
)
"""Names of a layer's norms in the library and in vitkit; in the last table, norm1 is that of the cross-attention."""


def torch_stack(theirs: str, ours: str, *, cross: str = "multihead_attn.") -> list[Rule]:
    """Return the rules of a stack of layers with the names of torch.nn.Transformer.

    Args:
        theirs, ours: prefixes of the stack.
        cross: their name of the cross-attention.
    """
    layer = f"{ours}layers.{{i}}."
    return [Rename(f"^{theirs}", f"^{ours}"), *below(layer, layer, [(cross, "cross_attn."), *TORCH_FEED_FORWARD])]


def library_stack(
    theirs: str, ours: str, norms: Sequence[tuple[str, str]], *, joined: Sequence[str] = ()
) -> list[Rule]:
    """Return the rules of a stack of layers of the transformers library, or of fairseq, whose names it took over.

    Args:
        theirs, ours: prefixes of the stack.
        norms: names of the norms in the library and in vitkit.
        joined: the attentions whose projections to queries, keys and values are one matrix in vitkit.
    """
    old, new = f"{theirs}layers.{{i}}.", f"{ours}layers.{{i}}."
    return [
        # Newer versions of the library have these names in memory.
        *(Alias(f"^{old}{name}.o_proj.", f"^{old}{name}.out_proj.") for name in ("self_attn", "encoder_attn")),
        *(Alias(f"^{old}mlp.{fc}.", f"^{old}fc{k}.") for k in (1, 2) for fc in (f"fc{k}", f"layers.{k - 1}")),
        Rename(f"^{old}", f"^{new}"),
        *below(new, new, norms),
        *below(new, new, [("fc1.", "ffn.linear1."), ("fc2.", "ffn.linear2."), ("encoder_attn.", "cross_attn.")]),
        *(join_qkv(f"{new}{name}.", f"{new}{name}.in_proj_") for name in joined),
    ]


def join_qkv(
    theirs: str, ours: str, *, names: Sequence[str] = ("q_proj", "k_proj", "v_proj"), leaf: str = "{leaf}"
) -> Join:
    """Return the rule that joins the projections to queries, keys and values, which have these names below a prefix."""
    return Join([f"^{theirs}{name}.{leaf}" for name in names], f"^{ours}{leaf}")
