"""WMT 2014, English to German or French: the news task (https://www.statmt.org/wmt14/translation-task.html).

About 4.5 M pairs for German and 36 M for French. `root` contains train.en and train.de or train.fr, and newstest2013
with the same endings, plain or gzip (then with .gz in the config), raw text. The test set, newstest2014 in full, comes
from sacrebleu.
"""


def wmt14(tokens_per_gpu, root="data/wmt14", target="de", vocabulary_size=37000):
    return dict(
        root=root,
        tokens_per_gpu=tokens_per_gpu,
        num_workers=2,
        train=dict(
            type="ParallelText", source="{root}/train.en", target=f"{{root}}/train.{target}", max_length=256,
            # Section 5.1: a shared vocabulary of about 37000, or 32000 for French. Characters that occur less than 20
            # times in all lines are left out.
            vocabulary=dict(kind="bpe", size=vocabulary_size, shared=True, min_count=20),
        ),
        val=dict(
            type="ParallelText", source="{root}/newstest2013.en", target=f"{{root}}/newstest2013.{target}"
        ),
        test=dict(type="SacrebleuText", name="wmt14/full", languages=f"en-{target}"),
    )  # fmt: skip
