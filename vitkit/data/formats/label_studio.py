"""Label Studio's JSON: a list of tasks, one for each image, with boxes, polygons and ellipses (https://labelstud.io).

Coordinates are percentages of the image as its file has it, also where `image_rotation` says that the person had turned
it on the screen. Predictions that a person accepted become annotations; a task without annotations is an image that
nobody has labeled and is left out, unless no task has any: then its predictions are read.
Brush strokes and key points are left out.
"""

import codecs
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from vitkit.data.formats.annotated import AnnotatedImages, add_image_file, single_file
from vitkit.data.formats.sizes import is_scaled, two_sizes
from vitkit.errors import DataError
from vitkit.io.folders import IMAGE_SUFFIXES, ImageFiles, is_hidden, split_of
from vitkit.io.json_files import read_json
from vitkit.io.parsing import check_count, class_name, coordinate
from vitkit.io.segmentations import ellipse_polygon, is_side, polygon_fields, rotate

LOCAL_FILES = "/data/local-files/?d="
"""What Label Studio puts before the names of files that it reads from the disk."""
_UPLOADED = re.compile(r"[0-9a-f]{8}-(.+)")
"""Name of an uploaded file: Label Studio puts eight digits before it."""

_PAGES = {"tasks": "total", "results": "count"}
"""The list of tasks in a page that the server's API returns -> the number of all tasks."""


def is_label_studio_file(path: Path) -> bool:
    """Whether a JSON file looks like Label Studio's."""
    content = path.read_bytes()
    has_results = b'"annotations"' in content or b'"predictions"' in content
    is_page = any(f'"{key}"'.encode() in content for key in _PAGES)
    is_list = content.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    return (is_list or is_page) and b'"data"' in content and has_results


def read_label_studio(annotations: Path, images: Path | None) -> AnnotatedImages:
    """Read a JSON file that Label Studio has exported as "JSON".

    Args:
        annotations: the file, or the folder that contains it; or a page of tasks that the server's API has returned, or
            a folder of all pages.
        images: folder of the images; None: `images` beside the file, or the file's folder.
    Raises:
        DataError: the file is invalid.
    """
    path, tasks, notes = _read_tasks(annotations)
    beside = path.parent / "images"
    files = ImageFiles(images or (beside if beside.is_dir() else path.parent))
    data = AnnotatedImages("label-studio", annotations, files.folder)
    data.notes += notes
    key = "annotations" if any(task.get("annotations") for task in tasks) else "predictions"
    contexts = [f"annotations: '{path}': task {task.get('id', number)}" for number, task in enumerate(tasks, start=1)]
    names = []
    for task, context in zip(tasks, contexts):
        listed = _image_name(task["data"], context)
        uploaded = _UPLOADED.findall(listed.rpartition("/")[2])
        is_date = listed.rpartition("/")[2][:8].isdecimal() and "upload/" not in listed
        names.append((listed, *uploaded * (not is_date)))
    files.expect(names)
    for task, context, (listed, *others) in zip(tasks, contexts, names):
        name = files.find(listed, *others)
        if name is None:
            data.leave_out("images that the JSON lists but the folder does not have", listed)
            continue
        people = task.get(key) or []
        if not isinstance(people, list):
            raise DataError(f"{context}: its {key} are {people!r:.80}; expected a list. Export it again.")
        results = [entry for entry in people if isinstance(entry, dict) and not entry.get("was_cancelled")]
        if not results:
            data.leave_out("images that nobody has labeled", listed)
            continue
        if len(results) > 1:
            results.sort(key=lambda entry: not entry.get("ground_truth"))  # the one that is marked, else the first
            data.leave_out("further annotations of an image that several people have labeled", listed)
        split = split_of(str(task["data"].get("split")))
        _add_task(data, files, name, split, results[0].get("result"), context)
    data.sort_classes()
    return data


def _read_tasks(annotations: Path) -> tuple[Path, list[dict[str, Any]], list[str]]:
    """Return a file, the tasks of all files, and notes on those that are missing."""
    paths = [annotations]
    if annotations.is_dir():
        paths = [path for path in sorted(annotations.glob("*.json")) if not is_hidden(path.name)]
        paths = [path for path in paths if is_label_studio_file(path)] or [single_file(annotations, "*.json")]
    tasks: list[dict[str, Any]] = []
    totals = [0]
    for path in paths:
        page = read_json(path)
        key = next((key for key in _PAGES if isinstance(page, dict) and isinstance(page.get(key), list)), None)
        if key is not None:
            page, total = page[key], page.get(_PAGES[key])
            totals.append(total if isinstance(total, int) else 0)
        if not isinstance(page, list) or not all(isinstance(t, dict) and isinstance(t.get("data"), dict) for t in page):
            raise DataError(
                f"annotations: '{path}' is not a list of Label Studio's tasks. Export it as 'JSON', not 'JSON-MIN'."
            )
        tasks += page
    missing = max(totals) - len(tasks)
    note = f"{missing} of {max(totals)} tasks are on pages that are not here: export all as 'JSON'"
    return paths[0], tasks, [note] if missing > 0 else []


