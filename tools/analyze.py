"""Report what a model costs, by part: parameters, MACs, attention matrices, time and memory.

MODEL is a backbone's name, or a model: a name of the zoo, the folder or a checkpoint of a run, a config. A
backbone is a classifier unless num_classes=none. For a text model, MACs are counted at several lengths.
MACs (multiply-accumulate operations) are counted as in the papers: products, convolutions, attention and sampling,
with norms as fvcore estimates them; element-wise operations, activations and softmax are not counted. Operators that
are unknown are listed.

Examples:
    vitkit analyze swin_tiny
    vitkit analyze configs/detr_r50.py --size 800x1199 --depth 3
    vitkit analyze deformable_detr_r50 model.num_queries=100 --time --device cuda
    vitkit analyze --table "swin*"
    vitkit analyze --table --no-macs --plot accuracy.png
    vitkit analyze mask2former_swin_large_coco_instance train.precision=bf16 \\
        train.activation_checkpointing=true --training 8 --size 1024x1024
    vitkit analyze "timesformer_???*" --clips runs/timesformer_cost.png
    vitkit analyze configs/translation_transformer_multi30k.py --lengths 16 64 256
    vitkit analyze quickstart/classifier --training-macs
    vitkit analyze configs/resnet50_in1k.py --training-macs --samples 1281167

How alike the layers of backbones are (CKA), to each other and to those of another model. Weights are those of a run,
a checkpoint, or those that a backbone's `pretrained` names, or else random:
    vitkit analyze runs/vit --images photos --cka
    vitkit analyze vit_base_patch16 pretrained=true --images photos --cka resnet50

The memory of the attention matrices of a transformer with 48 layers of 16 heads, on the pixels of an image, and on its
14 x 14 patches (768 GiB and 112 MiB):
    vitkit analyze ViT patch_size=1 depth=48 num_heads=16 d_model=1024 classifier.pooling=mean \\
        class_token=false --size 128x128 --attention-matrices
    vitkit analyze ViT patch_size=16 depth=48 num_heads=16 d_model=1024 classifier.pooling=mean \\
        class_token=false --size 224x224 --attention-matrices
"""

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from vitkit.tools.common import (
    a_path,
    add_batch_size,
    add_device,
    add_trust,
    check_out,
    errors_in_one_line,
    image_size,
    positive,
    split_weights,
)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a backbone's name or a model; with --table, a pattern of names")
    parser.add_argument("overrides", nargs="*", default=[], help="key.sub=value of a config, key=value of a backbone")
    text = (
        "height and width of the images in pixels, or one number for a square (default: those of a backbone's "
        "published figures, or of a config's validation images)"
    )
    parser.add_argument("--size", type=image_size, metavar="HxW", help=text)
    text = "frames of a clip, for backbones that take clips"
    parser.add_argument("--frames", type=positive, metavar="T", help=text)
    add_batch_size(parser)
    text = "depth of the parts: 2 includes head.encoder (default: 2)"
    parser.add_argument("--depth", type=int, default=2, metavar="N", help=text)
    text = "report only the attention matrices, without allocating them"
    parser.add_argument("--attention-matrices", action="store_true", help=text)
    parser.add_argument("--time", action="store_true", help="run the model and report time and memory by part")
    text = "number of runs that are measured (default: 5)"
    parser.add_argument("--repeats", type=positive, metavar="N", help=text)
    text = "report only the memory of a training step on this many GPUs: replicated (DDP) and sharded (FSDP)"
    parser.add_argument("--training", type=positive, metavar="GPUS", help=text)
    text = (
        "also report the MACs of all the training that a config describes: 3 x those of a forward pass at --size, "
        "since the backward pass takes about two, x the images or texts of data.train x the epochs"
    )
    parser.add_argument("--training-macs", action="store_true", help=text)
    text = "the images or texts of an epoch for --training-macs, without reading data.train"
    parser.add_argument("--samples", type=positive, metavar="N", help=text)
    parser.add_argument("--table", action="store_true", help="list all backbones beside their published figures")
    text = "with --table: plot the classifiers' published accuracy against their published MACs (default: accuracy.png)"
    parser.add_argument("--plot", nargs="?", const="accuracy.png", metavar="FILE", help=text)
    text = "plot the MACs and memory of clip backbones by frames and crop size into this file; MODEL is a pattern"
    parser.add_argument("--clips", metavar="PNG", help=text)
    text = (
        "report only how alike the layers of the backbone are, by linear CKA on --images, and draw it; with a model "
        "(and its weights or overrides), also with the layers of that one"
    )
    parser.add_argument("--cka", nargs="*", metavar="OTHER", help=text)
    parser.add_argument("--images", type=a_path, metavar="DIR", help="folder with the images for --cka")
    parser.add_argument("--out", type=a_path, help="the PNG file of --cka to write (default: cka.png)")
    text = "text lengths in tokens, for text models"
    parser.add_argument("--lengths", nargs="+", type=positive, metavar="N", help=text)
    text = "report only parameters; counting MACs runs the model once"
    parser.add_argument("--no-macs", action="store_true", help=text)
    text = "also count the MACs of an image model by fvcore, as an independent check"
    parser.add_argument("--fvcore", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trust(parser)
    add_device(parser, default="cpu")
    args = parser.parse_intermixed_args(argv)
    args.weights, args.overrides = split_weights(args.overrides)
    if args.model is None and not args.table:
        parser.error("a model is needed: a config file or a backbone's name (or --table)")
    if (args.training_macs or args.samples) and args.no_macs:
        parser.error("--training-macs needs the MACs that --no-macs leaves out")
    if args.plot and not args.table:
        parser.error("--plot draws what --table lists: give both")
    if args.plot and Path(args.plot).suffix != ".png":
        parser.error(f"--plot: {args.plot!r} does not end in .png; a pattern of names stands before --plot")
    modes = {"--table": args.table, "--clips": args.clips, "--training": args.training}
    modes |= {"--attention-matrices": args.attention_matrices, "--cka": args.cka is not None}
    chosen = [option for option, value in modes.items() if value]
    if chosen and (args.training_macs or args.samples):
        parser.error(f"--training-macs counts the training of one config; leave out {chosen[0]}")
    if len(chosen) > 1:
        parser.error(f"{', '.join(chosen)}: these are different reports; choose one")
    if args.depth < 0:
        parser.error("--depth is at least 0")
    if (args.images is None) != (args.cka is None) or (args.out and args.cka is None):
        parser.error("--images and --out are those of --cka, which needs --images")
    args.out = args.out or Path("cka.png")
    if args.out.suffix != ".png":
        parser.error(f"--out: '{args.out}' does not end in .png")
    if args.clips and Path(args.clips).suffix != ".png":
        parser.error(f"--clips: {args.clips!r} does not end in .png")
    if args.repeats is not None and not args.time:
        parser.error("--repeats are those of --time: give both")
    if chosen and (unused := _find_unused(args)):
        parser.error(f"{', '.join(unused)}: has no effect on the report of {chosen[0]}; leave this out")
    args.repeats = args.repeats or 5
    return args


def _find_unused(args: argparse.Namespace) -> list[str]:
    """Return the given options that the chosen report, other than costs by part, ignores."""
    of_input = {"--size": args.size, "--frames": args.frames, "--batch-size": args.batch_size != 1}
    of_input |= {text.partition("=")[0]: True for text in args.overrides}
    of_costs = {"--depth": args.depth != 2, "--time": args.time, "--fvcore": args.fvcore, "--lengths": args.lengths}
    of_costs["--no-macs"] = args.no_macs and not (args.table or args.training)
    ignored = of_costs | of_input if args.table or args.clips else of_costs
    return [option for option, value in ignored.items() if value]


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    import vitkit
    from vitkit.apps.analysis.reports.api import attention_memory, step_memory
    from vitkit.apps.analysis.reports.backbones import plot_published_accuracy, variants
    from vitkit.apps.analysis.reports.layers import IMAGES_PER_BATCH, layer_similarity
    from vitkit.apps.analysis.reports.text import TextCosts
    from vitkit.tools import analyze_tables as tables

    model = dict(weights=args.weights, overrides=args.overrides, size=args.size, frames=args.frames)
    model |= dict(batch_size=args.batch_size, trust=args.trust)
    with errors_in_one_line():
        if args.table:
            names = variants(args.model or "*")
            if args.plot:  # counting takes minutes: errors come before
                plot_published_accuracy(names, args.plot)
            result = tables.table(names, macs=not args.no_macs, prints=not args.json)
            if args.plot and not args.json:
                print(f"\nThe plot is {args.plot}.")
        elif args.clips:
            check_out("--clips", Path(args.clips))
            result = tables.clips(variants(args.model), args.clips, prints=not args.json)
        elif args.cka is not None:
            check_out("--out", args.out)
            other, *rest = args.cka or [None]
            other_weights, other_overrides = split_weights(rest)
            del model["frames"]
            model["batch_size"] = IMAGES_PER_BATCH if args.batch_size == 1 else args.batch_size
            result = layer_similarity(
                args.model,
                args.images,
                other,
                **model,
                other_weights=other_weights,
                other_overrides=other_overrides,
                device=args.device,
                out=args.out,
            )
            if args.json:
                result = [asdict(similarities) for similarities in result]
            else:
                tables.print_similarities(result)
                print(f"\nThe plot is {args.out}.")
        elif args.training:
            result = step_memory(args.model, **model, gpus=args.training, activations=not args.no_macs)
            show = tables.print_step_memory
        elif args.attention_matrices:
            result = attention_memory(args.model, **model)
            show = tables.print_attention
        else:
            result = vitkit.analyze(
                args.model,
                **model,
                lengths=args.lengths,
                depth=args.depth,
                macs=not args.no_macs,
                fvcore=args.fvcore,
                time=args.time,
                repeats=args.repeats,
                device=args.device,
                training_macs=args.training_macs,
                samples=args.samples,
            )
            is_text = isinstance(result, TextCosts)
            show = tables.print_text_costs if is_text else partial(tables.print_costs, device=args.device)
    if args.json:
        print(json.dumps(result if isinstance(result, list) else drop_none(result), indent=2))
    elif not isinstance(result, list):
        show(result)


def drop_none(result: Any) -> dict[str, Any]:
    """Return the fields of a dataclass and of nested dataclasses, except those that are None."""
    return asdict(result, dict_factory=lambda items: {name: value for name, value in items if value is not None})


if __name__ == "__main__":
    main()
