"""A dataset for tests of what reads datasets."""

from typing import Any

from vitkit.protocols.dataset import Dataset


class PlainDataset(Dataset):
    """A dataset with the given attributes and methods, and without samples."""

    def __init__(self, **attributes: Any):
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError
