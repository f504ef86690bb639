"""HTML pages from templates; each page is a single file that needs no network."""

import base64
import io
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from PIL import Image

_FOLDER = Path(__file__).parent


def render_page(template: Path, *, title: str, **values: Any) -> str:
    """Return an HTML file from a template NAME.html and, beside it, NAME.css and NAME.js.

    The template extends `page.html` of this folder. Jinja escapes all values. Data for the script is written by
    `{{ value|tojson }}`, which is also safe inside a script element.

    Args:
        title: plain text.
        values: the other variables of the template.
    """
    loader = jinja2.FileSystemLoader([template.parent, _FOLDER])
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    style, script = (
        Markup(path.read_text(encoding="utf-8")) if path.is_file() else ""
        for path in (template.with_suffix(".css"), template.with_suffix(".js"))
    )
    base_style = Markup((_FOLDER / "page.css").read_text(encoding="utf-8"))
    page = environment.get_template(template.name)
    return page.render(title=title, base_style=base_style, style=style, script=script, **values)


def jpeg_url(image: np.ndarray, quality: int = 85) -> str:
    """Return an (H, W, 3) uint8 RGB image as a data URL."""
    data = io.BytesIO()
    Image.fromarray(image).save(data, format="JPEG", quality=quality)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode('ascii')}"
