"""Weights: from a name to a model. Every file is read without running its code, and written atomically.

In the order in which `load_weights` goes through them:

    a name -> a file    locate.py: a path, a run's folder, a name of the model zoo (published.py), a repository
                        (hub.py), a URL (download.py: cached, continued and checked)
    a file -> tensors   reading.py: checkpoints; array_files.py: .npz and .pkl; sharded.py: a folder written by ranks;
                        transformers_folder.py: that library's files, with the tokens in marian.py and
                        tokenizer_files.py; contents.py: the tensors and classes in what was read
    official key names  vitkit.model_zoo.converters
    tensors -> a model  loading.py: `load_weights` and its `LoadReport`; hidden_settings.py: what weights do not show;
                        class_rows.py: class heads of other classes, by name; query_rows.py: more queries, or fewer

Beside these, pretrained.py loads the weights that a model's backbone names, teachers.py the frozen networks from which
models learn, lora.py merges what LoRA trained into the weights of its layers, and writing.py saves checkpoints.
"""

from vitkit.weights.contents import classes_of, state_dict_of
from vitkit.weights.loading import LoadReport, load_weights
from vitkit.weights.locate import find_weights
from vitkit.weights.pretrained import load_pretrained
from vitkit.weights.reading import read_checkpoint
from vitkit.weights.writing import link_checkpoint, save_checkpoint

__all__ = [
    "LoadReport",
    "classes_of",
    "find_weights",
    "link_checkpoint",
    "load_pretrained",
    "load_weights",
    "read_checkpoint",
    "save_checkpoint",
    "state_dict_of",
]
