"""Text models of the transformers library: Marian."""

from vitkit.interop.transformers_settings import Kind, Section, Settings
from vitkit.structures import BOS, EOS, PAD


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


KINDS = [Kind("marian", {"Transformer": "MarianMTModel"}, _read_marian, _write_marian)]
