"""Packs on a disk and on a server: what is read is what was packed, and whatever fails is named and bounded."""

import errno
import hashlib
import io
import json
import logging
import multiprocessing
import os
import random
import shutil
import tarfile
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from fuzz.mutate import mutate_bytes, mutate_json
from helpers.processes import run_anew
from helpers.range_server import serve

from vitkit.apps.datasets.packing import write_pack
from vitkit.errors import ConfigError, DataError
from vitkit.io import image_files as image_files_module
from vitkit.io import packs, remote_files
from vitkit.io.folders import data_files, image_files
from vitkit.io.image_files import ImageStore, read_image, upright_size
from vitkit.io.packs import mount
from vitkit.io.remote_files import BlockCache, read_range

NAMES = ("a/1.png", "a/2.png", "a/b/3.png", "a0.png", "c/ü.png", "c/x.y.png")
BLOCK = 1000


@pytest.fixture(autouse=True)
def small_and_fast(tmp_path, monkeypatch):
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    for module in (packs, remote_files):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(remote_files, "FIRST_WAIT", 0.01)


@pytest.fixture
def data(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    folder = tmp_path / "data"
    for number, name in enumerate(NAMES):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (12 + number, 16, 3), np.uint8)).save(folder / name)
    (folder / "annotations").mkdir()
    (folder / "annotations/file.json").write_text('{"images": []}')
    (folder / "empty").mkdir()
    (folder / ".hidden.png").write_bytes(b"-")
    return folder


@pytest.fixture
def pack(data, tmp_path):
    write_pack(data, tmp_path / "served/pack", shard_bytes=16 << 10)
    return tmp_path / "served/pack"


@pytest.fixture
def server(pack):
    pytest.importorskip("aiohttp")
    with serve(pack.parent) as served:
        yield served


def read_packed(path: str | Path) -> bytes | None:
    """Return the content of an image in a mounted pack; None if no pack has it."""
    found = image_files_module._find_packed(path)
    return None if found is None else found[0].read(found[1])


def shard_of(root: str | Path, name: str) -> tuple[str, int, int]:
    """Return the shard of an image, and where its content begins and ends."""
    pack, number = image_files_module._find_packed(Path(root) / name)
    shard, start, length, _ = pack.members[number].tolist()
    return pack.shards[shard]["name"], start, start + length


def test_every_file_of_a_pack_is_the_one_that_was_packed(data, pack, server):
    for root in (str(pack), f"{server.url}/pack/"):
        root = Path(mount(root))
        assert [(root / name).read_bytes() for name in ("annotations/file.json",)] == [b'{"images": []}']
        assert [read_packed(root / name) for name in NAMES] == [(data / name).read_bytes() for name in NAMES]
        assert all(np.array_equal(read_image(root / name), read_image(data / name)) for name in NAMES)
        assert upright_size(root / "a0.png") == (16, 15)
        assert [ImageStore(root).has(name) for name in ("a/1.png", "a/9.png", "a", "annotations/file.json")] == [
            1,
            0,
            0,
            1,
        ]
        assert (root / "empty").is_dir()


def test_what_reads_packs_is_imported_where_there_is_one(data, pack):
    program = f"""
import sys
from pathlib import Path
from vitkit.io.image_files import ImageStore, find_root, read_image
for root in ({str(data)!r}, {str(pack)!r}):
    store = ImageStore(find_root(root))
    print(store.has("a0.png"), store.is_folder(), read_image(store.folder / "a0.png").shape[2])
    print(store.blocks(["a0.png"]) is None, "vitkit.io.packs" in sys.modules, len(store.list_packed_files()))
"""
    status, printed = run_anew(program)
    assert status == 0, printed
    on_disk, in_pack = printed.split()[:6], printed.split()[6:]
    assert on_disk == ["True", "True", "3", "True", "False", "0"]
    assert in_pack == ["True", "True", "3", "False", "True", str(len(NAMES))]


def test_folders_of_a_pack_are_listed_as_those_that_were_packed(data, pack):
    root = Path(mount(str(pack)))
    for folder in ("", "a", "a/b", "c", "empty", "annotations"):
        listed, original = ([p.relative_to(r) for p in data_files(r / folder)] for r in (root, data))
        assert listed == original, folder
    assert [path.name for path in image_files(root / "a")] == ["1.png", "2.png", "3.png"]


