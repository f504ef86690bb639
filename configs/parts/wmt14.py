"""WMT 2014, English to German: about 4.5 M pairs of the news task (https://www.statmt.org/wmt14/translation-task.html).

`root` contains train.en and train.de, newstest2013.en and .de, plain or gzip (then with .gz in the config), raw text.
"""


def wmt14(tokens_per_gpu, root="data/wmt14"):
    return dict(
        root=root,
        tokens_per_gpu=tokens_per_gpu,
        num_workers=2,
        train=dict(
            type="ParallelText", source="{root}/train.en", target="{root}/train.de", max_length=256,
            # Section 5.1: a shared vocabulary of about 37000. Characters that occur less than 20 times in the 9 M lines
            # are left out.
            vocabulary=dict(kind="bpe", size=37000, shared=True, min_count=20),
        ),
        val=dict(type="ParallelText", source="{root}/newstest2013.en", target="{root}/newstest2013.de"),
    )  # fmt: skip
