"""A single pass over a dataset's videos: which are readable, their lengths, and how many are shorter than a clip."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from vitkit.apps.doctor.issues import Issue, enumerate_items
from vitkit.apps.doctor.statistics import DatasetStatistics
from vitkit.errors import DataError
from vitkit.io.video_files import VideoInfo
from vitkit.text_format import pluralize


def video_issues(statistics: DatasetStatistics, max_videos: int) -> Iterator[Issue]:
    """Open videos evenly spread over the dataset, and report lengths, frame rates, sizes and invalid videos."""
    dataset, where = statistics.dataset, statistics.where
    count = min(max_videos, len(dataset))
    infos: list[VideoInfo] = []
    errors, short = [], []
    for index in np.unique(np.linspace(0, len(dataset) - 1, count).astype(int)).tolist():
        try:
            with dataset.open(index) as video:
                infos.append(video.info)
                if dataset.sampling.is_short(video.times):
                    short.append(dataset.image_id(index))
        except DataError as error:
            errors.append(str(error))
    extent = "" if count == len(dataset) else f" (of {count} checked, {len(dataset)} in total)"
    if errors:
        message = f"{pluralize(len(errors), 'videos', of=count)} cannot be read: {errors[0]}"
        yield Issue("videos", "fail", message, where, {"videos": len(errors)})
    if not infos:
        return
    seconds, frames, rates = (
        np.array([getattr(info, name) for info in infos]) for name in ("seconds", "num_frames", "frame_rate")
    )
    message = f"{pluralize(len(infos), 'videos')} read{extent}: {seconds.min():.3g} to {seconds.max():.3g} s, median "
    message += f"{np.median(seconds):.3g}; {frames.min()} to {pluralize(frames.max(), 'frames')}; {_sizes(infos)}"
    details = {"videos": len(infos), "median seconds": float(np.median(seconds))}
    yield Issue("videos", "ok", message, where, details)
    common = Counter(np.round(rates, 1).tolist()).most_common(4)
    message = "frames per second: " + ", ".join(f"{rate:g} in {number}" for rate, number in common)
    message += " (most frequent)" if len({*np.round(rates, 1)}) > len(common) else ""
    yield Issue("frame rates", "ok", message, where, {str(rate): number for rate, number in common})
    if short:
        pads = dataset.sampling.on_short == "pad"
        message = f"{pluralize(len(short), 'videos', 'are', of=len(infos))} shorter than a clip, "
        message += "padded with the last frame" if pads else "an error (on_short=raise)"
        message += f": {enumerate_items(short)}"
        verdict = "fail" if not pads else "warn" if len(short) > 0.5 * len(infos) else "note"
        yield Issue("short videos", verdict, message, where, {"videos": len(short)})


def _sizes(infos: list[VideoInfo]) -> str:
    sizes = Counter((info.width, info.height) for info in infos).most_common(3)
    more = len({(info.width, info.height) for info in infos}) - len(sizes)
    named = ", ".join(f"{width}x{height}" for (width, height), _ in sizes)
    return f"{named} pixels (width x height)" + (f" and {pluralize(more, 'other sizes')}" if more else "")
