"""Write a model's weights under the names of its original repository, of the transformers library, or of vitkit.

MODEL is anything that vitkit loads: a name of the model zoo, a run, a config with its weights, a folder of the
transformers library or hf:OWNER/NAME. Reading the result back gives the same weights, bit for bit. Under vitkit's names
a .pth file also holds the config, the classes or vocabularies, and what evaluation has measured, so that it is a model
by itself. For the transformers library OUT may be a folder, which its from_pretrained reads: config.json, weights, how
images are prepared, a text's tokens.

Examples:
    python tools/convert.py runs/detr --to official --out detr.pth
    python tools/convert.py mask2former_r50_coco_instance --to transformers --out mask2former
    python tools/convert.py hf:facebook/detr-resnet-50 --to vitkit --out detr.pth
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitkit.checkpoint import save_checkpoint
from vitkit.checkpoint.files import write_safetensors
from vitkit.errors import CheckpointError
from vitkit.inference import Predictor, Translator, find_trained, load
from vitkit.inference.load import own_checkpoint
from vitkit.inference.transformers_writing import write_folder
from vitkit.model_zoo.writing import written
from vitkit.models.detr_segmentation import DETRSegmentation
from vitkit.models.mask_results import MaskResults
from vitkit.tools.average import TAKEN_OVER
from vitkit.tools.common import add_model, add_trust, errors_in_one_line, sort_model

ENDINGS = (".pth", ".safetensors")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--to", choices=("official", "transformers", "vitkit"), required=True, help="whose names")
    parser.add_argument("--out", type=Path, required=True, help="the file to write, .pth or .safetensors, or folder")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    add_trust(parser)
    args = parser.parse_intermixed_args(argv)
    sort_model(args)
    is_folder = args.to == "transformers" and args.out.suffix not in (".pt", ".bin", ".ckpt")
    if args.out.suffix not in ENDINGS and not is_folder:
        parser.error(f"--out {args.out}: expected a name that ends in {' or '.join(ENDINGS)}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        run(args)


def run(args: argparse.Namespace) -> None:
    """Load the model and write its weights."""
    if args.out.exists() and not args.overwrite:
        raise CheckpointError(f"--out {args.out}: is there already. Choose another name, or add --overwrite.")
    config, weights = find_trained(args.model, args.weights, overrides=args.overrides, trust=args.trust)
    loaded = load(config, weights)
    if args.out.suffix not in ENDINGS:
        state, names = write_folder(args.out, loaded, config["model"])
    elif args.to == "vitkit":
        state, names = loaded.model.state_dict(), "vitkit"
        write(args.out, state, {"model": state, **beside_weights(loaded, config, weights)})
    else:
        state, names = written(loaded.model, args.to)
        # The transformers library reads a file of weights alone.
        write(args.out, state, state if args.to == "transformers" else {"model": state})
    print(f"{loaded.report}\nwrote {args.out}: {len(state)} entries, names of {names}")


def write(path: Path, state: Mapping[str, Tensor], checkpoint: Mapping[str, Any]) -> None:
    """Write a .safetensors file of weights alone, or a checkpoint."""
    if path.suffix == ".safetensors":
        write_safetensors(path, state)
    else:
        save_checkpoint(path, checkpoint)


def beside_weights(loaded: Predictor | Translator, config: Mapping[str, Any], weights: str | Path) -> dict[str, Any]:
    """Return what makes a checkpoint a model by itself."""
    more = {key: value for key, value in own_checkpoint(weights).items() if key in TAKEN_OVER}
    more["config"] = json.dumps(config)
    if isinstance(loaded, Predictor) and loaded.classes:
        has_things = isinstance(loaded.model, MaskResults | DETRSegmentation)
        more |= {"classes": list(loaded.classes), "things": list(loaded.model.things) if has_things else None}
    return more


if __name__ == "__main__":
    main()
