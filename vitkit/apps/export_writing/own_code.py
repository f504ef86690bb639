"""Finds the place in a user's own code that an error comes from."""

import os
import re
import sysconfig
import traceback

import vitkit


def place_in_own_code(error: BaseException) -> str | None:
    """Return "FILE, line N", the last line of a user's file on the way to an error; None if there is none."""
    packages = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    folder = os.path.dirname(vitkit.__file__)
    # In a checkout, the tools, configs and model zoo stand beside the package.
    packages += [folder, *(os.path.join(os.path.dirname(folder), name) for name in ("tools", "configs", "model_zoo"))]
    place: str | None = None
    cause: BaseException | None = error
    while cause is not None and place is None:
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(cause.__traceback__)]
        # torch.export gives the lines of the code that it traced in its message.
        frames += [(file, line) for file, line in re.findall(r'File "([^"]+\.py)", line (\d+)', str(cause))]
        own = [frame for frame in frames if frame[0].endswith(".py") and not frame[0].startswith(tuple(packages))]
        place = f"{own[-1][0]}, line {own[-1][1]}" if own else None
        cause = cause.__cause__ or cause.__context__
    return place
