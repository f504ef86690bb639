"""Text models of the transformers library: Marian, BERT and GPT-2."""

from vitkit.apps.interop.transformers_settings import Kind, Row, Section, Settings, read_rows, write_rows
from vitkit.errors import ConfigError
from vitkit.structures import BOS, EOS, PAD

_BERT_MASK = 103
"""BERT's mask token in all published vocabularies."""
_GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
"""The library's names of activations -> vitkit's; the first one of an activation is written."""

_MARIAN = [
    Row("d_model", "d_model"),
    Row("encoder_attention_heads", "num_heads"),
    Row("decoder_attention_heads", "num_heads"),
    Row("encoder_ffn_dim", "d_ffn"),
    Row("decoder_ffn_dim", "d_ffn"),
    Row("dropout", "dropout", Settings.get, 0.1),
    Row("max_position_embeddings", "max_length"),
    Row("share_encoder_decoder_embeddings", "shared_embeddings", Settings.get, True),
]


def _read_marian(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of Marian, whose tokens are those of the folder's SentencePiece models."""
    settings.expect(scale_embedding=True, static_position_embeddings=True, tie_word_embeddings=True)
    activation = {"swish": "silu"}.get(settings["activation_function"], settings["activation_function"])
    beams, length = settings.get("num_beams", 1), settings.number("max_position_embeddings")
    model = dict(
        type="Transformer",
        source_size=settings.number("vocab_size"),
        target_size=settings.number("decoder_vocab_size", settings.number("vocab_size")),
        num_layers=[settings.number("encoder_layers"), settings.number("decoder_layers")],
        activation=activation,
        output_bias=True,
        decoding=dict(method="beam" if beams > 1 else "greedy", beams=beams, length_penalty=1.0, max_length=length),
    )
    return "transformer_base_wmt14", read_rows(settings, _MARIAN, model)


def _write_marian(model: Section) -> Section:
    layers = model["num_layers"]
    encoder_layers, decoder_layers = (layers,) * 2 if isinstance(layers, int) else layers
    return write_rows(model, _MARIAN) | dict(
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        activation_function=model["activation"],
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


_BERT = [
    Row("num_hidden_layers", "num_layers"),
    Row("hidden_size", "d_model"),
    Row("num_attention_heads", "num_heads"),
    Row("intermediate_size", "d_ffn"),
    Row("hidden_dropout_prob", "dropout", Settings.get, 0.1),
    Row("layer_norm_eps", "norm_eps", Settings.factor, 1e-12),
    Row("max_position_embeddings", "max_length"),
    Row("tie_word_embeddings", "tied_output", Settings.get, True),
]


def _read_bert(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of BERT for masked tokens; a text is the first sentence of a pair without a second."""
    _check_architecture(settings, "BertForMaskedLM", "BertForPreTraining")
    settings.expect(hidden_act="gelu", position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    model = dict(
        type="MaskedLanguageModel",
        target_size=settings.number("vocab_size"),
        mask_id=settings.number("mask_token_id", _BERT_MASK),
        activation="gelu",
        scale_embedding=False,
        embedding_norm=True,
        class_token=True,
    )
    return "language_model_masked_multi30k", read_rows(settings, _BERT, model)


def _write_bert(model: Section) -> Section:
    others = dict(hidden_act="gelu", attention_probs_dropout_prob=model["dropout"], type_vocab_size=2)
    return write_rows(model, _BERT) | others


_GPT2 = [
    Row("n_layer", "num_layers"),
    Row("n_embd", "d_model"),
    Row("n_head", "num_heads"),
    Row("resid_pdrop", "dropout", Settings.get, 0.1),
    Row("layer_norm_epsilon", "norm_eps", Settings.factor, 1e-5),
    Row("n_positions", "max_length", default=1024),
    Row("tie_word_embeddings", "tied_output", Settings.get, True),
]


def _read_gpt2(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of GPT-2."""
    _check_architecture(settings, "GPT2LMHeadModel")
    settings.expect(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    activation = settings.get("activation_function", "gelu_new")
    if activation not in list(_GPT2_ACTIVATIONS):  # a list, as a damaged file may have an unhashable value
        raise ConfigError(
            f"{settings.where}: activation_function={activation!r}: expected one of {', '.join(_GPT2_ACTIVATIONS)}."
        )
    model = dict(
        type="CausalLanguageModel",
        target_size=settings.number("vocab_size"),
        d_ffn=settings.number("n_inner", 4 * settings.number("n_embd")),
        activation=_GPT2_ACTIVATIONS[activation],
        scale_embedding=False,
        output_bias=True,  # with which the special tokens that GPT-2 does not have are never written
        decoding=dict(method="sample", top_p=0.9, max_length=min(100, settings.number("n_positions", 1024))),
    )
    return "language_model_causal_multi30k", read_rows(settings, _GPT2, model)


def _write_gpt2(model: Section) -> Section:
    names = {ours: theirs for theirs, ours in reversed(_GPT2_ACTIVATIONS.items())}
    return write_rows(model, _GPT2) | dict(
        n_inner=model["d_ffn"],
        activation_function=names.get(model["activation"], model["activation"]),
        embd_pdrop=model["dropout"],
        attn_pdrop=model["dropout"],
    )


KINDS = [
    Kind("marian", {"Transformer": "MarianMTModel"}, _read_marian, _write_marian),
    Kind("bert", {"MaskedLanguageModel": "BertForMaskedLM"}, _read_bert, _write_bert),
    Kind("gpt2", {"CausalLanguageModel": "GPT2LMHeadModel"}, _read_gpt2, _write_gpt2),
]
