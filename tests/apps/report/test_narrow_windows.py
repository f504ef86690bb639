"""No page is wider than a window of 400 pixels, however long the names in it are; its tables scroll in their boxes."""

from html.parser import HTMLParser

import numpy as np
import pytest
from helpers.browser import open_page
from helpers.plain_dataset import PlainDataset

from vitkit.apps.report.images import ImageBudget
from vitkit.apps.report.report import write_page
from vitkit.apps.report.sections import Alert, ConfusionMatrix, Gallery, Image, Section, Table
from vitkit.apps.starter.gallery import Card, write_gallery

LONG = "runs/a_name_without_any_space_" * 8


class TableBoxes(HTMLParser):
    """Collects the class of the element around each table."""

    def __init__(self, page):
        super().__init__()
        self.last, self.boxes = None, []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.boxes.append(self.last)
        self.last = dict(attrs).get("class")


def report(folder):
    matrix = np.arange(36).reshape(6, 6)
    names = [f"{LONG}{k}" for k in range(6)]
    image = Image(None, LONG, pixels=np.zeros((50, 900, 3), np.uint8))
    sections = [
        Section("Long names", [Table(["", *names], [[name, *range(6)] for name in names], caption=LONG)]),
        Section("Many columns", [Table([""] + ["value"] * 20, [["short", *([0.5] * 20)]])]),
        Section("Texts", [Table(("source", "got"), [("word " * 30, "x" * 300)])]),
        Section(LONG, [ConfusionMatrix(matrix, names, lambda row, column: [image]), Alert(LONG)]),
        Section("Images", [Gallery(LONG, [[image], [image] * 3])]),
    ]
    budget = ImageBudget(PlainDataset(), 1_000_000)
    return write_page(folder / "report.html", LONG, [(sections, budget)], {"model": LONG})


def cards(folder):
    figure = np.zeros((100, 900, 3), np.uint8)
    write_gallery([Card(LONG, figure, LONG, [LONG])], folder / "cards.html", title=LONG)
    return folder / "cards.html"


def test_every_table_lies_in_a_box_that_scrolls(tmp_path):
    assert TableBoxes(report(tmp_path).read_text()).boxes == ["wide"] * 4
    assert ".wide { overflow-x: auto; max-width: 100%;" in report(tmp_path).read_text()


@pytest.mark.parametrize("write", [report, cards])
def test_no_page_is_wider_than_its_window(write, tmp_path):
    with open_page(write(tmp_path), width=400) as (page, issues):
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        for box in page.locator(".wide").all():
            assert box.bounding_box()["width"] <= 400
            # The names of the rows leave room for the numbers.
            names = [name.bounding_box()["width"] for name in box.locator("tbody th").all()]
            assert max(names) <= 340
        page.screenshot(path=str(tmp_path / "page.png"), full_page=True)
        assert not issues
