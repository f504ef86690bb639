"""Reading frames by their number: any format, key frames, B-frames, rates, rotation; and files that cannot be read."""

import os

import numpy as np
import pytest
from helpers.video_files import number_of, numbered_frame, rotate, write_video
from PIL import Image

from vitkit.errors import DataError
from vitkit.io.video_files import open_video

FILES = {
    "key_frames_every_12.mp4": dict(bf="3"),
    "one_key_frame.mp4": dict(g="250", bf="3", sc_threshold="0"),
    "no_b_frames.mp4": dict(bf="0"),
    "open_gop.mp4": {"bf": "3", "x264-params": "open-gop=1"},
    "variable_rate.mp4": dict(durations=[100, 30, 250], bf="3"),
    "variable_rate.mkv": dict(durations=[100, 30, 250], bf="3"),
    "b_frames.avi": dict(bf="3"),
    "stream.ts": dict(bf="3"),
    "mpeg4.avi": dict(codec="mpeg4"),
    "vp9.webm": dict(codec="libvpx-vp9", cpu_used="8"),
    "odd_sizes.mp4": dict(size=(49, 67), pix_fmt="yuv444p"),
    "gray.mp4": dict(pix_fmt="gray"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("numbers", [[0], [39], [5, 5, 7], [1, 2, 3, 30, 38, 39], list(range(40))])
def test_requested_frames_are_returned(files, name, numbers):
    with open_video(files / name) as video:
        frames = list(video.frames(numbers))
    assert [number_of(frame) for frame in frames] == numbers
    height, width = FILES[name].get("size", (48, 64))
    assert all(frame.shape == (height, width, 3) and frame.dtype == np.uint8 for frame in frames)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    for name, settings in FILES.items():
        write_video(folder / name, **settings)
    return folder


@pytest.mark.parametrize("name", ["variable_rate.mp4", "variable_rate.mkv"])
def test_times_follow_a_variable_frame_rate(files, name):
    with open_video(files / name) as video:
        # Matroska rounds to milliseconds.
        assert video.times[:4] == pytest.approx([0, 100 / 3000, 130 / 3000, 380 / 3000], abs=6e-4)


@pytest.mark.parametrize("name", ["b_frames.avi", "mpeg4.avi", "mpeg4.mp4"])
def test_the_stated_frame_rate_is_that_of_files_without_times(tmp_path, name):
    write_video(tmp_path / name, 20, bf="2", codec="mpeg4", rate=10)
    with open_video(tmp_path / name) as video:
        assert video.info.frame_rate == pytest.approx(10) and video.info.seconds == pytest.approx(2)
        assert video.times[:3] == pytest.approx([0, 0.1, 0.2])


def test_a_single_frame_lasts_as_long_as_the_file_states(tmp_path):
    write_video(tmp_path / "a.avi", 1, codec="mpeg4", rate=10)
    with open_video(tmp_path / "a.avi") as video:
        assert video.info.seconds == pytest.approx(0.1)


def test_frames_can_be_read_backwards_in_separate_calls(files):
    with open_video(files / "key_frames_every_12.mp4") as video:
        assert [number_of(next(video.frames([number]))) for number in (39, 20, 3)] == [39, 20, 3]


def test_info_has_length_frame_rate_and_upright_size(files):
    with open_video(files / "odd_sizes.mp4") as video:
        info = video.info
    assert (info.num_frames, info.height, info.width) == (40, 49, 67)
    assert info.seconds == pytest.approx(40 / 30)
    assert info.frame_rate == pytest.approx(30)


@pytest.mark.parametrize(
    ("matrix", "turns"), [((0, 1, -1, 0), 3), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)], ids=["90", "180", "270"]
)
def test_frames_are_rotated_upright(tmp_path, matrix, turns):
    path = rotate(write_video(tmp_path / "turned.mp4", 3), matrix)
    with open_video(path) as video:
        frame = next(video.frames([2]))
        assert (video.info.height, video.info.width) == frame.shape[:2]
    # np.rot90 turns counter-clockwise, the matrix clockwise.
    expected = np.rot90(numbered_frame(2, 48, 64), turns)
    assert np.abs(frame.astype(int) - expected).mean() < 6


def test_only_the_requested_frames_are_decoded(files, monkeypatch):
    with open_video(files / "no_b_frames.mp4") as video:
        fed = []
        packets = video._packets
        monkeypatch.setattr(video, "_packets", lambda *range_: (fed.append(p.pts) or p for p in packets(*range_)))
        list(video.frames([25, 27]))
    assert len(fed) == 4  # 24, a key frame, to 27


def test_a_folder_of_frames_is_a_video_in_the_order_of_its_numbers(tmp_path):
    for number in range(12):
        Image.fromarray(numbered_frame(number, 16, 64)).save(tmp_path / f"frame_{number}.png")
    with open_video(tmp_path) as video:
        assert [number_of(frame) for frame in video.frames([0, 2, 10, 11])] == [0, 2, 10, 11]
        assert (video.info.num_frames, video.info.height, video.info.width) == (12, 16, 64)


def test_info_of_a_folder_of_frames_has_the_upright_size(tmp_path):
    exif = Image.Exif()
    exif[0x112] = 6
    Image.new("RGB", (20, 10)).save(tmp_path / "1.jpg", exif=exif)
    with open_video(tmp_path) as video:
        assert (video.info.height, video.info.width) == next(video.frames([0])).shape[:2] == (20, 10)


def test_frames_of_another_size_in_a_folder_are_an_error(tmp_path):
    for number in range(2):
        Image.new("RGB", (20 + number, 20)).save(tmp_path / f"{number}.png")
    with open_video(tmp_path) as video, pytest.raises(DataError, match=r"1\.png.*must have the same size"):
        list(video.frames([0, 1]))


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(DataError, match="contains no frames"):
        open_video(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"no video", b"#EXTM3U\n#EXTINF:1,\nother.ts\n"], ids=["empty", "text", "m3u"]
)
def test_file_that_is_not_a_video_is_named(tmp_path, content):
    (tmp_path / "clip.mp4").write_bytes(content)
    with pytest.raises(DataError, match=r"cannot decode '.*clip\.mp4' \(\d+ bytes\)"):
        open_video(tmp_path / "clip.mp4")


