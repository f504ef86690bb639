import base64
import json
import re

import numpy as np
import pytest
import torch
from helpers.browser import open_page

from vitkit.apps.explanations import html_page
from vitkit.apps.explanations.html_page import PageLayer, write_explain_page
from vitkit.apps.explanations.pages import pool_maps
from vitkit.errors import ConfigError


def data_of(path) -> dict:
    return json.loads(re.search(r'id="data">(.*)</script>', path.read_text(encoding="utf-8"))[1])


def weights_of(layer: dict, num_rows: int) -> np.ndarray:
    """Decode the weights as the page's script does: (heads, N, M)."""
    largest = np.frombuffer(base64.b64decode(layer["largest"]), "<f4").reshape(-1, num_rows, 1)
    levels = np.frombuffer(base64.b64decode(layer["levels"]), np.uint8).reshape(*largest.shape[:2], -1)
    return levels / 255 * largest


def test_page_contains_every_head_and_their_mean(tmp_path):
    weights = torch.rand(2, 6, 4).softmax(-1)
    layers = [PageLayer("words", weights, list("abcdef"), (2, 2), (1.1, 1.0), [[0, 0, 5, 5]] * 6)]
    path = tmp_path / "page.html"
    size = write_explain_page(layers, path, title="A & Ä", image=np.zeros((20, 30, 3), np.uint8))
    assert size == path.stat().st_size
    data = data_of(path)
    (layer,) = data["layers"]
    assert layer["heads"] == ["mean", "head 0", "head 1"] and layer["covered"] == [1.1, 1.0]
    assert layer["rows"] == {"labels": list("abcdef")} and layer["columns"] == {"grid": [2, 2]}
    expected = torch.cat((weights.mean(0, keepdim=True), weights)).numpy()
    assert np.allclose(weights_of(layer, 6), expected, atol=0.5 / 255)
    assert data["width"] / data["height"] == 1.5 and data["scale"] == data["width"] / 30


def test_page_is_self_contained_and_no_token_ends_its_script(tmp_path):
    path = tmp_path / "page.html"
    write_explain_page([PageLayer("x", torch.ones(1, 1, 1), ["</script>"], ["<b>"])], path, title="<i>")
    text = path.read_text(encoding="utf-8")
    assert "http:" not in text and "https:" not in text and text.count("</script>") == 2 and "<i>" not in text
    assert data_of(path)["layers"][0]["rows"]["labels"] == ["</script>"]


def test_last_layers_keep_their_heads_if_there_are_too_many_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(html_page, "MAX_BYTES", 100)
    layers = [PageLayer(str(i), torch.rand(3, 4, 4), list("abcd"), list("abcd")) for i in range(3)]
    path = tmp_path / "page.html"
    write_explain_page(layers, path, title="t")
    # Three means are 48 of 100; the heads of one layer are 48 more.
    assert [len(layer["heads"]) for layer in data_of(path)["layers"]] == [1, 1, 4]
    assert "it has single heads only for the last layers" in path.read_text()
    monkeypatch.setattr(html_page, "MAX_BYTES", 40)
    with pytest.raises(ConfigError, match="html: 48 weights, .* expected at most 40. Give a shorter text"):
        write_explain_page(layers, path, title="t")


def test_pooling_keeps_the_sums_and_reports_the_padded_margin():
    maps = torch.rand(2, 30, 57)
    small, covered = pool_maps(maps, (1.0, 1.5))
    assert small.shape == (2, 10, 19) and covered == (1.0, 1.5)
    assert torch.allclose(small[1, 9, 18], maps[1, 27:, 54:].sum()) and torch.allclose(small.sum(), maps.sum())
    small, covered = pool_maps(torch.rand(29, 20))
    assert small.shape == (15, 10) and covered == (30 / 29, 1.0)


def test_pointing_at_a_location_says_what_it_attends_to_and_a_click_holds_it(tmp_path):
    weights = torch.zeros(2, 4, 4)
    weights[:, torch.arange(4), [3, 2, 1, 0]] = 0.7  # the location on the opposite side
    path = tmp_path / "page.html"
    write_explain_page(
        [PageLayer("encoder", weights, (2, 2), (2, 2))], path, title="t", image=np.zeros((100, 200, 3), np.uint8)
    )
    with open_page(path) as (page, issues):
        box = page.locator("canvas").bounding_box()
        page.mouse.move(box["x"] + 5, box["y"] + 5)
        text = page.locator("#text")
        assert text.inner_text() == "encoder, mean: location (50, 25) attends most to location (150, 75), with 0.700"
        page.mouse.click(box["x"] + 5, box["y"] + 5)
        page.mouse.move(box["x"] + box["width"] - 5, box["y"] + 5)
        assert "location (50, 25) attends" in text.inner_text() and text.inner_text().endswith("again to release)")
        page.mouse.click(box["x"] + box["width"] - 5, box["y"] + 5)
        assert "location (150, 25) attends most to location (50, 75)" in text.inner_text()
        assert not issues
