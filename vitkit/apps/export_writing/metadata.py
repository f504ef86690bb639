"""The metadata of an exported file: preprocessing, classes, thresholds, license, config."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from vitkit import __version__
from vitkit.apps.export_writing.prompted import text_digest
from vitkit.apps.inference.predictor import Predictor
from vitkit.apps.inference.translator import Translator
from vitkit.data.transforms.classification import ClassificationEvalTransforms
from vitkit.data.transforms.pipelines import EvalResize
from vitkit.errors import ConfigError
from vitkit.models.base import statistics_owner
from vitkit.ops.images import pixel_statistics
from vitkit.structures import BOS, EOS, PAD, UNK
from vitkit.text.prompts import SEPARATOR
from vitkit.text.vocabulary import TokenizerVocabulary, Vocabulary


def describe(
    predictor: Predictor | Translator, config: Mapping[str, Any], *, name: str, license: str | None
) -> dict[str, Any]:
    """Return the metadata of a model as plain values.

    Args:
        config: the config that the model was built from.
        name: the model's name.
        license: the license of the weights; None if unknown.
    """
    about = {
        "vitkit": __version__,
        "model": name,
        "type": type(predictor.model).__name__,
        "license": license,
        "config": json.loads(json.dumps(config)),
        "postprocessing": predictor.model.postprocess_settings(),
    }
    if isinstance(predictor, Predictor):
        about |= {
            "classes": predictor.classes,
            "category_ids": predictor.category_ids,
            "keypoints": None if predictor.keypoint_info is None else predictor.keypoint_info.to_json(),
            "thresholds": predictor.thresholds.to_json(predictor.classes),
            "image_sizes": None if predictor.image_sizes is None else predictor.image_sizes.to_json(),
            "preprocessing": _preprocessing(predictor),
        }
    if "text" in predictor.model.takes and predictor.model.vocabulary is not None:
        about |= _prompts(predictor)
    return about | (_text(predictor) if "text" in predictor.model.returns else {})


def _preprocessing(predictor: Predictor) -> dict[str, Any]:
    statistics = pixel_statistics(statistics_owner(predictor.model))
    channels = predictor.channels
    kind = "uint8 RGB (batch, 3," if channels is None else f"uint16 (batch, {channels},"
    return {
        "input": f"{kind} height, width), padded with zeros at the right and bottom",
        "channels": channels,
        "resize": resize_of(predictor),
        "mean": list(statistics["mean"]),
        "std": list(statistics["std"]),
        "normalized": "inside",
    }


def resize_of(predictor: Predictor) -> dict[str, Any] | None:
    """Return how images are resized before the model; None if they keep their size.

    Raises:
        ConfigError: the metadata has no description of transforms of this kind.
    """
    transforms, sizes = predictor.transforms, predictor.image_sizes
    if isinstance(transforms, EvalResize) and transforms.size is not None:
        return {"size": list(transforms.size)}
    if isinstance(transforms, EvalResize):
        return {"short_side": transforms.short_side, "max_size": transforms.max_size, "rounding": transforms.rounding}
    if isinstance(transforms, ClassificationEvalTransforms):
        return {"short_side": transforms.short_side, "crop": transforms.size, "interpolation": transforms.interpolation}
    if transforms is not None:
        raise ConfigError(
            f"export: data.val.transforms is {type(transforms).__name__}, which a file cannot describe; expected "
            "EvalResize or ClassificationEvalTransforms. Set data.val.transforms."
        )
    if sizes is None:
        return None
    return {"short_side": sizes.median_short, "max_size": sizes.most_long, "unless_within": sizes.to_json()}


def _text(predictor: Predictor | Translator) -> dict[str, Any]:
    model = predictor.model
    vocabularies = predictor.vocabularies if isinstance(predictor, Translator) else {"target": model.vocabulary}
    return {
        "vocabularies": {side: vocabulary.to_json() for side, vocabulary in vocabularies.items()},
        "tokens": {side: _tokens(vocabulary) for side, vocabulary in vocabularies.items()},
        "decoding": {"max_length": model.decoding.max_length, "min_length": model.decoding.min_length},
    }


def _prompts(predictor: Predictor) -> dict[str, Any]:
    """Return the metadata for reading prompts, and a digest of the text encoder."""
    model, vocabulary = predictor.model, predictor.model.vocabulary
    (separator,) = vocabulary.encode(SEPARATOR)
    numbers = dict(pad=PAD, unk=UNK, bos=BOS, eos=EOS, separator=separator)
    about = {
        "phrases": None if predictor.text is None else list(predictor.encoded_text().reading.phrases),
        "prompts": {
            "max_tokens": model.max_tokens,
            "threshold": model.score_threshold,
            "numbers": {name: vocabulary.numbers[index] for name, index in numbers.items()},
        },
        "text_id": text_digest(model),
    }
    if isinstance(vocabulary, TokenizerVocabulary):
        digest = hashlib.sha256(vocabulary.content.encode()).hexdigest()
        return about | {"tokenizer": {"sha256": digest, "special": vocabulary.special}}
    return about | {"vocabularies": {"target": vocabulary.to_json()}, "tokens": {"target": _tokens(vocabulary)}}


def _tokens(vocabulary: Vocabulary) -> dict[str, Any]:
    return {"kind": vocabulary.kind, "lowercase": vocabulary.lowercase, "tokens": vocabulary.tokens}