PLAYLISTS = {
    "clip.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nother.ts\n#EXT-X-ENDLIST\n",
    "clip.ts": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nother.ts\n#EXT-X-ENDLIST\n",
    "cc.avi": "ffconcat version 1.0\nfile 'other.ts'\n",
    "clip.mp4": "ffconcat version 1.0\nfile other.ts\n",
    "clip.mkv": "v=0\nc=IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n",
}


@pytest.mark.parametrize("name", PLAYLISTS)
def test_a_playlist_opens_no_other_file(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write_video(tmp_path / "other.ts", 3)
    (tmp_path / name).write_text(PLAYLISTS[name])
    with pytest.raises(DataError, match="cannot decode .*(playlists are not read|Invalid data found)"):
        open_video(tmp_path / name)


def test_a_pipe_is_refused_before_it_is_opened(tmp_path):
    os.mkfifo(tmp_path / "x.mp4")
    with pytest.raises(DataError, match=r"cannot read '.*x.mp4' \(it is a device or a pipe\)"):
        open_video(tmp_path / "x.mp4")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="cannot read '.*gone.mp4'"):
        open_video(tmp_path / "gone.mp4")


def test_a_video_without_its_index_is_an_error(tmp_path):
    data = write_video(tmp_path / "cut.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match="cannot decode"):
        open_video(tmp_path / "cut.mp4")


def test_truncated_video_has_the_remaining_frames(tmp_path):
    data = write_video(tmp_path / "cut.mkv", bf="0").read_bytes()
    (tmp_path / "cut.mkv").write_bytes(data[: len(data) * 2 // 3])
    with open_video(tmp_path / "cut.mkv") as video:
        count = video.info.num_frames
        assert 10 < count < 40
        assert number_of(next(video.frames([count - 2]))) == count - 2


def test_large_frames_are_refused_before_decoding(files):
    with pytest.raises(DataError, match=r"frames of 64x48 pixels are too large.*data\.max_image_pixels"):
        open_video(files / "stream.ts", max_pixels=1000)


def test_a_video_without_images_is_an_error(tmp_path):
    import av

    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(DataError, match="contains no images"):
        open_video(tmp_path / "sound.mp4")
