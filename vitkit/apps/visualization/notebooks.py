"""Show saved images in notebooks."""

import sys
from pathlib import Path


def show(path: str | Path, *, width: int | None = None) -> None:
    """Show a saved image below the cell of a notebook; outside a notebook, print its path.

    Args:
        path: path of a PNG, JPEG or GIF.
        width: width in the notebook in pixels; None: that of the image.
    Raises:
        FileNotFoundError: there is no such image.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"show: no image {str(path)!r}. Draw and save it first.")
    # A notebook has always imported IPython; elsewhere it is not needed.
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        print(path)
        return
    from IPython.display import Image, display

    display(Image(filename=str(path), width=width))
