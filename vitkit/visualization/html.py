"""Shared parts of vitkit's HTML files, each of which is self-contained and needs no network."""

import base64
import html
import io
import json
from typing import Any

import numpy as np
from PIL import Image

BASE_STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 1.5rem; color: #222; background: #fafafa;
  overflow-wrap: anywhere; }
img, canvas, select, button { max-width: 100%; }
"""


def html_page(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Return an HTML file.

    Args:
        title: plain text.
        body, style, script: HTML, CSS and JavaScript, inserted verbatim.
    """
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'unsafe-inline' data: blob:">
<title>{html.escape(title)}</title>
<style>
{BASE_STYLE.strip()}
{style}
</style>
</head>
<body>
{body}
<script>
{script}
</script>
</body>
</html>
"""


def script_json(data: Any) -> str:
    """Return data as JSON that is safe inside a script element, with "<" escaped, as it could end the element."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def jpeg_url(picture: np.ndarray, quality: int = 85) -> str:
    """Return an (H, W, 3) uint8 RGB picture as a data URL."""
    data = io.BytesIO()
    Image.fromarray(picture).save(data, format="JPEG", quality=quality)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode('ascii')}"
