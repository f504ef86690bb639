"""Draw what a model looks at, as the papers' figures do: attention, sampling points, boxes of each query.

DETR, for one image: encoder self-attention at points of the image, decoder cross-attention of each detected box.
MaskFormer and Mask2Former, for one image: the same for each mask; the masks and how they merge; the loss's points.
Deformable DETR, for one image: reference point, sampling points and box of queries through the decoder's layers.
Grounding DINO, for one image and --text: the words that each box read, the probability of each word, where words look.
DETR and Deformable DETR, with --dataset: where each query's boxes lie over the config's validation data.
ViT (also timm's), Swin, MViT, LR-Net, non-local ResNet, by themselves or below a head: the class token's maps for each
head and layer, and where 60 % of its attention is, as in DINO; attention rollout, what points attend to in each layer,
local kernels; with --images, the attention distance of heads.
Text models, for one sentence, and captioners, for one image: where each word looks, attention of each head as matrices
and arcs, position encoding, next-token distributions, beams as a tree.
TimeSformer, MViT for clips and non-local networks, for one video: attention over space and time.

MODEL may also be the name of a backbone, as for `analyze`; WEIGHTS are then any file of its weights, with or without
a classifier's head, or its published ones, and overrides are its arguments.

Examples:
    vitkit explain detr_r50 --image street.jpg
    vitkit explain vit_small_patch8_dino --image dog.jpg
    vitkit explain vit_base_patch16_dinov3 hf:facebook/dinov3-vitb16-pretrain-lvd1689m --image dog.jpg
    vitkit explain runs/vit --image cat.jpg --images photos --compare runs/vit_pretrained
    vitkit explain grounding_dino_swin_tiny --image street.jpg --text "cat . red car ."
    vitkit explain detr_r50 --image street.jpg --points 200,340 410,80
    vitkit explain deformable_detr_r50 weights.pth --image street.jpg --queries 17 203
    vitkit explain runs/detr --image street.jpg --html
    vitkit explain runs/detr --dataset data.val.num_images=1000
    vitkit explain runs/translation --text "one hundred twenty-three" --beams 4
    vitkit explain runs/translation --text "A man sleeps in a green room." --words
    vitkit explain runs/timesformer --video run.mp4 --frame 3 --points 100,60
"""

import argparse

import vitkit
from vitkit.tools.common import (
    a_path,
    add_device,
    add_model,
    add_trust,
    errors_in_one_line,
    fraction,
    image_size,
    positive,
    sort_model,
)


def query_number(text: str) -> int:
    """Parse one value of --queries."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the number of a query (overrides go before --queries and --points)"
        )
    return int(text)


def point(text: str) -> tuple[float, float]:
    """Parse one value of --points."""
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a point x,y, such as 200,340 (overrides go before --queries and --points)"
        ) from None
    return x, y


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--image", help="the image to explain; resized like the validation data")
    text = "the sentence that a text model reads; or what a text-prompted model looks for in --image: 'a cat. a dog.'"
    parser.add_argument("--text", metavar="TEXT", help=text)
    parser.add_argument("--video", type=a_path, help="the video to explain; its middle clip is taken")
    parser.add_argument(
        "--images", type=a_path, metavar="DIR", help="folder of images to average attention distances over"
    )
    text = "average over the first N of --images, in alphabetical order (default: all)"
    parser.add_argument("--max-images", type=positive, metavar="N", help=text)
    parser.add_argument("--dataset", action="store_true", help="draw each query's boxes over the validation data")
    text = "another model, or a config and its weights; its attention distances are drawn alongside"
    parser.add_argument("--compare", nargs="+", default=(), metavar="MODEL", help=text)
    text = "pixels of the image (default: the best boxes' centers) or of the video's crop (default: where the class "
    parser.add_argument("--points", type=point, nargs="+", default=(), metavar="X,Y", help=f"{text}token looks)")
    text = "queries to draw, from 0 (default: the best-scoring ones; with only --dataset, the first 20)"
    parser.add_argument("--queries", type=query_number, nargs="+", default=(), metavar="N", help=text)
    text = "frame of the clip that --points are in, from 0 (default: the middle)"
    parser.add_argument("--frame", type=int, metavar="N", help=text)
    text = "encoder layer of DETR, EoMT, a text model or a model of clips, from 0 (default: last)"
    parser.add_argument("--encoder-layer", type=int, metavar="N", help=text)
    text = "decoder layer of DETR, a mask model, a text model or a captioner, from 0 (default: last)"
    parser.add_argument("--decoder-layer", type=int, metavar="N", help=text)
    text = "minimum score of the drawn boxes (default: the model's own, or 0.5)"
    parser.add_argument("--threshold", type=fraction, metavar="SCORE", help=text)
    text = "beams in the tree of a model that writes text (default: 4)"
    parser.add_argument("--beams", type=int, default=4, metavar="N", help=text)
    text = "resize images to this height and width (default: as the validation data; a backbone's to 480 pixels)"
    parser.add_argument("--size", type=image_size, metavar="HxW", help=text)
    text = "also write an HTML page that shows what attends to what under the mouse pointer"
    parser.add_argument("--html", action="store_true", help=text)
    text = "draw the attention of a text model among words, each joined from its subwords"
    parser.add_argument("--words", action="store_true", help=text)
    text = "folder to write (default: runs/explain, or runs/explain-2 if it exists)"
    parser.add_argument("--out", type=a_path, help=text)
    add_trust(parser)
    add_device(parser)
    args = parser.parse_intermixed_args(argv)
    sort_model(args)
    if args.beams < 2:
        parser.error(f"--beams {args.beams}: expected at least 2")
    if len(args.compare) > 2:
        parser.error("--compare: expected a model, or a config and its weights")
    if not (args.image or args.images or args.video or args.dataset or args.text is not None):
        parser.error("nothing to explain: give --image, --text, --video, --images or --dataset")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with errors_in_one_line():
        from vitkit.logging import setup_logging

        setup_logging()
        result = vitkit.explain(**vars(args))
        for line in result.notes:
            print(line)
        for name, value in result.numbers.items():
            print(f"{name}: {value:.3g}")
        for path in result.files:
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
