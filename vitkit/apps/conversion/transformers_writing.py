"""Write folders of the transformers library from vitkit's models: the reverse of `transformers_configs`."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from vitkit.apps.inference.language import LanguageModel
from vitkit.apps.inference.predictor import Predictor
from vitkit.apps.inference.translator import TextModel, Translator
from vitkit.apps.interop.transformers_configs import KINDS
from vitkit.apps.interop.transformers_settings import INTERPOLATIONS, Section, Settings
from vitkit.config.schema import Slot, slots_in
from vitkit.data.transforms.classification import ClassificationEvalTransforms
from vitkit.data.transforms.clips import ClipEvalTransforms
from vitkit.data.transforms.pipelines import EvalResize
from vitkit.errors import CheckpointError
from vitkit.model_zoo.converters import Written, write_names
from vitkit.models.base import statistics_owner
from vitkit.ops.images import pixel_statistics
from vitkit.registry import BACKBONES, MODELS, REGISTRIES, Registry
from vitkit.structures import EOS
from vitkit.text.vocabulary import TokenizerVocabulary, Vocabulary
from vitkit.weights.hub import PREPROCESSOR
from vitkit.weights.marian import TARGET_NUMBERS, TOKEN_FILES
from vitkit.weights.tokenizer_files import ROWS
from vitkit.weights.tokenizer_files import TOKENIZER as TOKENIZER_FILE
from vitkit.weights.transformers_folder import CONFIG, METADATA, WEIGHTS
from vitkit.weights.writing import write_bytes

logger = logging.getLogger("vitkit")

TOKENIZER = "tokenizer_config.json"
DIFFERING = {
    "deimv2": "The transformers library's DEIMv2 has ReLU in its box heads, and norms before the selection of queries "
    "and after the last map, so its predictions are not those of the original and of vitkit."
}
"""Kind of the library's models -> why the same weights predict something else in it."""
_NOT_COMPARED = (
    *("pretrained", "frozen_stages", "frozen_stem", "freeze_detr", "drop_path", "dropout", "position_std"),
    *("norm", "out_features", "num_classes", "source_size", "target_size", "output_bias", "tasks", "things"),
    *("training_queries", "pixel_mean", "pixel_std", "size_divisibility", "isolate_padding", "decoding"),
    *("num_detections", "mask_id", "mask_share", "word_vectors", "tokenizer", "vocabulary_size", "frozen", "box_eps"),
)
"""Arguments that are not compared: those of training, those that follow from the weights, and those of pre- and
post-processing."""


def write_folder(folder: Path, loaded: Predictor | TextModel, spec: str | Mapping[str, Any]) -> Written:
    """Write a model as a folder for the library's `from_pretrained`: settings, weights, and a text model's tokens, if
    the library can read them.

    Args:
        spec: the model section of the config.
    Raises:
        CheckpointError: the library lacks the model or one of its parts, or the folder cannot be written.
    """
    result = write_names(loaded.model, "transformers")
    values = make_config_json(loaded, spec)
    files = {CONFIG: _as_json(values)}
    if isinstance(loaded, LanguageModel):
        if isinstance(loaded.vocabulary, TokenizerVocabulary):
            files[TOKENIZER_FILE] = loaded.vocabulary.content.encode()
            result = result._replace(state=order_as_file(result.state, loaded.vocabulary))
    elif isinstance(loaded, Translator):
        files |= make_token_files(loaded.vocabularies)
    else:
        files[PREPROCESSOR] = _as_json(_preprocessor(loaded, values["model_type"]))
        if isinstance(loaded.model.vocabulary, TokenizerVocabulary):  # of a text-prompted detector, in the file's order
            files[TOKENIZER_FILE] = loaded.model.vocabulary.content.encode()
    if values["model_type"] in DIFFERING:
        logger.warning("%s: %s", folder, DIFFERING[values["model_type"]])
    for name, data in files.items():
        write_bytes(folder / name, data)
    write_safetensors(folder / WEIGHTS[0], result.state)
    return result


