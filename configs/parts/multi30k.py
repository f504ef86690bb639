"""Multi30k, task 1: English to German descriptions of images (Elliott et al. 2016, https://arxiv.org/abs/1605.00459).

`root` contains train.en, train.de, val.en and val.de: 29,000 and 1,014 lines of raw text.
"""


def multi30k(tokens_per_gpu=4096, vocabulary_size=6000, root="data/multi30k"):
    return dict(
        root=root,
        tokens_per_gpu=tokens_per_gpu,
        num_workers=0,  # batches are slices of arrays in memory
        train=dict(
            type="ParallelText", source="{root}/train.en", target="{root}/train.de", max_length=100,
            vocabulary=dict(kind="bpe", size=vocabulary_size, shared=True),
        ),
        val=dict(type="ParallelText", source="{root}/val.en", target="{root}/val.de", max_length=100),
    )  # fmt: skip


def multi30k_text(objective, language="de", tokens_per_gpu=4096, vocabulary_size=4000, root="data/multi30k"):
    """One language of Multi30k, for language models."""
    text = dict(type="MonolingualText", objective=objective, max_length=100)
    return dict(
        root=root,
        tokens_per_gpu=tokens_per_gpu,
        num_workers=0,
        train=dict(**text, file=f"{{root}}/train.{language}", vocabulary=dict(kind="bpe", size=vocabulary_size)),
        val=dict(**text, file=f"{{root}}/val.{language}"),
    )
