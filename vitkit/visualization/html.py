"""HTML pages from templates; each page is a single file that needs no network."""

import base64
import io
import json
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


def html_page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Return an HTML file.

    Args:
        title: plain text.
        body, style, script: HTML, CSS and JavaScript, inserted verbatim.
    """
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True)
    page = environment.from_string('{% extends "page.html" %}{% block body %}{{ body }}{% endblock %}')
    base_style = Markup((_FOLDER / "page.css").read_text(encoding="utf-8"))
    parts = {name: Markup(part) for name, part in (("body", body), ("style", style), ("script", script))}
    return page.render(title=title, base_style=base_style, **parts)


def script_json(data: Any) -> str:
    """Return data as JSON that is safe inside a script element, with "<" escaped, as it could end the element."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def jpeg_url(image: np.ndarray, quality: int = 85) -> str:
    """Return an (H, W, 3) uint8 RGB image as a data URL."""
    data = io.BytesIO()
    Image.fromarray(image).save(data, format="JPEG", quality=quality)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode('ascii')}"