def test_tar_files_have_at_most_the_size_that_was_chosen_and_the_same_bytes_each_time(data, tmp_path):
    for out in ("one", "two"):
        packed = write_pack(data, tmp_path / out, shard_bytes=13 << 10)
    assert packed.num_images == 6 and packed.num_files == 1 and packed.num_shards > 1
    description = json.loads((tmp_path / "one/pack.json").read_text())
    assert len(description["shards"]) == packed.num_shards
    for shard in description["shards"]:
        path = tmp_path / "one" / shard["name"]
        assert path.stat().st_size == shard["size"] <= 13 << 10
        assert path.read_bytes() == (tmp_path / "two" / shard["name"]).read_bytes()
    names = []
    for shard in sorted((tmp_path / "one").glob("shard-*.tar")):
        with tarfile.open(shard) as tar:
            names += tar.getnames()
    assert sorted(names) == sorted(NAMES)


def test_what_cannot_be_packed_is_named(data, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"no folder '.*none'\. Give the folder of the data"):
        write_pack(tmp_path / "none", out)
    with pytest.raises(DataError, match=r"'.*annotations' contains no image"):
        write_pack(data / "annotations", out)
    with pytest.raises(DataError, match=r"OUT '.*' is within '.*data'"):
        write_pack(data, data / "pack")
    with pytest.raises(DataError, match=r"the annotations list 'a/9\.png', which is not in"):
        write_pack(data, out, labels={"a/9.png": {}})
    (data / "a/1.jpg").write_bytes((data / "a/1.png").read_bytes())
    with pytest.raises(DataError, match=r"'a/1\.jpg' and 'a/1\.png' would both have the annotations a/1\.json"):
        write_pack(data, out, labels={"a/1.jpg": {}, "a/1.png": {}})
    (data / "clip.mp4").write_bytes(b"-")
    with pytest.raises(DataError, match=r"clip\.mp4' is a video; only images are read from packs"):
        write_pack(data, out)
    (data / "clip.mp4").unlink()
    out.mkdir()
    with pytest.raises(DataError, match=r"exists already, and is not replaced\. .* --overwrite"):
        write_pack(data, out)
    with pytest.raises(DataError, match="is not a pack, and is not replaced"):
        write_pack(data, out, overwrite=True)
    out.rmdir()
    write_pack(data, out)
    (data / "a0.png").unlink()
    assert write_pack(data, out, overwrite=True).num_images == 6
    assert not list(tmp_path.glob("*.tmp"))


def test_a_pack_is_not_packed_again(data, pack, tmp_path):
    with pytest.raises(DataError, match=r"'.*/served/pack' is a pack\. Give the folder that it was made of, or move"):
        write_pack(pack, tmp_path / "out")
    pack.rename(data / "old")
    with pytest.raises(DataError, match=r"'.*/data/old' is a pack"):
        write_pack(data, tmp_path / "out")


def test_a_folder_with_a_file_of_a_packs_name_is_a_folder(data):
    (data / "pack.json").write_text('{"name": "something else"}')
    assert mount(str(data)) == str(data)


def test_a_pack_is_replaced_through_a_link_and_in_its_own_folder(data, tmp_path, monkeypatch):
    write_pack(data, tmp_path / "pack")
    (tmp_path / "link").symlink_to("pack")
    (tmp_path / "new").symlink_to("elsewhere")
    monkeypatch.chdir(tmp_path / "pack")
    for out in (Path(), tmp_path / "link", tmp_path / "new"):
        write_pack(data, out, overwrite=True)
    assert (tmp_path / "link").is_symlink() and not list(tmp_path.rglob("*.tmp"))
    assert all(read_packed(Path(mount(str(tmp_path / name))) / "a0.png") for name in ("link", "elsewhere"))


def test_folders_that_are_links_to_packed_ones_are_named(data, tmp_path, caplog):
    (data / "val").symlink_to("a")
    (data / "a/up").symlink_to("..")
    (tmp_path / "far").mkdir()
    (data / "far").symlink_to(tmp_path / "far")
    write_pack(data, tmp_path / "pack")
    (record,) = caplog.records
    assert "'val' is a link to 'a', whose images are packed only once: they are not found in 'val'." in record.message