def write_safetensors(path: Path, state: Mapping[str, Tensor], entries: Mapping[str, Any] | None = None) -> None:
    """Write a .safetensors file atomically.

    Args:
        entries: what a checkpoint holds besides the weights (`MODEL_ENTRIES`), for `read_checkpoint`.
    Raises:
        CheckpointError: it cannot be written.
    """
    header = {"format": "pt"} | ({METADATA: json.dumps(entries)} if entries else {})
    # Each tensor is stored separately, even if several are views of one.
    data = save({key: value.detach().cpu().contiguous().clone() for key, value in state.items()}, header)
    write_bytes(path, data)


def order_as_file(state: Mapping[str, Tensor], vocabulary: TokenizerVocabulary) -> dict[str, Tensor]:
    """Return the library's weights, written from vitkit's, with rows in the order of the file's numbers."""
    state, numbers = dict(state), vocabulary.numbers
    num_special = len(vocabulary.special)
    for key in [key for key in state if key.endswith(ROWS)]:
        rows = state[key]
        ordered = rows.new_zeros(max(numbers) + 1, *rows.shape[1:])
        ordered[numbers[num_special:]] = rows[num_special:]
        for index in range(num_special):  # where one token stands for several, the last one is EOS
            ordered[numbers[index]] = rows[index]
        state[key] = ordered
    return state


def _as_json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, indent=2, ensure_ascii=False).encode()


def make_token_files(vocabularies: Mapping[str, Vocabulary]) -> dict[str, bytes]:
    """Return the files of the library's MarianTokenizer; none for words and characters, which it does not support."""
    source, target = vocabularies["source"], vocabularies["target"]
    if source.pieces_model is None or target.pieces_model is None:
        return {}
    numbers = {
        name: _as_json({token: number for number, token in enumerate(vocabulary.tokens)})
        for name, vocabulary in ((TOKEN_FILES[2], source), (TARGET_NUMBERS, target))
    }
    shared = source.tokens == target.tokens
    if shared:
        del numbers[TARGET_NUMBERS]
    settings = dict(tokenizer_class="MarianTokenizer", separate_vocabs=not shared)
    return {
        TOKEN_FILES[0]: source.pieces_model,
        TOKEN_FILES[1]: target.pieces_model,
        TOKENIZER: _as_json(settings),
        **numbers,
    }


def make_config_json(loaded: Predictor | TextModel, spec: Mapping[str, Any]) -> Section:
    """Return the library's config of a model.

    Raises:
        CheckpointError: the library does not support a setting.
    """
    model = _resolve(spec, MODELS)
    name = model["backbone"]["type"] if model["type"] == "Classifier" else model["type"]
    kind = next((kind for kind in KINDS.values() if name in kind.architectures), None)
    if kind is None:
        raise CheckpointError(f"{name}: the transformers library has no such model.")
    if kind.name in ("deformable_detr", "rf_detr") and model["neck"]["in_features"] is None:
        model["neck"]["in_features"] = loaded.model.neck.in_features
    if kind.name == "rf_detr" and model["backbone"]["out_features"] is None:
        model["backbone"]["out_features"] = list(loaded.model.backbone.feature_info)
    if getattr(loaded.model, "training_queries", None) is None:
        model["training_queries"] = []
    if kind.name == "grounding-dino":
        model["text_encoder"]["vocabulary_size"] = loaded.model.text_encoder.embedding.num_embeddings
    if kind.name in ("rt_detr_v2", "d_fine", "deimv2") and isinstance(model["head"]["num_points"], int):
        model["head"]["num_points"] = [model["head"]["num_points"]] * len(loaded.model.neck.feature_info)
    if "text_encoder" in model:  # a model with a vocabulary has as many rows
        model["text_encoder"]["vocabulary_size"] = len(loaded.model.text_encoder.embedding.weight)
    values = {"model_type": kind.name, "architectures": [kind.architectures[name]], **kind.write(model)}
    values |= {**_classes(loaded), "torch_dtype": "float32"}
    if isinstance(loaded, Translator):
        model["num_layers"] = [values["encoder_layers"], values["decoder_layers"]]
        sizes = [len(vocabulary) for vocabulary in loaded.vocabularies.values()]
        values |= {"vocab_size": sizes[0], "decoder_vocab_size": sizes[-1]}
    if isinstance(loaded, LanguageModel):
        values |= _token_settings(loaded)
    if "tasks" in model:
        things = loaded.model.things
        values["vitkit"] = {"tasks": list(model["tasks"]), "things": None if things is None else list(things)}
    _, read = kind.read(Settings(values, CONFIG), "")
    differing = _difference(model, _resolve(read, MODELS), "model")
    if differing:
        raise CheckpointError(f"{differing}: the transformers library's model has no such setting.")
    return values