def _image_name(data: Mapping[str, Any], context: str) -> str:
    """Return the file that a task's data names, which may be a URL or a path of Label Studio's server."""
    texts = [value for value in data.values() if isinstance(value, str)]
    # "?d=" names a file below the server's folder of local files.
    urls = [urlsplit(text.replace("#", "%23")) for text in texts]  # a part of the name
    names = [parse_qs(url.query).get("d", [unquote(url.path) or text])[0] for url, text in zip(urls, texts)]
    images = [name.lstrip("/") for name in names if PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES]
    if not images:
        raise DataError(f"{context}: its data names no image, but {str(texts)[:80]}. Export tasks of images.")
    if len({*images}) > 1:
        raise DataError(
            f"{context}: its data names {len({*images})} images, such as {images[0]!r} and {images[1]!r}. "
            "Expected one: make a task of each image."
        )
    return images[0]


def _add_task(
    data: AnnotatedImages, files: ImageFiles, name: str, split: str | None, results: Any, context: str
) -> None:
    if not isinstance(results, list):
        raise DataError(f"{context}: its result is {results!r:.80}; expected a list. Export it again.")
    image = add_image_file(data, files, name, split)
    if image is None:
        return
    check_count(len(results), context)
    for result in results:
        if isinstance(result, dict) and result.get("type") == "relation":
            data.leave_out("relations between objects", image["file_name"])
            continue
        value = result.get("value") if isinstance(result, dict) else None
        if not isinstance(value, dict):
            raise DataError(f"{context}: a result is {result!r:.80}; expected an object with a value. Export it again.")
        _check_shape(result, image, context)
        kind = result.get("type")
        labels = value.get(kind) if isinstance(kind, str) else None
        fields = _fields(kind, value, image, context)
        if fields is None or not labels:
            what = f"results of type {kind!r:.50}" if fields is None else "shapes without a label"
            data.leave_out(what, image["file_name"])
            continue
        if not isinstance(labels, list):
            raise DataError(f"{context}: its {kind} are {labels!r:.80}; expected a list of labels. Export it again.")
        if len(labels) > 1:
            data.leave_out("further labels of a shape", image["file_name"])
        score = {"score": result["score"]} if isinstance(result.get("score"), float) else {}
        data.add_object(image["id"], class_name(labels[0], f"{context}: a label"), **fields, **score)


def _check_shape(result: Mapping[str, Any], image: Mapping[str, Any], context: str) -> None:
    """Raise DataError if an image was annotated with another shape, of which percentages do not tell the pixels."""
    stated, size = (result.get("original_width"), result.get("original_height")), (image["width"], image["height"])
    if not all(map(is_side, stated)) or stated == size or is_scaled(stated, size):
        return
    # Some versions exchanged the sides of an image that was turned on the screen.
    if result.get("image_rotation") and (stated[::-1] == size or is_scaled(stated[::-1], size)):
        return
    annotated = {"file_name": image["file_name"], "width": stated[0], "height": stated[1]}
    raise DataError(f"{context}: {two_sizes(annotated, size)}. Give the images as they were annotated.")


def _fields(kind: Any, value: Mapping[str, Any], image: Mapping[str, Any], context: str) -> dict[str, Any] | None:
    """Return the `bbox`, and `segmentation` if it has one, of a shape; None if its type is not read."""

    def percent(number: Any, side: str) -> float:
        return coordinate(number, f"{context}: a coordinate in percent") / 100 * image[side]

    if kind == "labels":  # those of a shape with a tag of its own
        forms = {"points": "polygonlabels", "radiusX": "ellipselabels", "width": "rectanglelabels"}
        kind = next((form for key, form in forms.items() if key in value), kind)
    if kind == "polygonlabels":
        points = value.get("points")
        is_outline = isinstance(points, list) and len(points) >= 3
        if not is_outline or not all(isinstance(p, list) and len(p) == 2 for p in points):
            raise DataError(f"{context}: a polygon has points {points!r:.80}; expected three [x, y] or more.")
        return polygon_fields([[v for x, y in points for v in (percent(x, "width"), percent(y, "height"))]])
    if kind not in ("rectanglelabels", "ellipselabels"):
        return None
    x, y = percent(value.get("x"), "width"), percent(value.get("y"), "height")
    degrees = coordinate(value.get("rotation") or 0, f"{context}: rotation")
    if kind == "ellipselabels":  # x and y are its center
        radii = percent(value.get("radiusX"), "width"), percent(value.get("radiusY"), "height")
        return polygon_fields([ellipse_polygon((x, y), radii, degrees)])
    width, height = percent(value.get("width"), "width"), percent(value.get("height"), "height")
    if not degrees:
        return {"bbox": [x, y, width, height]}
    corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]  # turned about the first one
    return polygon_fields([[v for corner in corners for v in rotate(corner, (x, y), degrees)]])
