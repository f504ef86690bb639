"""Write a model's weights with the names of another project, or as a folder of the transformers library."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitkit.apps.conversion.transformers_writing import DIFFERING, TOKENIZER, write_folder, write_safetensors
from vitkit.apps.inference.card import card_path, make_card, read_metrics
from vitkit.apps.inference.load import check_not_exported, find_trained, load
from vitkit.apps.inference.predictor import Predictor
from vitkit.devices import Precision
from vitkit.errors import CheckpointError, ConfigError
from vitkit.io.output import write_text
from vitkit.model_zoo.converters import Target, Written, write_names
from vitkit.registry import nearest
from vitkit.weights import LoadReport, save_checkpoint
from vitkit.weights.hub import PREPROCESSOR
from vitkit.weights.locate import Located
from vitkit.weights.tokenizer_files import TOKENIZER as TOKENIZER_FILE
from vitkit.weights.transformers_folder import CONFIG, MODEL_ENTRIES

NAMES = ("official", "transformers", "mmdetection", "detrex", "vitkit")
ENDINGS = (".pth", ".safetensors")
_OTHER_FILES = (".pt", ".bin", ".ckpt")
"""Extensions that are not meant as the name of a folder."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Converted:
    """The results of `convert`."""

    path: Path
    names: str
    """The project and the format whose names the weights have."""
    num_entries: int
    report: LoadReport | None
    """The report of loading the weights."""
    card: Path | None = None
    """The model card in a folder of the transformers library; None for a file."""


def convert(
    model: str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    to: Target | Literal["vitkit"] = "vitkit",
    weights: str | Path | None = None,
    classes: Sequence[str] | None = None,
    precision: Precision = "fp32",
    license: str | None = None,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    trust: bool = False,
) -> Converted:
    """Write a model's weights with other names, as `vitkit convert` does; reading them back gives the same weights, in
    fp32 bit for bit.

    `convert("mask2former_r50_coco_instance", "mask2former", to="transformers")`

    Args:
        model: see `find_model`.
        out: a .pth or .safetensors file; for transformers also a folder, which its `from_pretrained` reads:
            config.json, weights, the preparation of images, a text model's tokens, and a model card, see `card_path`.
        to: whose names the weights get: those of the model's original project, of the transformers library, of
            mmdetection, of detrex, or of vitkit. With mmdetection's, a .pth file also has the classes. With vitkit's, a
            file also has the config, the classes or vocabularies, and what evaluation has measured, so that it can be
            loaded by itself.
        weights: weights for a config; None: those of `model`.
        classes: those to keep, in the order that they are to have, see `load`; None: all. The rest is left out. Of
            weights that do not name theirs, the names of all.
        precision: of the stored floating-point numbers; fp16 and bf16 halve a file, and loading makes them fp32 again.
        license: license of the weights, for the model card; None: for models of the zoo, the one that it lists.
        overrides, trust: see `load`.
        overwrite: replace `out` if it exists.
    Raises:
        ConfigError: there is no such model, or it has no weights; or `to` or `precision` is unknown.
        CheckpointError: `out` exists or has another extension, there are no such names for the model, or a weight is
            too large for the precision.
    """
    out = Path(out)
    check_out(out, to, overwrite=overwrite)
    if precision not in _DTYPES:
        raise ConfigError(f"convert: precision {precision!r}: unknown. {nearest(str(precision), _DTYPES)}")
    if precision != "fp32" and out.suffix not in ENDINGS:
        raise ConfigError(f"convert: precision {precision!r}: a folder has fp32. Write a {' or '.join(ENDINGS)} file.")
    config, weights = find_trained(model, weights, overrides=overrides, trust=trust)
    loaded = load(config, weights, classes=classes, training_queries=True)
    if not any(key.startswith("training_queries.") for key in loaded.report.loaded):
        loaded = load(config, weights, classes=classes)  # without those of training, which would be random
    check_not_exported(loaded, "convert")
    if classes is not None and not (isinstance(loaded, Predictor) and loaded.model.class_head):
        raise ConfigError(
            f"convert: classes {list(classes)}: {type(loaded.model).__name__} has no class head to reduce."
        )
    if out.suffix not in ENDINGS:
        measured, name = read_metrics(weights), out.resolve().name
        written = write_folder(out, loaded, config["model"])
        card = card_path(out, name)
        about = dict(name=name, license=license, library="transformers", usage=_usage(out), measured=measured)
        write_text(card, make_card(loaded, config, weights, **about))
        return Converted(out, written.format, len(written.state), loaded.report, card)
    is_ours = to == "vitkit"
    written = Written(loaded.model.state_dict(), "vitkit") if is_ours else write_names(loaded.model, to)
    written = written._replace(state=_in_precision(written.state, precision))
    kept = _keep_entries(loaded, config, weights) if is_ours else {}
    if out.suffix == ".safetensors":
        write_safetensors(out, written.state, kept)
    elif to == "transformers":  # whose files contain only weights
        save_checkpoint(out, written.state)
    elif to == "mmdetection":
        about = {"classes": list(getattr(loaded, "classes", ()))}
        save_checkpoint(out, {"meta": {"dataset_meta": about}, "state_dict": written.state})
    else:
        save_checkpoint(out, {**written.nested(), **kept})
    return Converted(out, written.format, len(written.state), loaded.report)


