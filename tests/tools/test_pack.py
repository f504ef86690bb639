"""vitkit data pack: what it writes, prints and refuses."""

import json
import tarfile

import pytest

from vitkit.apps.datasets.synthetic import write_shapes
from vitkit.tools.data import pack


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_shapes("shapes", num_train=2, num_val=2, image_size=32)


def test_a_folder_is_packed_and_the_next_step_said(folder, tmp_path, capsys):
    pack.main(["shapes", "out", "--shard-size", "20k"])
    shards = {path.name for path in (tmp_path / "out").glob("*.tar")} - {"files.tar"}
    assert len(shards) > 1 and all((tmp_path / "out" / shard).stat().st_size <= 20 << 10 for shard in shards)
    assert f"wrote out: 12 images in {len(shards)} shards (0.00 GB), 9 other files; train on it with data.root=out" in (
        capsys.readouterr().out
    )
    others = {"pack.json", "names.npy", "members.npy", "files.tar"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == shards | others
    with tarfile.open("out/files.tar") as tar:
        assert json.load(tar.extractfile("annotations/instances_val2017.json"))["images"]
    with pytest.raises(SystemExit, match=r"error: OUT 'out' exists already.*--overwrite"):
        pack.main(["shapes", "out"])
    pack.main(["shapes", "out", "--overwrite"])
    assert not (tmp_path / "out/shard-00001.tar").exists()


@pytest.mark.parametrize("size", ["0", "-1", "1T", "much"])
def test_sizes_that_are_none_are_named(size, capsys):
    with pytest.raises(SystemExit):
        pack.main(["a", "b", f"--shard-size={size}"])
    assert f"{size!r}: expected a number of bytes, such as 512M or 1G" in capsys.readouterr().err


def test_annotations_of_images_elsewhere_are_named(folder, capsys):
    write_shapes("other", num_train=1, num_val=1, image_size=32)
    file = "other/annotations/instances_val2017.json"
    with pytest.raises(SystemExit, match=rf"--labels {file}: its images are in 'other/val2017', which is not in"):
        pack.main(["shapes", "out", "--labels", file, "other/val2017"])