def test_a_pack_may_have_any_name(data, tmp_path):
    for name in (b"\xe9 1", b"x" * 250, "new\nline é".encode()):
        out = Path(os.fsdecode(os.fsencode(tmp_path / "far") + b"/" + name))
        write_pack(data, out)
        assert read_packed(Path(mount(str(out))) / "a0.png") == (data / "a0.png").read_bytes()


@pytest.mark.parametrize("pattern", ["*", "origin", "members.npy"])
def test_a_folder_that_has_lost_its_index_is_made_again(data, pack, pattern):
    root = Path(mount(str(pack)))
    for path in root.rglob(pattern):  # as file systems do with what nobody has used for some weeks
        if path.is_file():
            path.unlink()
    image_files_module._find_pack.cache_clear()
    packs.open_pack.cache_clear()
    assert Path(mount(str(pack))) == root
    assert (root / "annotations/file.json").is_file() and read_packed(root / "a0.png") is not None


def test_a_cache_on_a_read_only_disk_is_used(pack, monkeypatch):
    root = mount(str(pack))

    def is_read_only(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(packs, "hold_lock", is_read_only)
    assert mount(str(pack)) == root


def test_other_roots_stay_and_missing_packs_are_named(tmp_path, server):
    assert mount(str(tmp_path)) == str(tmp_path) and mount("data") == "data"
    with pytest.raises(DataError, match=r"no 'http://.*/none/pack\.json'\. Correct the address"):
        mount(f"{server.url}/none")
    with pytest.raises(ConfigError, match=r"'nowhere://x/pack\.json': Protocol not known: nowhere"):
        mount("nowhere://x")


@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs is installed")
def test_packages_of_other_protocols_are_named():
    with pytest.raises(
        ConfigError, match=r"'s3://bucket/data/pack\.json': s3:// needs another package: pip install s3fs"
    ):
        mount("s3://bucket/data")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "[" * 100_000, "is not a pack's description, or damaged"),
        (lambda text: "{", "is not a pack's description, or damaged"),
        (lambda text: text.replace('"shards"', '"other"'), "is not a pack's description, or damaged"),
        (lambda text: text.replace('"name"', '"other"'), "is not a pack's description, or damaged"),
        (lambda text: text.replace('"vitkit_pack": 1', '"vitkit_pack": 2'), "has format 2; this vitkit reads 1"),
    ],
)
def test_descriptions_that_cannot_be_read_are_named(pack, change, message):
    (pack / "pack.json").write_text(change((pack / "pack.json").read_text()))
    with pytest.raises(DataError, match=rf"pack\.json' {message}"):
        mount(str(pack))


