"""Masks of targets as bits: at a byte per pixel, those of a crowd take gigabytes."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

# What is known without decoding, and what is done to bits instead.
_DESCRIBE = {Tensor.shape.__get__, Tensor.ndim.__get__, Tensor.dtype.__get__}
_DESCRIBE |= {Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.__len__}
_WRITE = {"__setitem__", "__set__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or", "xor"))}
_MOVE = {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.pin_memory, Tensor.__deepcopy__}


class PackedMasks(Tensor):
    """Masks (N, H, W) bool that are stored as bits, each cut to the rows and columns that it covers.

    They are read like any tensor: what PyTorch computes with them gets them decoded, a byte per pixel. Masks that are
    chosen by a slice or by a 1-D tensor, split, concatenated, padded, moved or pinned stay packed, so choose first.
    Nothing can be written to them, but to their `clone()`; what is read, also a mask by its index, is a copy.

    Args:
        bits: (B,) uint8, each 8 neighbors in a row from the lowest bit on; the first is 0, as read outside.
        extents: (N, 5) int64, where each mask's bytes begin in `bits`, and the left, top, right and bottom of what they
            cover, in bytes and rows.
        size: (height, width) H, W.
    """

    bits: Tensor
    extents: Tensor
    device = property(lambda self: self.bits.device)
    is_cuda = property(lambda self: self.bits.is_cuda)

    def __new__(cls, bits: Tensor, extents: Tensor, size: Sequence[int]) -> "PackedMasks":
        # As a tensor it only has a shape.
        masks = torch.zeros((), dtype=torch.bool).expand(len(extents), *size).as_subclass(cls)
        masks.bits, masks.extents = bits, extents
        return masks

    @classmethod
    def pack(cls, masks: Iterable[np.ndarray], size: Sequence[int]) -> "PackedMasks":
        """Pack masks (H, W), in which all but 0 belongs to the object."""
        bits, extents, start = [np.zeros(1, np.uint8)], [], 1
        for mask in masks:
            packed = np.packbits(mask.astype(bool, copy=False), axis=1, bitorder="little")
            rows, columns = packed.any(1).nonzero()[0], packed.any(0).nonzero()[0]
            left, top, right, bottom = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1) if len(rows) else (0,) * 4
            extents.append((start, left, top, right, bottom))
            bits.append(packed[top:bottom, left:right].ravel())
            start += len(bits[-1])
        of_all = torch.from_numpy(np.array(extents, np.int64).reshape(-1, 5))
        return cls(torch.from_numpy(np.concatenate(bits)), of_all, size)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first, *rest = args or (None,)
        if function in _DESCRIBE:
            return super().__torch_function__(function, types, args, kwargs)
        if function in _MOVE and not any(isinstance(x, torch.dtype | Tensor) for x in (*rest, *kwargs.values())):
            return cls(*(function(x, *rest, **kwargs) for x in (first.bits, first.extents)), first.shape[1:])
        if function is Tensor.to and not kwargs and len(rest) == 1 and isinstance(rest[0], torch.dtype):
            return first.decode(rest[0])
        if function is torch.cat and len(args) == 1 and not kwargs:
            return cls._join(first)
        name = function.__name__
        writes = name in _WRITE or (name.endswith("_") and not name.endswith("__"))
        if (isinstance(first, cls) and writes) or isinstance(kwargs.get("out"), cls):
            # Not a TypeError, in whose place PyTorch would compute `masks | other` for `masks |= other`.
            raise RuntimeError(
                f"{name}: masks of targets are packed, and cannot be written to. Write to their clone()."
            )
        return function(*map(_decode, args), **{name: _decode(value) for name, value in kwargs.items()})

    @classmethod
    def _join(cls, parts: Sequence["PackedMasks"]) -> Tensor:
        kinds = {(part.shape[1:], part.dtype, part.device) for part in parts}
        if len(kinds) > 1 or not (parts[0].device.type == "cpu" or all(isinstance(part, cls) for part in parts)):
            return torch.cat([_decode(part) for part in parts])
        parts = [part if isinstance(part, cls) else cls.pack(part.numpy(), part.shape[1:]) for part in parts]
        starts = accumulate((len(part.bits) for part in parts), initial=0)
        extents = torch.cat([part.extents for part in parts])
        extents[:, 0] = torch.cat([part.extents[:, 0] + start for part, start in zip(parts, starts)])
        return cls(torch.cat([part.bits for part in parts]), extents, parts[0].shape[1:])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return PackedMasks, (self.bits, self.extents, tuple(self.shape[1:]))

    def __getitem__(self, index: Any) -> Tensor:
        first, *rest = index if isinstance(index, tuple) and index else (index,)
        if not (first is None or first is Ellipsis or isinstance(first, bool | tuple) or np.ndim(first) > 1):
            extents = self.extents[first]
            if extents.ndim == 1:
                return PackedMasks(self.bits, extents[None], self.shape[1:]).decode()[(0, *rest)]
            if extents.ndim == 2 and all(isinstance(part, slice) for part in rest):
                chosen = PackedMasks(self.bits, extents, self.shape[1:])
                return chosen.decode()[(slice(None), *rest)] if rest else chosen
        return self.decode()[index]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def split(self, split_size: int, dim: int = 0) -> Any:
        if not isinstance(split_size, int) or dim:
            return self.decode().split(split_size, dim)
        return [self[start : start + split_size] for start in range(0, max(len(self), 1), split_size)]

    def pad(self, size: Sequence[int]) -> "PackedMasks":
        """Pad with False at the right and bottom."""
        return PackedMasks(self.bits, self.extents, size)

    def is_empty(self) -> Tensor:
        """Return which masks have no pixel, (N,) bool."""
        return self.extents[:, 2] == self.extents[:, 4]

    def pixels(self, index: Tensor, y: Tensor, x: Tensor) -> Tensor:
        """Return a pixel of each mask with an index, False beyond the masks; all are int64 and broadcast."""
        return (_bytes_at(self.bits, self.extents[index], y, x >> 3) >> (x & 7) & 1).bool()

    def decode(self, dtype: torch.dtype = torch.bool) -> Tensor:
        """Return the masks in a tensor that holds every pixel."""
        if self.device.type != "cpu":
            return self._decode_at_once(dtype)
        # Mask by mask, which would wait for a GPU: a tenth of the time on a CPU.
        masks, bits, width = torch.zeros(self.shape, dtype=dtype), self.bits.numpy(), self.shape[2]
        for mask, (start, left, top, right, bottom) in zip(masks, self.extents.tolist()):
            covered = bits[start : start + (bottom - top) * (right - left)].reshape(bottom - top, right - left)
            pixels = np.unpackbits(covered, axis=1, bitorder="little")[:, : width - 8 * left]
            mask[top:bottom, 8 * left : 8 * right] = torch.from_numpy(pixels)
        return masks

    def _decode_at_once(self, dtype: torch.dtype) -> Tensor:
        (height, width), device = self.shape[1:], self.device
        y, column = torch.arange(height, device=device)[:, None], torch.arange(-(-width // 8), device=device)
        values = _bytes_at(self.bits, self.extents[:, None, None], y, column)[..., None]
        return (values >> torch.arange(8, dtype=torch.uint8, device=device) & 1).flatten(2)[..., :width].to(dtype)


def _bytes_at(bits: Tensor, extents: Tensor, row: Tensor, column: Tensor) -> Tensor:
    start, left, top, right, bottom = extents.unbind(-1)
    is_covered = (row >= top) & (row < bottom) & (column >= left) & (column < right)
    return bits[(start + (row - top) * (right - left) + column - left).where(is_covered, 0)]


def _decode(value: Any) -> Any:
    if isinstance(value, PackedMasks):
        return value.decode()
    return type(value)(map(_decode, value)) if type(value) in (list, tuple) else value