def _usage(folder: Path) -> str:
    """Return how a folder of the transformers library is loaded, in Markdown."""
    name = folder.resolve().name
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    (architecture,) = config["architectures"]
    readers = {"model": architecture}
    if (folder / PREPROCESSOR).is_file():
        readers["processor"] = "AutoImageProcessor"
    if (folder / TOKENIZER).is_file() or (folder / TOKENIZER_FILE).is_file():
        readers["tokenizer"] = "AutoTokenizer"
    lines = [f'{part} = {reader}.from_pretrained("OWNER/{name}")' for part, reader in readers.items()]
    differs = f"{DIFFERING[kind]} With vitkit:" if (kind := config["model_type"]) in DIFFERING else ""
    code = "\n".join([f"from transformers import {', '.join(sorted(readers.values()))}", "", *lines])
    return f"""```python
{code}
```

{differs or "Or, where vitkit is installed:"}

```python
import vitkit

model = vitkit.load("hf:OWNER/{name}")
```"""


def _in_precision(state: Mapping[str, Tensor], precision: str) -> dict[str, Tensor]:
    """Round the floating-point tensors of a state dict.

    Raises:
        CheckpointError: a number is larger than the precision can represent.
    """
    dtype = _DTYPES[precision]
    rounded = {key: value.to(dtype) if value.is_floating_point() else value for key, value in state.items()}
    for key, value in rounded.items():
        if value.is_floating_point() and (value.isinf() & ~state[key].isinf()).any():
            raise CheckpointError(f"{key}: contains numbers that are too large for {precision}. Use bf16 or fp32.")
    return rounded


def check_out(out: Path, to: str, *, overwrite: bool) -> None:
    """Check the path of an output.

    Raises:
        ConfigError: `to` is unknown.
        CheckpointError: the path has another extension, or exists and may not be replaced.
    """
    if to not in NAMES:
        raise ConfigError(f"convert: to {to!r}: unknown names. {nearest(to, NAMES)}")
    is_folder = to == "transformers" and out.suffix not in _OTHER_FILES
    if out.suffix not in ENDINGS and not is_folder:
        raise CheckpointError(f"convert: got out {out}; expected a name that ends in {' or '.join(ENDINGS)}.")
    if out.exists() and not overwrite:
        raise CheckpointError(f"convert: out {out} exists already. Choose another name, or set overwrite.")


def _keep_entries(loaded: Any, config: Mapping[str, Any], weights: Located) -> dict[str, Any]:
    """Return the entries that a checkpoint needs besides its weights to be loaded by itself."""
    kept = {key: value for key, value in weights.metadata.items() if key in MODEL_ENTRIES}
    kept["config"] = json.dumps(config)
    if isinstance(loaded, Predictor) and loaded.classes:
        things = getattr(loaded.model, "things", None)
        kept |= {"classes": list(loaded.classes), "things": None if things is None else list(things)}
        if loaded.category_ids is not None:
            kept["category_ids"] = list(loaded.category_ids)
    return kept
