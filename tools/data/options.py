"""The options that the data commands share."""

import argparse
from collections.abc import Sequence

from vitkit.tools.common import a_path, add_overwrite, one_of

SOURCE_HELP = (
    "annotations: a file or a folder of COCO, YOLO, Pascal VOC, LabelMe, CVAT, Label Studio, VIA, CSV or label images"
)


def add_source(parser: argparse._ActionsContainer, *, with_split: bool = True, captions: bool = False) -> None:
    """Add the options that locate annotations; `read_source` reads them.

    Args:
        captions: whether the format may also be one of captions with located phrases.
    """
    text = "folder of the images (default: where the format usually has them)"
    parser.add_argument("--images", type=a_path, metavar="DIR", help=text)
    text = "format of the annotations, if it is ambiguous, such as coco or voc"
    parser.add_argument(
        "--from", dest="format", type=one_of(_all_readers if captions else _readers), metavar="FORMAT", help=text
    )
    if with_split:
        text = "read only this split: train, val or test, if the format names splits"
        parser.add_argument("--split", help=text)


def add_out(parser: argparse.ArgumentParser, *, what: str = "folder") -> None:
    """Add the options of a command that writes annotations."""
    text = "format to write: coco, yolo, voc, cvat, label-studio or odvg (default: coco)"
    parser.add_argument("--to", type=one_of(writer_names), default="coco", metavar="FORMAT", help=text)
    parser.add_argument("--out", type=a_path, required=True, help=f"the {what} to write")
    add_overwrite(parser)


def _readers() -> Sequence[str]:
    from vitkit.data.formats import FORMATS

    return tuple(FORMATS)


def _all_readers() -> Sequence[str]:
    return (*_readers(), *caption_formats())


def caption_formats() -> Sequence[str]:
    """Return the names of the formats that only have captions with located phrases."""
    from vitkit.data.formats.grounding import GROUNDING_FORMATS

    return tuple(name for name in GROUNDING_FORMATS if name not in _readers())


def writer_names() -> Sequence[str]:
    """Return the names of the formats that annotations are written in."""
    from vitkit.apps.datasets.writing import WRITERS

    return tuple(WRITERS)
