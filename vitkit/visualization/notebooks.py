"""Saved pictures in notebooks."""

import sys
from pathlib import Path


def show(path: str | Path, *, width: int | None = None) -> None:
    """Show a saved picture below the cell of a notebook; where there is no notebook, print its path.

    Args:
        path: of a PNG or JPEG.
        width: pixels in the notebook; None: the picture's own.
    Raises:
        FileNotFoundError: there is no such picture.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"show: no picture {str(path)!r}. Draw and save it first.")
    # IPython is loaded wherever a notebook runs, and is needed nowhere else.
    ipython = sys.modules.get("IPython")
    if ipython is None or ipython.get_ipython() is None:
        print(path)
        return
    from IPython.display import Image, display

    display(Image(filename=str(path), width=width))
