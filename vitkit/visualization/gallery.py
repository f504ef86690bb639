"""Write a gallery of pictures as one self-contained HTML file, with the images embedded."""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitkit.data.io.output import write_text
from vitkit.visualization.html import html_page, jpeg_url

_STYLE = """
header { position: sticky; top: 0; background: #fafafa; padding: .5rem 0; }
main { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
figure { margin: 0; padding: .5rem; background: #fff; border: 1px solid #ddd; max-width: 30rem; }
img { display: block; }
figcaption { margin-top: .4rem; }
figcaption b { display: block; }
"""
_SCRIPT = """
const choice = document.getElementById("class"), shown = document.getElementById("shown");
const figures = [...document.querySelectorAll("figure")];
choice.addEventListener("change", () => {
  for (const figure of figures)
    figure.hidden = choice.value !== "" && !JSON.parse(figure.dataset.classes).includes(choice.value);
  shown.textContent = figures.filter(figure => !figure.hidden).length;
});
"""


@dataclass
class Card:
    """One picture of a gallery."""

    title: str
    picture: np.ndarray
    """(H, W, 3) uint8 RGB, the picture."""
    text: str = ""
    classes: list[str] = field(default_factory=list)
    """Names of the classes in the picture, by which the gallery can be filtered."""


def write_gallery(cards: Sequence[Card], path: str | Path, *, title: str) -> None:
    """Write a gallery of pictures that can be filtered by class.

    Args:
        path: the HTML file's path; its folder is made.
        title: the gallery's title.
    Raises:
        ValueError: there are no cards.
    """
    if not cards:
        raise ValueError("cards: got none, expected at least one picture.")
    names = sorted({name for card in cards for name in card.classes})
    options = "".join(f'<option value="{html.escape(name)}">{html.escape(name)}</option>' for name in names)
    figures = "\n".join(_figure(card) for card in cards)
    body = f"""<header>
<h1>{html.escape(title)}</h1>
<label>with <select id="class"><option value="">any class</option>{options}</select></label>
<span><span id="shown">{len(cards)}</span> of {len(cards)} pictures</span>
</header>
<main>
{figures}
</main>"""
    write_text(Path(path), html_page(title, body, style=_STYLE, script=_SCRIPT))


def _figure(card: Card) -> str:
    classes = html.escape(json.dumps(card.classes))
    return (
        f'<figure data-classes="{classes}"><img alt="{html.escape(card.title)}" '
        f'src="{jpeg_url(card.picture)}">'
        f"<figcaption><b>{html.escape(card.title)}</b>{html.escape(card.text)}</figcaption></figure>"
    )