def _token_settings(loaded: LanguageModel) -> Section:
    """Return the number of tokens and the numbers of the special ones."""
    vocabulary, names = loaded.vocabulary, ("pad_token_id", None, "bos_token_id", "eos_token_id", "mask_token_id")
    numbers = vocabulary.numbers if isinstance(vocabulary, TokenizerVocabulary) else range(len(vocabulary))
    num_special = EOS + 1 if vocabulary.mask_id is None else vocabulary.mask_id + 1
    special = {name: numbers[index] for index, name in enumerate(names[:num_special]) if name}
    return {"vocab_size": max(numbers) + 1, **special}


def _resolve(spec: Any, registry: Registry) -> Section:
    """Return all arguments of a spec and its nested specs, defaults included."""
    constructor, _ = registry.resolve(spec, "model")
    slots = slots_in(Slot(Any, registry=registry), spec, "model")
    values = {name: slot.default for name, slot in slots.items() if name != "type"}
    for name in ("backbone", "neck", "head", "text_encoder"):
        if name in values:
            values[name] = _resolve(values[name], REGISTRIES[name])
    if "vit" in values:  # of a SpatialAdapter
        values["vit"] = _resolve(values["vit"], BACKBONES)
    return {"type": constructor.__name__, **values}


def _difference(ours: Any, theirs: Any, where: str) -> str | None:
    """Return the first setting in which two resolved specs differ, as key=value; None if they are the same model."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        keys = [key for key in (ours | theirs) if key not in _NOT_COMPARED]
        found = (_difference(ours.get(key), theirs.get(key), f"{where}.{key}") for key in keys)
        return next(filter(None, found), None)
    as_list = [list(value) if isinstance(value, tuple) else value for value in (ours, theirs)]
    return None if as_list[0] == as_list[1] else f"{where}={ours!r}"


def _classes(loaded: Predictor | TextModel) -> Section:
    if isinstance(loaded, TextModel) or not loaded.classes:
        return {}
    names = dict(enumerate(loaded.classes))
    return {"id2label": names, "label2id": {name: number for number, name in names.items()}}


def _preprocessor(loaded: Predictor, kind: str) -> Section:
    """Return the settings of the library's image processor that prepares images as `loaded` does."""
    model, transforms = loaded.model, loaded.transforms
    statistics = pixel_statistics(statistics_owner(model))
    values = dict(image_processor_type=KINDS[kind].processor, do_rescale=True)
    values["do_normalize"] = (*statistics["mean"], *statistics["std"]) != (0, 0, 0, 1, 1, 1)
    values |= dict(image_mean=list(statistics["mean"]), image_std=list(statistics["std"]))
    if isinstance(transforms, EvalResize) and transforms.size is not None:
        height, width = transforms.size
        return values | dict(do_resize=True, size=dict(height=height, width=width))
    if isinstance(transforms, EvalResize):
        longest = {} if transforms.max_size is None else {"longest_edge": transforms.max_size}
        return values | dict(do_resize=True, size=dict(shortest_edge=transforms.short_side, **longest))
    if not isinstance(transforms, ClassificationEvalTransforms | ClipEvalTransforms):
        return values | dict(do_resize=False)
    square = dict(height=transforms.size, width=transforms.size)
    if isinstance(transforms, ClassificationEvalTransforms):
        values["resample"] = _resample(transforms.interpolation)
        if transforms.short_side is None:
            return values | dict(image_processor_type="ViTImageProcessor", do_resize=True, size=square)
    size = dict(shortest_edge=transforms.short_side)
    return values | dict(do_resize=True, size=size, do_center_crop=True, crop_size=square)


def _resample(interpolation: str) -> int:
    """Return Pillow's number of an interpolation.

    Raises:
        CheckpointError: folders with this interpolation could not be read back.
    """
    for number, name in INTERPOLATIONS.items():
        if name == interpolation:
            return number
    raise CheckpointError(
        f"data.val.transforms.interpolation={interpolation!r}: expected {' or '.join(INTERPOLATIONS.values())}, with "
        "which a folder can be read back."
    )
