"""Text models of the transformers library: Marian, BERT and GPT-2."""

from vitkit.errors import ConfigError
from vitkit.interop.transformers_settings import Kind, Section, Settings
from vitkit.structures import BOS, EOS, PAD

_BERT_MASK = 103
"""BERT's mask token in all published vocabularies."""
_GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
"""The library's names of activations -> vitkit's; the first one of an activation is written."""


def _read_marian(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of Marian, whose tokens are those of the folder's SentencePiece models."""
    settings.expect(scale_embedding=True, static_position_embeddings=True, tie_word_embeddings=True)
    activation = {"swish": "silu"}.get(settings["activation_function"], settings["activation_function"])
    beams, length = settings.get("num_beams", 1), settings.number("max_position_embeddings")
    return "configs/transformer_base_wmt14.py", dict(
        type="Transformer",
        source_size=settings.number("vocab_size"),
        target_size=settings.number("decoder_vocab_size", settings.number("vocab_size")),
        num_layers=[settings.number("encoder_layers"), settings.number("decoder_layers")],
        d_model=settings.number("d_model"),
        num_heads=settings.same("encoder_attention_heads", "decoder_attention_heads"),
        d_ffn=settings.same("encoder_ffn_dim", "decoder_ffn_dim"),
        dropout=settings.get("dropout", 0.1),
        activation=activation,
        max_length=length,
        shared_embeddings=settings.get("share_encoder_decoder_embeddings", True),
        output_bias=True,
        decoding=dict(method="beam" if beams > 1 else "greedy", beams=beams, length_penalty=1.0, max_length=length),
    )


def _write_marian(model: Section) -> Section:
    layers = model["num_layers"]
    encoder_layers, decoder_layers = (layers,) * 2 if isinstance(layers, int) else layers
    return dict(
        d_model=model["d_model"],
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        encoder_attention_heads=model["num_heads"],
        decoder_attention_heads=model["num_heads"],
        encoder_ffn_dim=model["d_ffn"],
        decoder_ffn_dim=model["d_ffn"],
        dropout=model["dropout"],
        activation_function=model["activation"],
        max_position_embeddings=model["max_length"],
        share_encoder_decoder_embeddings=model["shared_embeddings"],
        scale_embedding=True,
        static_position_embeddings=True,
        tie_word_embeddings=model["tied_output"],
        pad_token_id=PAD,
        bos_token_id=BOS,
        decoder_start_token_id=BOS,
        eos_token_id=EOS,
        forced_eos_token_id=EOS,
    )


def _check_architecture(settings: Settings, *supported: str) -> None:
    """Check that a folder contains the language model, rather than only its layers or a classifier on them.

    Raises:
        ConfigError: it does not.
    """
    names = settings.names("architectures")
    if names and not set(names) & set(supported):
        raise ConfigError(f"{settings.where}: architectures {names}: expected {' or '.join(supported)}.")


def _read_bert(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of BERT for masked tokens; a text is the first sentence of a pair without a second."""
    _check_architecture(settings, "BertForMaskedLM", "BertForPreTraining")
    settings.expect(hidden_act="gelu", position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    return "configs/language_model_masked_multi30k.py", dict(
        type="MaskedLanguageModel",
        target_size=settings.number("vocab_size"),
        mask_id=settings.number("mask_token_id", _BERT_MASK),
        num_layers=settings.number("num_hidden_layers"),
        d_model=settings.number("hidden_size"),
        num_heads=settings.number("num_attention_heads"),
        d_ffn=settings.number("intermediate_size"),
        dropout=settings.get("hidden_dropout_prob", 0.1),
        activation="gelu",
        norm_eps=settings.factor("layer_norm_eps", 1e-12),
        scale_embedding=False,
        embedding_norm=True,
        class_token=True,
        max_length=settings.number("max_position_embeddings"),
        tied_output=settings.get("tie_word_embeddings", True),
    )


def _write_bert(model: Section) -> Section:
    return dict(
        hidden_size=model["d_model"],
        num_hidden_layers=model["num_layers"],
        num_attention_heads=model["num_heads"],
        intermediate_size=model["d_ffn"],
        hidden_act="gelu",
        hidden_dropout_prob=model["dropout"],
        attention_probs_dropout_prob=model["dropout"],
        layer_norm_eps=model["norm_eps"],
        max_position_embeddings=model["max_length"],
        tie_word_embeddings=model["tied_output"],
        type_vocab_size=2,
    )


def _read_gpt2(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of GPT-2."""
    _check_architecture(settings, "GPT2LMHeadModel")
    settings.expect(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    activation, length = settings.get("activation_function", "gelu_new"), settings.number("n_positions", 1024)
    if activation not in list(_GPT2_ACTIVATIONS):  # a list, as a damaged file may have an unhashable value
        raise ConfigError(
            f"{settings.where}: activation_function={activation!r}: expected one of {', '.join(_GPT2_ACTIVATIONS)}."
        )
    d_model = settings.number("n_embd")
    return "configs/language_model_causal_multi30k.py", dict(
        type="CausalLanguageModel",
        target_size=settings.number("vocab_size"),
        num_layers=settings.number("n_layer"),
        d_model=d_model,
        num_heads=settings.number("n_head"),
        d_ffn=settings.number("n_inner", 4 * d_model),
        dropout=settings.get("resid_pdrop", 0.1),
        activation=_GPT2_ACTIVATIONS[activation],
        norm_eps=settings.factor("layer_norm_epsilon", 1e-5),
        scale_embedding=False,
        max_length=length,
        tied_output=settings.get("tie_word_embeddings", True),
        output_bias=True,  # with which the special tokens that GPT-2 does not have are never written
        decoding=dict(method="sample", top_p=0.9, max_length=min(100, length)),
    )


def _write_gpt2(model: Section) -> Section:
    names = {ours: theirs for theirs, ours in reversed(_GPT2_ACTIVATIONS.items())}
    return dict(
        n_embd=model["d_model"],
        n_layer=model["num_layers"],
        n_head=model["num_heads"],
        n_inner=model["d_ffn"],
        n_positions=model["max_length"],
        activation_function=names.get(model["activation"], model["activation"]),
        resid_pdrop=model["dropout"],
        embd_pdrop=model["dropout"],
        attn_pdrop=model["dropout"],
        layer_norm_epsilon=model["norm_eps"],
        tie_word_embeddings=model["tied_output"],
    )


KINDS = [
    Kind("marian", {"Transformer": "MarianMTModel"}, _read_marian, _write_marian),
    Kind("bert", {"MaskedLanguageModel": "BertForMaskedLM"}, _read_bert, _write_bert),
    Kind("gpt2", {"CausalLanguageModel": "GPT2LMHeadModel"}, _read_gpt2, _write_gpt2),
]