def test_a_changed_index_is_named(pack):
    content = bytearray((pack / "names.npy").read_bytes())
    content[-1] ^= 1
    (pack / "names.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"names\.npy' has another checksum than pack\.json says"):
        mount(str(pack))
    assert not list((pack.parents[1] / "cache/packs").glob("*/"))


def test_a_cache_that_can_only_be_read_is_used(pack, monkeypatch):
    def is_read_only(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    root = mount(str(pack))
    monkeypatch.setattr(packs, "hold_lock", is_read_only)
    assert mount(str(pack)) == root


def test_processes_that_open_a_pack_at_once_without_locks_use_what_one_of_them_has_made(pack, monkeypatch):
    extract, others = packs._extract, []

    def overtaken(*arguments):
        if not others:
            others.append("")
            others.append(mount(str(pack)))
        extract(*arguments)

    monkeypatch.setattr(packs, "hold_lock", lambda *_: nullcontext())
    monkeypatch.setattr(packs, "_extract", overtaken)
    root = Path(mount(str(pack)))
    assert str(root) == others[1] and (root / "annotations/file.json").is_file()
    assert not list(root.parent.glob("*.tmp"))


def test_what_killed_processes_have_left_is_removed_when_it_is_old(pack):
    root = Path(mount(str(pack)))
    shutil.rmtree(root)
    old, new = (root.with_name(f"{root.name}.{name}.tmp") for name in ("old", "new"))
    for folder in (old, new):
        (folder / "inside").mkdir(parents=True)
    os.utime(old, (1, 1))
    mount(str(pack))
    assert new.is_dir() and not old.exists()


def replace(pack: Path, name: str, content: bytes) -> None:
    """Replace a file of a pack, with what pack.json says of it."""
    (pack / name).write_bytes(content)
    description = json.loads((pack / "pack.json").read_text())
    description["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (pack / "pack.json").write_text(json.dumps(description))


def array_bytes(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def tar_bytes(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def member(name: str, size: int = 0, **options) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    for key, value in options.items():
        setattr(info, key, value)
    return info


SPARSE = {"GNU.sparse.map": "0,5", "GNU.sparse.size": str(1 << 30), "GNU.sparse.numblocks": "1"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tar_bytes((member("../outside.json", 1), b"-")), r"has '\.\./outside\.json', which is not a file of a folder"),
        (tar_bytes((member("/tmp/outside.json", 1), b"-")), "has '/tmp/outside.json', which is not a file of a folder"),
        (tar_bytes((member(".pack/x", 1), b"-")), "has '.pack/x', which is not a file of a folder"),
        (tar_bytes((member("a", type=tarfile.SYMTYPE, linkname="/etc"), b"")), "has 'a', which is not a file of a"),
        (tar_bytes((member("a", 5, pax_headers=SPARSE), b"12345")), "has 'a', which is not a file of a folder"),
        (member("a", 1 << 30).tobuf() + bytes(1024), "has 'a', which is not a file of a folder"),
        (tar_bytes((member("a", 1), b"1"), mode="w:gz"), "is damaged at its beginning"),
        (tar_bytes((member("a", 1), b"1"), (member("a", 1), b"2")), "is damaged at 'a' .File exists"),
        (tar_bytes((member("a", 1), b"1"), (member("a/b", 1), b"2")), "is damaged at 'a/b' .(Not a dir|File exists)"),
        (tar_bytes((member("x" * 300, 1), b"1")), "is damaged at 'x{300}' .File name too long"),
        (b"", "is damaged at its beginning"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # a compressed one has the time in it
)
def test_archives_of_other_files_that_nobody_packed_are_refused(pack, tmp_path, content, message):
    replace(pack, "files.tar", content)
    with pytest.raises(DataError, match=rf"files\.tar' {message}") as error:
        mount(str(pack))
    assert "\n" not in str(error.value) and "Pack the data again by vitkit data pack" in str(error.value)
    assert not list(tmp_path.rglob("outside.json")) and not list((tmp_path / "cache/packs").glob("*/"))


def rows(*values: tuple[int, ...]) -> bytes:
    return array_bytes(np.array([*values], packs.MEMBER))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("names.npy", b"no array", "names.npy' is not a NumPy array"),
        ("names.npy", array_bytes(np.zeros(6)), r"names.npy' has float64, shape \(6,\); expected"),
        ("names.npy", array_bytes(np.array([b"a", b"../b"])), r"names.npy': entry 1 is b'../b'; expected a path"),
        ("names.npy", array_bytes(np.array([b"/a"])), r"names.npy': entry 0 is b'/a'; expected a path"),
        ("names.npy", array_bytes(np.array([b"a/./b"])), r"names.npy': entry 0 is b'a/./b'; expected a path"),
        ("names.npy", array_bytes(np.array([b"\xff"])), r"names.npy': entry 0 is b'.xff'; expected a path"),
        ("names.npy", array_bytes(np.array([b"b", b"a"])), "names.npy': entry 1 is not sorted after the one before"),
        ("names.npy", array_bytes(np.array([b"a"])), "members.npy' has 6 entries; expected 1"),
        ("members.npy", array_bytes(np.zeros((6, 3), np.int64)), r"members.npy' has int64, shape \(6, 3\); expected"),
        ("members.npy", rows(*[(0, 0, 1, 0)] * 5, (9, 0, 1, 0)), "entry 5, image 'c/ü.png', is 1 bytes at byte 0 of s"),
        (
            "members.npy",
            rows((0, 2**64 - 1, 2, 0), *[(0, 0, 1, 0)] * 5),
            "entry 0, image 'a/1.png', is 2 bytes at byte",
        ),
        (
            "members.npy",
            rows((0, 0, 2**40, 0), *[(0, 0, 1, 0)] * 5),
            "entry 0, image 'a/1.png', is 1099511627776 bytes",
        ),
    ],
)
def test_an_index_that_nobody_wrote_is_refused(pack, name, content, message):
    replace(pack, name, content)
    with pytest.raises(DataError, match=message) as error:
        mount(str(pack))
    assert "\n" not in str(error.value) and "Pack the data again by vitkit data pack" in str(error.value)


@pytest.mark.parametrize("seed", range(60))
def test_mutated_packs_are_read_or_named(pack, tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    name = rng.choice(["pack.json", "names.npy", "members.npy", "files.tar"])
    if name == "pack.json":
        (pack / name).write_bytes(mutate_json(json.loads((pack / name).read_text()), rng))
    else:
        replace(pack, name, mutate_bytes((pack / name).read_bytes(), rng))
    try:
        root = mount(str(pack))
        for image in NAMES if root != str(pack) else ():
            read_packed(f"{root}/{image}")
    except DataError as error:
        assert "\n" not in str(error) and len(str(error)) < 1500
    assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file()) < 1 << 20


@pytest.mark.parametrize("fault", ["range", "description"])
def test_an_answer_without_end_is_not_read_to_its_end(pack, server, monkeypatch, fault):
    monkeypatch.setattr(remote_files, "MAX_WHOLE_BYTES", 1 << 20)
    if fault == "description":
        server.faults["pack/pack.json"] = ["endless"]
        with pytest.raises(DataError, match=r"pack.json' has more than 1048576 bytes"):
            mount(f"{server.url}/pack")
    else:
        root = mount(f"{server.url}/pack")
        shard, *_ = shard_of(root, "a/1.png")
        server.faults[f"pack/{shard}"] = ["endless"]
        with pytest.raises(DataError, match=r"the server sends more bytes: it does not serve ranges"):
            read_packed(f"{root}/a/1.png")
    assert server.num_sent < 100 << 20


def test_a_name_that_the_pack_lacks_is_reported_like_a_missing_file(pack):
    root = Path(mount(str(pack)))
    with pytest.raises(DataError, match=r"images: cannot read '.*a/9\.png' \(No such file or directory\)"):
        read_image(root / "a/9.png")
    assert ImageStore(root).blocks(["a/1.png", "a/9.png"]) is None
    assert ImageStore(root.parent).blocks(["a/1.png"]) is None
    assert read_packed(root / ("long" * 40 + ".png")) is None


def test_blocks_ascend_by_shard_and_position(pack):
    root = Path(mount(str(pack)))
    blocks = ImageStore(root).blocks(sorted(NAMES, key=str.encode))
    assert (np.diff(blocks) >= 0).all() and blocks[0] == 0 and blocks[-1] > 3
    assert ImageStore(root / "a").blocks(["2.png", "1.png"]).tolist() == [blocks[1], blocks[0]]
    assert ImageStore(root / "a").blocks(["./2.png", "b/..//1.png"]).tolist() == [blocks[1], blocks[0]]


@pytest.mark.parametrize("faults", [[500, 503], ["stall"], ["truncate", "truncate"], [429, 500, "truncate", 500]])
def test_passing_failures_of_a_server_are_asked_again(data, server, monkeypatch, faults):
    root = mount(f"{server.url}/pack")
    if "stall" in faults:
        monkeypatch.setattr(remote_files, "TIMEOUT", 0.5)
    shard, *_ = shard_of(root, "a/1.png")
    server.faults[f"pack/{shard}"] = list(faults)
    assert read_packed(f"{root}/a/1.png") == (data / "a/1.png").read_bytes()
    assert not server.faults[f"pack/{shard}"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (500, "500, message='Internal Server Error'"),
        ("truncate", "Response payload is not completed"),
        ("stall", "nothing complete arrived within 0.2 seconds"),
    ],
)
def test_lasting_failures_of_a_server_end_in_a_line_that_names_them(server, monkeypatch, fault, reason):
    root = mount(f"{server.url}/pack")
    shard, *_ = shard_of(root, "a/1.png")
    server.faults[f"pack/{shard}"] = [fault] * 100
    if fault == "stall":
        monkeypatch.setattr(remote_files, "TIMEOUT", 0.2)
    fetch, attempts = remote_files._fetch, []
    monkeypatch.setattr(remote_files, "_fetch", lambda *request: (attempts.append(request), fetch(*request))[1])
    start = time.monotonic()
    with pytest.raises(DataError) as caught:
        read_image(f"{root}/a/1.png")
    assert time.monotonic() - start < 15  # the server stalls for 20 seconds
    assert len(attempts) == 5  # an attempt may have ended before the server has taken its request
    line = str(caught.value)
    assert f"'{server.url}/pack/{shard}' (bytes 0 to 999) cannot be read in 5 attempts: " in line and reason in line
    assert line.endswith("Check the network and the server, and go on with --resume.") and "\n" not in line


def test_a_file_that_may_not_be_read_is_asked_for_once(server):
    root = mount(f"{server.url}/pack")
    shard, *_ = shard_of(root, "a/1.png")
    server.faults[f"pack/{shard}"] = [403] * 100
    with pytest.raises(DataError, match=r"cannot be read: 403, message='Forbidden'.*Correct the address or rights"):
        read_image(f"{root}/a/1.png")
    assert len(server.faults[f"pack/{shard}"]) == 99


def test_a_missing_shard_is_named(pack, server):
    for root in (mount(f"{server.url}/pack"), mount(str(pack))):
        shard, *_ = shard_of(root, "c/ü.png")
        (pack / shard).rename(pack / "moved")
        with pytest.raises(DataError, match=rf"{shard}' cannot be read \(No such|no 'http.*/{shard}'\. Correct the"):
            read_image(f"{root}/c/ü.png")
        (pack / "moved").rename(pack / shard)


def test_a_server_without_ranges_is_named_at_the_start(server):
    server.serves_ranges = False
    with pytest.raises(
        DataError, match=r"pack\.json' \(bytes 0 to 0\): the server sends more bytes: it does not serve r"
    ):
        mount(f"{server.url}/pack")


def test_a_changed_shard_is_named_and_nothing_of_it_is_used(data, pack, server):
    roots = mount(f"{server.url}/pack"), mount(str(pack))
    shard, start, _ = shard_of(roots[0], "a/2.png")
    content = bytearray((pack / shard).read_bytes())
    content[start + 5] ^= 1
    (pack / shard).write_bytes(content)
    for root in roots:
        message = rf"{shard}': bytes {start} to \d+, image 'a/2\.png', have another checksum than the index says"
        with pytest.raises(DataError, match=message):
            read_image(f"{root}/a/2.png")
        assert read_packed(f"{root}/a/1.png") == (data / "a/1.png").read_bytes()


def test_a_shorter_shard_is_named_with_its_size(pack, server):
    roots = mount(f"{server.url}/pack"), mount(str(pack))
    shard, start, stop = shard_of(roots[0], "a/2.png")
    os.truncate(pack / shard, start + 1)
    with pytest.raises(DataError, match=rf"{shard}' ends before byte {stop}: it is incomplete"):
        read_image(f"{roots[1]}/a/2.png")
    os.truncate(pack / shard, start // BLOCK * BLOCK)
    with pytest.raises(
        DataError, match=rf"{shard}' .*cannot be read.*The server now says: size {start // BLOCK * BLOCK}"
    ):
        read_image(f"{roots[0]}/a/2.png")


def test_a_pack_that_is_written_anew_is_read_anew(data, pack, server):
    old = mount(f"{server.url}/pack")
    read_packed(f"{old}/a/1.png")
    (data / "a/1.png").write_bytes((data / "a/2.png").read_bytes())
    write_pack(data, pack, overwrite=True)
    new = mount(f"{server.url}/pack")
    assert new != old and read_packed(f"{new}/a/1.png") == (data / "a/2.png").read_bytes()


def test_blocks_are_fetched_once(data, server):
    root = mount(f"{server.url}/pack")
    server.requests.clear()
    for _ in range(3):
        for name in NAMES:
            assert read_packed(f"{root}/{name}") == (data / name).read_bytes()
    assert len(server.requests) == len(set(server.requests)) > len(NAMES)
    assert all(first % BLOCK == 0 for _, first in server.requests)


def test_a_damaged_block_of_the_cache_is_fetched_again(data, server, tmp_path):
    root = mount(f"{server.url}/pack")
    read_packed(f"{root}/a/1.png")
    blocks = [path for path in (tmp_path / "cache/blocks").iterdir() if path.is_file()]
    for block in blocks:
        block.write_bytes(b"x" * block.stat().st_size)
    assert read_packed(f"{root}/a/1.png") == (data / "a/1.png").read_bytes()
    for block in blocks:
        block.write_bytes(b"x")
    assert read_packed(f"{root}/a/1.png") == (data / "a/1.png").read_bytes()


def test_the_cache_keeps_the_blocks_used_last_within_its_size(tmp_path, server):
    content = np.random.default_rng(1).bytes(40 * BLOCK)
    (tmp_path / "served/file").write_bytes(content)
    cache = BlockCache(tmp_path / "blocks", max_bytes=12 * BLOCK)

    def read(number):
        start = number * BLOCK
        assert cache.read(f"{server.url}/file", "key", start, start + BLOCK, len(content)) == content[start:][:BLOCK]

    for number in range(40):
        read(number)
        read(0)
        time.sleep(0.002)  # the times of files have a resolution
        stored = [path for path in (tmp_path / "blocks").iterdir() if path.is_file()]
        assert sum(path.stat().st_size for path in stored) <= 12 * BLOCK
    assert sum(first == 0 for _, first in server.requests) == 1  # it was used all the time
    assert {"key-0", "key-39"} <= {path.name for path in stored}


@pytest.mark.parametrize("text", ["-1", "nan", "a lot"])
def test_a_size_of_the_cache_that_is_none_is_named(monkeypatch, text):
    monkeypatch.setenv("VITKIT_CACHE_GB", text)
    with pytest.raises(ConfigError, match=rf"VITKIT_CACHE_GB: got '{text}'; expected a number of gigabytes"):
        BlockCache()


def test_without_a_cache_exactly_the_images_are_read(data, server, monkeypatch):
    monkeypatch.setenv("VITKIT_CACHE_GB", "0")
    root = mount(f"{server.url}/pack")
    server.requests.clear()
    assert [read_packed(f"{root}/{name}") for name in NAMES] == [(data / name).read_bytes() for name in NAMES]
    assert len(server.requests) == len(NAMES)


def test_a_full_disk_is_said_once_and_reading_goes_on(data, server, monkeypatch, caplog):
    def is_full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    root = mount(f"{server.url}/pack")
    monkeypatch.setattr(remote_files, "write_atomically", is_full)
    assert [read_packed(f"{root}/{name}") for name in NAMES] == [(data / name).read_bytes() for name in NAMES]
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "remote files cannot be cached there (No space left on device)" in record.message
    assert "VITKIT_CACHE_GB to less than is free" in record.message


def test_a_cache_that_cannot_hold_the_annotations_is_named(server, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        DataError, match=r"its annotations cannot be stored in '.*' \(Not a directory\)\. Set VITKIT_CAC"
    ):
        mount(f"{server.url}/pack")


def _read_all(root, queue):
    queue.put([read_packed(f"{root}/{name}") for name in NAMES])


def test_processes_that_need_a_block_fetch_it_once(data, server):
    root = mount(f"{server.url}/pack")
    read_packed(f"{root}/a/1.png")  # with the threads of this process, which others do not inherit
    server.requests.clear()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_read_all, args=(root, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [queue.get(timeout=120) for _ in processes] == [[(data / name).read_bytes() for name in NAMES]] * 3
    for process in processes:
        process.join()
    assert len(server.requests) == len(set(server.requests))


def test_a_range_of_a_file_on_any_file_system_of_fsspec():
    import fsspec

    fsspec.filesystem("memory").pipe_file("/file", b"0123456789")
    assert read_range("memory://file", 2, 5) == b"234" and read_range("memory://file") == b"0123456789"
    with pytest.raises(DataError, match=r"cannot be read in 5 attempts: the server sent 2 of 4 bytes"):
        read_range("memory://file", 8, 12)
