"""Load trained models; their predictions can be drawn, saved and converted.

from vitkit.apps.inference import load

predictor = load("detr_r50")                                      # a name of the model zoo
predictor = load("configs/detr_r50.py", "runs/detr_r50/best.pth") # a config and its weights
predictor = load("runs/detr_r50")                                 # a run, or its checkpoint: runs/detr_r50/best.pth
predictor("street.jpg").save("drawn.png")                         # one image: a file, a URL, an array, …
for prediction in predictor("drive.mp4"):                         # many: a list, a folder, a pattern, a video, …
    print(prediction.names, prediction.scores)

load("runs/translation")("twenty-one")                            # a Translator
load("runs/language_model")("Ein Mann", decoding=dict(top_p=0.9)) # a TextContinuer of a decoder-only model
load("runs/masked_language_model")("Ein <mask> läuft.")           # a MaskFiller of an encoder-only one
"""

from vitkit.apps.inference.inputs import download, find_images, images_in, is_url, make_batches, open_frames, to_array
from vitkit.apps.inference.language import Continuation, Filling, MaskFiller, TextContinuer
from vitkit.apps.inference.load import Loaded, find_model, find_trained, is_config_only, load
from vitkit.apps.inference.prediction import Prediction
from vitkit.apps.inference.predictor import Predictor
from vitkit.apps.inference.tiling import Tiling
from vitkit.apps.inference.translator import Translation, Translator
from vitkit.apps.visualization.predictions import FIELDS

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
    "find_images",
    "find_model",
    "find_trained",
    "images_in",
    "is_config_only",
    "is_url",
    "load",
    "make_batches",
    "open_frames",
    "to_array",
]
