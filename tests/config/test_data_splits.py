"""Every split of the data is checked, also the one that training does not read."""

import pytest

from vitkit.config import load_config
from vitkit.errors import ConfigError


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_typos_in_the_dataset_of_a_split_are_found(split):
    wrong_type = f"data.{split}=dict(type='ShapesDetectio', num_images=3)"
    with pytest.raises(ConfigError, match=rf"data\.{split}: unknown dataset 'ShapesDetectio'. Did you mean 'ShapesDet"):
        load_config("quickstart/detr", [wrong_type], check=True)
    wrong_argument = f"data.{split}=dict(type='ShapesDetection', num_images=3, imag_size=64)"
    with pytest.raises(ConfigError, match=rf"data\.{split}\.imag_size: ShapesDetection has no argument 'imag_size'"):
        load_config("quickstart/detr", [wrong_argument], check=True)
