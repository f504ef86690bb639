import io
import pickle
import zipfile

import numpy as np
import pytest

from vitkit.errors import CheckpointError
from vitkit.weights import read_checkpoint


def test_pickled_arrays_are_read_without_running_code(tmp_path):
    arrays = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "a.count": np.array(4)}
    for protocol in (0, 2, 5):
        path = tmp_path / f"model{protocol}.pkl"
        path.write_bytes(pickle.dumps({"model": arrays, "__author__": "third_party"}, protocol=protocol))
        state = read_checkpoint(path)
        assert state.keys() == arrays.keys()
        assert state["a.weight"].tolist() == [[0, 1, 2], [3, 4, 5]] and state["a.count"] == 4


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_pickles_of_anything_else_are_refused(tmp_path):
    trap = tmp_path / "ran"
    cases = {
        "code": ({"model": {"w": Touch(trap)}}, r"refused or damaged.*it asks for (_io|builtins|io)\.open"),
        "objects": ({"model": {"w": np.array([{}], dtype=object)}}, "w is not an array of numbers"),
        "list": ([1, 2], "has no arrays by name"),
    }
    for name, (content, message) in cases.items():
        path = tmp_path / f"{name}.pkl"
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(CheckpointError, match=message):
            read_checkpoint(path)
    assert not trap.exists()
    path = tmp_path / "cut.pkl"
    path.write_bytes(pickle.dumps({"model": {"w": np.zeros(100)}})[:80])
    with pytest.raises(CheckpointError, match=r"cut\.pkl: (truncated|refused)"):
        read_checkpoint(path)


def test_array_that_claims_more_data_than_the_file_has_is_refused(tmp_path):
    header = io.BytesIO()
    claim = {"descr": "<f4", "fortran_order": False, "shape": (1 << 50,)}
    np.lib.format.write_array_header_1_0(header, claim)
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as file:
        file.writestr("w.npy", header.getvalue())
    with pytest.raises(CheckpointError, match=r"huge\.npz: damaged, or contains more than numbers"):
        read_checkpoint(tmp_path / "huge.npz")


@pytest.mark.parametrize("text", ["", "\n", "import torch\n", "{}", "c", "l.", "0 1 2\n", "]", "(", "\x80\x02."])
@pytest.mark.parametrize("suffix", ["pth", "pkl", "npz", "txt"])
def test_text_file_is_refused_as_a_checkpoint(text, suffix, tmp_path):
    (tmp_path / f"a.{suffix}").write_text(text, encoding="latin1")
    with pytest.raises(CheckpointError, match=rf"a\.{suffix}: "):
        read_checkpoint(tmp_path / f"a.{suffix}")
