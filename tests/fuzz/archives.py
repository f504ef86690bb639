"""The containers of weights: PyTorch's zip files, and .safetensors files."""

import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

import torch


def saved(value: Any, **settings: Any) -> bytes:
    """Return what `torch.save` writes."""
    file = io.BytesIO()
    torch.save(value, file, **settings)
    return file.getvalue()


def with_entry(
    data: bytes, name: str, change: Callable[[bytes], bytes], compression: int = zipfile.ZIP_STORED
) -> bytes:
    """Return a zip file with a changed entry, whose checksums are right."""
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(changed, "w", compression) as new:
        for info in old.infolist():
            content = old.read(info)
            new.writestr(info.filename, change(content) if info.filename.endswith(name) else content)
    return changed.getvalue()


def split_safetensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header of a .safetensors file, and the bytes of its tensors."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join_safetensors(header: dict[str, Any] | bytes, tensors: bytes) -> bytes:
    """Return a .safetensors file of a header, or of the text of one, and the bytes of its tensors."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tensors
