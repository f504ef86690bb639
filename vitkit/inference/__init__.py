"""Load trained models; their predictions can be drawn, saved and converted.

from vitkit.inference import load

predictor = load("detr_r50")                                      # a name of the model zoo
predictor = load("configs/detr_r50.py", "runs/detr_r50/best.pth") # a config and its weights
predictor = load("runs/detr_r50")                                 # a run, or its checkpoint: runs/detr_r50/best.pth
predictor("street.jpg").save("drawn.png")                         # one picture: a file, an address, an array, …
for prediction in predictor("drive.mp4"):                         # many: a list, a folder, a pattern, a video, …
    print(prediction.names, prediction.scores)

load("runs/translation")("twenty-one")                            # a Translator
load("runs/language_model")("Ein Mann", decoding=dict(top_p=0.9)) # a TextContinuer of a decoder-only model
load("runs/masked_language_model")("Ein <mask> läuft.")           # a MaskFiller of an encoder-only one
"""

from vitkit.inference.inputs import (
    download,
    find_pictures,
    in_batches,
    is_address,
    open_capture,
    pictures_in,
    read_frames,
    to_array,
)
from vitkit.inference.language import Continuation, Filling, MaskFiller, TextContinuer
from vitkit.inference.load import (
    Loaded,
    find_model,
    find_trained,
    find_weights,
    load,
    names_config_alone,
    trained_classes,
)
from vitkit.inference.prediction import Prediction
from vitkit.inference.predictor import Predictor
from vitkit.inference.tiling import Tiling
from vitkit.inference.translator import Translation, Translator
from vitkit.visualization.predictions import FIELDS

__all__ = [
    "FIELDS",
    "Continuation",
    "Filling",
    "Loaded",
    "MaskFiller",
    "Prediction",
    "Predictor",
    "TextContinuer",
    "Tiling",
    "Translation",
    "Translator",
    "download",
    "find_model",
    "find_pictures",
    "find_trained",
    "find_weights",
    "in_batches",
    "is_address",
    "load",
    "names_config_alone",
    "open_capture",
    "pictures_in",
    "read_frames",
    "to_array",
    "trained_classes",
]
