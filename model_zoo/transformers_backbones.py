"""Key names of the transformers library's ResNet, Swin, Swin V2, ViT and TimeSformer, both ways.

Newer versions of the library spell some of them differently in memory; files keep the spelling that is written here.
"""

import torch
from torch import nn

from vitkit.model_zoo.converter import State
from vitkit.model_zoo.key_table import Alias, Custom, Drop, Join, KeyTable, Rename, Rule, below


def without_prefix(prefix: str, *pieces: str) -> list[Rule]:
    """Return rules for files that hold the model without its head, and so without `prefix`."""
    return [Alias(f"^{piece}", f"^{prefix}{piece}") for piece in pieces]


def resnet_rules(theirs: str, ours: str) -> list[Rule]:
    """Return the rules of a ResNet below these prefixes; vitkit's names are torchvision's."""
    return [
        *below(f"{theirs}embedder.embedder.", ours, [("convolution.", "conv1."), ("normalization.", "bn1.")]),
        *(Rename(f"^{theirs}encoder.stages.{i}.layers.", f"^{ours}layer{i + 1}.") for i in range(4)),
        *(
            rule
            for i in range(1, 5)
            for rule in below(
                f"{ours}layer{i}.{{i}}.",
                f"{ours}layer{i}.{{i}}.",
                [
                    ("shortcut.convolution.", "downsample.0."),
                    ("shortcut.normalization.", "downsample.1."),
                    *((f"layer.{k}.convolution.", f"conv{k + 1}.") for k in range(3)),
                    *((f"layer.{k}.normalization.", f"bn{k + 1}.") for k in range(3)),
                ],
            )
        ),
    ]


def swin_rules(theirs: str, ours: str, *, second: bool = False, stage: str = "stage") -> list[Rule]:
    """Return the rules of a Swin Transformer below these prefixes; vitkit's names are the official ones.

    Args:
        theirs, ours: prefixes of the backbone.
        second: whether it is Swin V2.
        stage: the text before the number of a feature map's norm, counted from 1; "": counted from 0.
    """
    block = f"{ours}layers.{{i}}.blocks.{{j}}."
    newer = [
        *((f"attention.{x}_proj.", f"attention.self.{name}.") for x, name in zip("qkv", ("query", "key", "value"))),
        ("attention.relative_position_bias.", "attention.self."),
        ("attention.o_proj.", "attention.output.dense."),
        ("mlp.fc1.", "intermediate.dense."),
        ("mlp.fc2.", "output.dense."),
    ]
    first_norm = 1 if stage else 0
    return [
        Drop(".relative_position_index$"),
        Drop(".relative_coords_table$"),
        Drop(f"^{theirs}embeddings.mask_token"),
        *below(
            theirs,
            ours,
            [
                ("embeddings.patch_embeddings.projection.", "patch_embed.proj."),
                ("embeddings.norm.", "patch_embed.norm."),
                ("encoder.layers.", "layers."),
                *((f"hidden_states_norms.{stage}{i + first_norm}.", f"norm{i}.") for i in range(4)),
                ("layernorm.", "norm."),
            ],
        ),
        *(Alias(f"^{block}{new}", f"^{block}{old}") for new, old in newer),
        *(_second_attention(block) if second else [_joined(f"{block}attention.self.", f"{block}attention.self.qkv.")]),
        *below(
            block,
            block,
            [
                ("attention.self.", "attn."),
                ("attention.output.dense.", "attn.proj."),
                ("layernorm_before.", "norm1."),
                ("layernorm_after.", "norm2."),
                ("intermediate.dense.", "mlp.fc1."),
                ("output.dense.", "mlp.fc2."),
            ],
        ),
    ]


def _joined(theirs: str, ours: str, leaf: str = "{leaf}") -> Join:
    """Return the rule that joins the projections of an attention to queries, keys and values."""
    return Join([f"^{theirs}{name}.{leaf}" for name in ("query", "key", "value")], f"^{ours}{leaf}")


def _second_attention(block: str) -> list[Rule]:
    """Return the rules of Swin V2's attention, whose keys have no bias."""
    return [
        _joined(f"{block}attention.self.", f"{block}attention.self.qkv.", "weight"),
        *below(
            f"{block}attention.self.",
            f"{block}attention.self.",
            [("query.bias", "q_bias"), ("value.bias", "v_bias"), ("continuous_position_bias_mlp.", "cpb_mlp.")],
        ),
    ]


