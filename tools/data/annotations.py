"""Shared parts of the data commands: reading annotations, and printing summaries."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from vitkit.apps.datasets.contents import count_classes, summarize
from vitkit.apps.datasets.writing import STAYING, WRITERS, Lost, describe_left_out
from vitkit.apps.starter.annotation_sheet import draw_sheet
from vitkit.data.formats import FORMATS, AnnotatedImages, read_annotations
from vitkit.errors import DataError
from vitkit.io.folders import declare_output


def read_source(
    source: str | Path,
    images: Path | None,
    *,
    format: str | None = None,
    split: str | None = None,
    check_segmentations: bool = True,
    check_sizes: bool = True,
) -> AnnotatedImages:
    """Read annotations, and print their format, their summary, and what was left out.

    Args:
        source: a file or a folder.
        images: the folder of the images; None: where the format usually has them.
        format: one of FORMATS; None: it is detected.
        split: read only this split; None: all.
        check_segmentations: whether issues of segmentations are errors.
        check_sizes: whether images of another shape than annotated are errors.
    """
    data = read_annotations(
        source, images, format=format, check_segmentations=check_segmentations, check_sizes=check_sizes
    )
    print(f"{source}: {FORMATS[data.format].text}: {summarize(data)}")
    for note in data.notes:
        print(f"  note: {note}")
    print_left_out(data.left_out, "left out")
    return data if split is None else data.split(split)


def check_out(out: Path, *, overwrite: bool, can_be_file: bool = False) -> None:
    """Check that OUT can be written and that it replaces nothing without --overwrite, before any work is done.

    Args:
        can_be_file: whether OUT may be a JSON file, beside which the sheet is written, in place of a folder.
    Raises:
        DataError: it cannot be written; or it exists, and `overwrite` is false.
    """
    is_file = _is_file(out)
    if is_file and not can_be_file:
        raise DataError(f"--out {out}: expected a folder. Give a name that does not end in {out.suffix}.")
    try:
        for target in (out, _sheet_of(out)) if is_file else (out,):
            existing = target if os.path.lexists(target) else None
            if target.is_dir():
                if is_file:
                    raise DataError(f"--out {out}: '{target}' is a folder; expected a file. Choose another name.")
                existing = next(target.iterdir(), None)
            elif existing and not is_file:
                raise DataError(f"--out {out}: is a file; expected a folder. Choose another name.")
            if existing and not overwrite:
                raise DataError(f"--out {out}: '{existing}' exists already. Choose another name, or add --overwrite.")
        folder = next(parent for parent in (out, *out.parents) if os.path.isdir(parent))
        with tempfile.TemporaryFile(dir=folder):  # permissions do not tell everything, for instance in /proc
            pass
        blocking = next((p for p in out.parents if os.path.lexists(p) and not os.path.isdir(p)), None)
    except OSError as error:
        raise DataError(f"--out {str(out)[:200]}: cannot be written ({error.strerror}). Choose another.") from error
    if blocking is not None:
        raise DataError(f"--out {out}: cannot be written, as '{blocking}' is a file. Choose another.")


def _is_file(out: Path) -> bool:
    return out.suffix.lower() == ".json"


def _sheet_of(out: Path) -> Path:
    return out.with_name(f"{out.stem}_sheet.png") if _is_file(out) else out / "sheet.png"


@contextmanager
def image_folder(out: Path, to: str) -> Iterator[Path]:
    """Yield the folder below which `images` are made: OUT for COCO's and ODVG's formats, whose images stay there,
    otherwise a temporary one beside OUT, as other formats store images in folders of their own."""
    if to in STAYING:
        yield out
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f"{out.name}.", suffix=".tmp", dir=out.parent)
    except OSError as error:
        raise DataError(f"--out {out}: cannot be written ({error.strerror}). Choose another folder.") from error
    with folder as name:
        yield Path(name)


def write_annotations(data: AnnotatedImages, to: str, out: Path, *, before: Mapping[str, int] | None = None) -> None:
    """Write annotations, read them again, and print the numbers before and after and what was lost; draw a sheet.

    Args:
        before: the number of objects of each class before the change; None: those of `data`.
    """
    if not data.images:
        raise DataError(f"{data.source.name}: no image is left to write. Choose other annotations, or another --split.")
    lost: Lost = {}
    if data.splits and not _is_file(out) and to not in ("voc", "cvat", "label-studio"):  # which keep all images
        in_splits = {image_id for ids in data.splits.values() for image_id in ids}
        without = [image["file_name"] for image in data.images if image["id"] not in in_splits]
        lost |= {"images that are in no split": without} if without else {}
    num_notes = len(data.notes)
    missing = [image["file_name"] for image in data.images if not (data.folder / image["file_name"]).is_file()]
    if missing:
        count = f"{len(missing)} of {len(data.images)} images"
        print(f"  note: {count} have no file in '{data.folder}', such as {missing[0]}")
    if data.source.resolve() in out.resolve().parents:  # which is then read again without it
        if not _is_file(out):
            out.mkdir(parents=True, exist_ok=True)
        declare_output(out)
    written = WRITERS[to](data, out, lost)
    sheet = _sheet_of(out)
    draw_sheet(data, sheet)
    where = out if to != "coco" or len(written) > 1 or _is_file(out) else written[0]
    after = read_annotations(where, data.folder if to in STAYING else None, format=to)
    for reason, names in after.left_out.items():
        lost.setdefault(reason, []).extend(names)
    print(f"{out}: {FORMATS[to].text}: {summarize(after)}")
    if len(after.images) > max(len(data.images), sum(map(len, data.splits.values()))):
        print(f"  note: {out} has images that were there before. Remove it and write again if they do not belong.")
    for note in data.notes[num_notes:]:
        print(f"  note: {note}")
    print_left_out(lost, "lost")
    before, now = before or count_classes(data), count_classes(after)
    names = dict.fromkeys((*before, *now))
    width = max(map(len, names), default=0)
    for name in names:
        print(f"  {name:<{width}}  {before.get(name, 0):>8} -> {now.get(name, 0):>8}")
    print(f"look at {sheet}")


def print_left_out(left_out: Mapping[str, Sequence[str]], verb: str) -> None:
    """Print each reason with the number of items that were left out, and the first names."""
    for line in describe_left_out(left_out):
        print(f"  {verb}: {line}")
