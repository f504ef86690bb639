"""Small text-prompted detectors for tests, and the same ones of the transformers library."""

from typing import Any

import torch
from torch import Tensor, nn

from vitkit.engine.build import build_model
from vitkit.structures import PromptTokens
from vitkit.text.vocabulary import TokenizerVocabulary, Vocabulary

SEPARATORS, OUTSIDE = torch.tensor([1012, 1029]), torch.tensor([101, 102, 0])
"""BERT's numbers of "." and "?"; of [CLS], [SEP] and [PAD]."""


def grounding_config(*, mm: bool = False, shared: bool = True, levels: int = 4, **model: Any) -> dict[str, Any]:
    """Return the `model` section of a small Grounding DINO, or MM-Grounding-DINO, with BERT's number of tokens."""
    stages = ["res2", "res3", "res4", "res5"][1 if levels == 4 else 0 :]
    return dict(
        type="GroundingDINO", num_queries=20,
        backbone=dict(
            type="Swin", embed_dim=16, depths=[2, 2, 2, 2], num_heads=[1, 2, 4, 8], drop_path=0.0, out_features=stages
        ),
        neck=dict(type="PyramidProjection", in_features=stages, out_channels=64, num_levels=levels),
        text_encoder=dict(type="BertEncoder", num_layers=2, d_model=32, num_heads=4, d_ffn=64, dropout=0.0),
        head=dict(
            type="GroundingDINOHead", d_model=64, num_heads=4, d_ffn=64, num_encoder_layers=2, num_decoder_layers=3,
            fusion_drop_path=0.0, scale=mm, bias=mm, share_heads=shared,
        ),
    ) | model  # fmt: skip


def build_grounding(**options: Any) -> nn.Module:
    """Return the model of `grounding_config` with random weights."""
    return build_model(grounding_config(**options))


def small_config(**options: Any) -> dict[str, Any]:
    """Return the `model` section of a small Grounding DINO whose text encoder is trained from nothing."""
    encoder = dict(type="TransformerTextEncoder", num_layers=1, d_model=16, num_heads=2, d_ffn=32, dropout=0.0)
    return grounding_config(text_encoder=encoder, **options)


def build_small(vocabulary: Vocabulary, **options: Any) -> nn.Module:
    """Return the model of `small_config` with random weights."""
    torch.manual_seed(0)
    return build_model(small_config(**options), vocabularies={"target": vocabulary})


def library_grounding(transformers: Any, *, mm: bool = False, shared: bool = True, levels: int = 4) -> nn.Module:
    """Return the transformers library's model of the same size, with random weights of all kinds."""
    swin = transformers.SwinConfig(
        image_size=64, embed_dim=16, depths=[2, 2, 2, 2], num_heads=[1, 2, 4, 8], drop_path_rate=0.0,
        out_indices=[2, 3, 4] if levels == 4 else [1, 2, 3, 4],
    )  # fmt: skip
    bert = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    name = "MMGroundingDino" if mm else "GroundingDino"
    config = getattr(transformers, f"{name}Config")(
        backbone_config=swin, text_config=bert, num_queries=20, d_model=64, encoder_layers=2, decoder_layers=3,
        encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_attention_heads=4, decoder_attention_heads=4, dropout=0.0,
        fusion_droppath=0.0, num_feature_levels=levels, auxiliary_loss=True, decoder_bbox_embed_share=shared,
        **{"decoder_cls_embed_share": shared} if mm else {},
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForObjectDetection")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Initial values leave boxes where they are, fusion without effect, and all biases equal.
            if parameter.dim() < 2 or "bbox_embed" in key or "sampling_offsets" in key:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


BERT_TOKENS = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103, "?": 1029, ".": 1012} | {
    word: 2000 + number for number, word in enumerate(["a", "red", "dog", "cat", "hot", "##dog", "##s", "k", "##o"])
}
"""Some of the tokens of bert-base-uncased, the special ones with their numbers there."""


def bert_tokenizer(*more: str) -> str:
    """Return the content of a `tokenizer.json` with `BERT_TOKENS` and more of them."""
    from tokenizers import BertWordPieceTokenizer

    tokens = BERT_TOKENS | {token: 3000 + number for number, token in enumerate(more)}
    return BertWordPieceTokenizer(tokens, lowercase=True).to_str()


def bert_vocabulary(*more: str) -> TokenizerVocabulary:
    """Return the vocabulary of `bert_tokenizer`."""
    return TokenizerVocabulary(bert_tokenizer(*more), [0, 100, 101, 102, 103])


def prompt_of(tokens: Tensor, separators: Tensor, outside: Tensor) -> PromptTokens:
    """Return the prompt of tokens not made phrase by phrase, such as a text's.

    Args:
        tokens: (B, S) int64.
        separators: (K,) int64, the tokens that end a phrase.
        outside: (M,) int64, those that belong to no phrase: the first, the last, and padding.
    """
    ends, is_outside = torch.isin(tokens, separators), torch.isin(tokens, outside)
    phrase_ids = ends.cumsum(1) - ends.long()  # the separators before each token
    return PromptTokens(tokens, phrase_ids.masked_fill(is_outside, -1), ~(ends | is_outside))