def without_last_norm(ours: str) -> Custom:
    """Return the rule that leaves out the classifier's last norm if the model has none below the prefix."""

    def read(state: State, model: nn.Module) -> State:
        # A classifier's backbone has the prefix "backbone.", which is added to the state later.
        missing = not {f"{ours}norm.weight", f"backbone.{ours}norm.weight"} & model.state_dict().keys()
        return {key: v for key, v in state.items() if not (missing and key.startswith(f"{ours}norm."))}

    return Custom(read, lambda state, _: state)


def with_counters(theirs: str) -> Custom:
    """Return the rule that writes batch counters for batch norms below the prefix, as frozen ones have none."""

    def write(state: State, model: nn.Module) -> State:
        norms = [key.removesuffix("running_mean") for key in state if key.endswith("running_mean")]
        counters = {f"{norm}num_batches_tracked": torch.tensor(0) for norm in norms if norm.startswith(theirs)}
        return counters | state

    return Custom(lambda state, _: state, write)


_LAYER = "vit.encoder.layer.{i}."

RESNET = KeyTable(
    [
        *without_prefix("resnet.", "embedder.", "encoder."),
        *resnet_rules("resnet.", ""),
        Rename("^classifier.1.", "^fc."),
    ]
)
SWIN = KeyTable(
    [
        *without_prefix("swin.", "embeddings.", "encoder.", "layernorm."),
        Alias("^hidden_states_norms.", "^swin.hidden_states_norms."),
        *swin_rules("swin.", ""),
        without_last_norm(""),
        Rename("^classifier.", "^head."),
    ]
)
SWIN_V2 = KeyTable(
    [
        *without_prefix("swinv2.", "embeddings.", "encoder.", "layernorm."),
        Alias("^hidden_states_norms.", "^swinv2.hidden_states_norms."),
        *swin_rules("swinv2.", "", second=True),
        without_last_norm(""),
        Rename("^classifier.", "^head."),
    ]
)
VIT = KeyTable(
    [
        *without_prefix("vit.", "embeddings.", "encoder.", "layers.", "layernorm."),
        Drop("^pooler."),
        Drop("^vit.pooler."),
        Drop("^vit.embeddings.mask_token"),
        Alias("^vit.layers.{i}.", f"^{_LAYER}"),
        *(
            Alias(f"^{_LAYER}attention.{x}_proj.", f"^{_LAYER}attention.attention.{name}.")
            for x, name in zip("qkv", ("query", "key", "value"))
        ),
        Alias(f"^{_LAYER}attention.o_proj.", f"^{_LAYER}attention.output.dense."),
        Alias(f"^{_LAYER}mlp.fc1.", f"^{_LAYER}intermediate.dense."),
        Alias(f"^{_LAYER}mlp.fc2.", f"^{_LAYER}output.dense."),
        _joined(f"{_LAYER}attention.attention.", "blocks.{i}.attn.qkv."),
        *below(
            _LAYER,
            "blocks.{i}.",
            [
                ("layernorm_before.", "norm1."),
                ("layernorm_after.", "norm2."),
                ("attention.output.dense.", "attn.proj."),
                ("intermediate.dense.", "mlp.fc1."),
                ("output.dense.", "mlp.fc2."),
            ],
        ),
        Rename("^vit.embeddings.cls_token", "^cls_token"),
        Rename("^vit.embeddings.position_embeddings", "^pos_embed"),
        Rename("^vit.embeddings.patch_embeddings.projection.", "^patch_embed.proj."),
        Rename("^vit.layernorm.", "^norm."),
        Rename("^classifier.", "^head."),
    ]
)
TIMESFORMER = KeyTable(
    [
        *without_prefix("timesformer.", "embeddings.", "encoder.", "layernorm."),
        *below(
            "timesformer.encoder.layer.{i}.",
            "blocks.{i}.",
            [
                ("temporal_attention.attention.qkv.", "temporal_attn.qkv."),
                ("temporal_attention.output.dense.", "temporal_attn.proj."),
                ("temporal_dense.", "temporal_fc."),
                ("temporal_layernorm.", "temporal_norm1."),
                ("attention.attention.qkv.", "attn.qkv."),
                ("attention.output.dense.", "attn.proj."),
                ("layernorm_before.", "norm1."),
                ("layernorm_after.", "norm2."),
                ("intermediate.dense.", "mlp.fc1."),
                ("output.dense.", "mlp.fc2."),
            ],
        ),
        Rename("^timesformer.embeddings.cls_token", "^cls_token"),
        Rename("^timesformer.embeddings.position_embeddings", "^pos_embed"),
        Rename("^timesformer.embeddings.time_embeddings", "^time_embed"),
        Rename("^timesformer.embeddings.patch_embeddings.projection.", "^patch_embed.proj."),
        Rename("^timesformer.layernorm.", "^norm."),
        Rename("^classifier.", "^head."),
    ]
)
