"""Text-prompted detectors of the transformers library: Grounding DINO and MM-Grounding-DINO."""

from vitkit.apps.interop.backbones import read_swin, write_swin
from vitkit.apps.interop.transformers_settings import Kind, Row, Section, Settings, read_rows, write_rows
from vitkit.errors import ConfigError
from vitkit.registry import nearest
from vitkit.weights.tokenizer_files import BERT

_GROUNDING_DINO = [
    Row("num_queries", "num_queries", Settings.number, 900),
    Row("d_model", "head.d_model", Settings.number, 256),
    Row("d_model", "neck.out_channels", Settings.number, 256),
    Row("num_feature_levels", "neck.num_levels", Settings.number, 4),
    Row("encoder_layers", "head.num_encoder_layers", Settings.number, 6),
    Row("decoder_layers", "head.num_decoder_layers", Settings.number, 6),
    Row("encoder_attention_heads", "head.num_heads", Settings.number, 8),
    Row("decoder_attention_heads", "head.num_heads", Settings.number, 8),
    Row("encoder_ffn_dim", "head.d_ffn", Settings.number, 2048),
    Row("decoder_ffn_dim", "head.d_ffn", Settings.number, 2048),
    Row("encoder_n_points", "head.num_points", Settings.number, 4),
    Row("decoder_n_points", "head.num_points", Settings.number, 4),
    Row("dropout", "head.dropout", Settings.get, 0.1),
    Row("fusion_droppath", "head.fusion_drop_path", Settings.get, 0.1),
    Row("fusion_dropout", "head.fusion_dropout", Settings.get, 0.0),
    Row("max_text_len", "max_tokens", Settings.number, 256),
]
_TEXT = [
    Row("vocab_size", "vocabulary_size", Settings.number, 30522),
    Row("num_hidden_layers", "num_layers", Settings.number, 12),
    Row("hidden_size", "d_model", Settings.number, 768),
    Row("num_attention_heads", "num_heads", Settings.number, 12),
    Row("intermediate_size", "d_ffn", Settings.number, 3072),
    Row("hidden_dropout_prob", "dropout", Settings.get, 0.1),
    Row("max_position_embeddings", "max_length", Settings.number, 512),
]
_FIXED = dict(
    two_stage=True, embedding_init_target=True, query_dim=4, activation_function="relu", position_embedding_type="sine",
    positional_embedding_temperature=20, layer_norm_eps=1e-5, text_enhancer_dropout=0.0,
)  # fmt: skip
_TEXT_FIXED = dict(hidden_act="gelu", layer_norm_eps=1e-12)
_PROCESSOR = "GroundingDinoImageProcessor"
_STAGES = {f"stage{i}": f"res{i + 1}" for i in range(1, 5)}


def _read(settings: Settings, name: str) -> tuple[str, Section]:
    """Return vitkit's config of Grounding DINO, or of MM-Grounding-DINO."""
    settings.expect(**_FIXED)
    mm = settings.get("model_type") == "mm-grounding-dino"
    swin, bert = settings.sub("backbone_config"), settings.sub("text_config")
    bert.expect(**_TEXT_FIXED)
    stages = swin.names("out_features") or ["stage2", "stage3", "stage4"]
    for stage in stages:
        if stage not in _STAGES:
            raise ConfigError(f"{swin.where}: out_features={stages}: {nearest(stage, _STAGES)}")
    maps = [_STAGES[stage] for stage in stages]
    model = dict(
        type="GroundingDINO",
        tokenizer=BERT,
        backbone=read_swin(swin) | dict(out_features=maps),
        neck=dict(type="PyramidProjection", in_features=maps),
        text_encoder=read_rows(bert, _TEXT, dict(type="BertEncoder")),
        head=dict(
            type="GroundingDINOHead",
            scale=mm,
            bias=mm,
            box_eps=1e-5 if mm else 1e-3,
            share_heads=bool(settings.get("decoder_bbox_embed_share", True)),
        ),
    )
    base = "mm_grounding_dino_swin_tiny" if mm else "grounding_dino_swin_tiny"
    return base, read_rows(settings, _GROUNDING_DINO, model)


def _write(model: Section) -> Section:
    head, shared = model["head"], model["head"]["share_heads"]
    names = {ours: theirs for theirs, ours in _STAGES.items()}
    stages = [names[name] for name in model["neck"]["in_features"]]
    mm = dict(
        model_type="mm-grounding-dino",
        architectures=["MMGroundingDinoForObjectDetection"],
        decoder_cls_embed_share=shared,
    )
    return (
        write_rows(model, _GROUNDING_DINO)
        | _FIXED
        | (mm if head["bias"] else {})
        | dict(
            decoder_bbox_embed_share=shared,
            backbone_config=write_swin(model) | dict(out_features=stages),
            text_config=write_rows(model["text_encoder"], _TEXT) | _TEXT_FIXED | dict(model_type="bert"),
        )
    )


KINDS = [
    # What is written is that of the first kind, or MM-Grounding-DINO's in its place.
    Kind("grounding-dino", {"GroundingDINO": "GroundingDinoForObjectDetection"}, _read, _write, _PROCESSOR),
    Kind("mm-grounding-dino", {}, _read, _write, _PROCESSOR),
]
