"""What names of weights refer to."""

import json

import pytest

from vitkit.errors import ConfigError
from vitkit.weights import find_weights


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("run/config.json", "run/last.pth", "started/config.json", "loose.bin"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    library = tmp_path / "library"
    library.mkdir()
    (library / "config.json").write_text(json.dumps({"model_type": "vit"}))
    return tmp_path


def test_names_refer_to_files_folders_and_the_model_zoo(folder):
    assert str(find_weights("run")) == "run/last.pth"
    (folder / "run" / "best.pth").touch()
    assert str(find_weights("run")) == "run/best.pth"
    assert str(find_weights("library")) == "library"
    assert find_weights("loose.bin") == "loose.bin"
    assert find_weights("missing.pth") == "missing.pth"  # which reading it reports
    assert find_weights("dfine_s") == "dfine_s_coco"
    assert find_weights("shapes_dino").is_file()  # in the package


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("started", "'started' is not the folder of a run: expected config.json and best.pth or last.pth"),
        ("run/config.json", "run/config.json: a config has no weights"),
        ("quickstart/detr", "quickstart/detr: a config has no weights"),
        ("detr_r51", "'detr_r51' is neither a model of the zoo, nor a run's folder or checkpoint.*'detr_r50'"),
    ],
)
def test_names_without_weights_are_an_error(folder, name, message):
    with pytest.raises(ConfigError, match=message):
        find_weights(name)
