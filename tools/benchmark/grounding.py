"""Compare Grounding DINO with transformers', with a prompt of as many tokens as COCO's 80 names and with one of three
words; weights, images, words and targets are random.

Both train the same layers with the same dropout, BERT frozen, without denoising, which transformers lacks. Their losses
are of the same layers, but transformers' of the encoder has no gradient: it does less.
"""

import torch
from torch import Tensor

from vitkit import build_model
from vitkit.configs import grounding_dino
from vitkit.registry import CRITERIA
from vitkit.structures import PromptTokens
from vitkit.tools.benchmark.models import (
    Case,
    Contestant,
    Family,
    RandomBatch,
    compare_family,
    freeze,
    import_transformers,
)
from vitkit.tools.benchmark.timing import Measurement, Options

CLS, SEP, DOT, WORDS = 101, 102, 1012, (2000, 30000)
"""BERT's numbers of the ends of a prompt, of its separator, and of words: the first, and one after the last."""
COCO_CLASSES, COCO_TOKENS = 80, 195
DROP_PATH = 0.2


def random_prompt(num_classes: int, batch_size: int, device: torch.device) -> PromptTokens:
    """Return the same prompt for each image: phrases of random words, as long on average as COCO's names."""
    num_words = num_classes if num_classes < COCO_CLASSES else COCO_TOKENS - 2 - num_classes
    lengths = torch.full((num_classes,), num_words // num_classes)
    lengths[: num_words % num_classes] += 1
    phrase_ids = torch.arange(num_classes).repeat_interleave(lengths + 1)
    is_dot = torch.cat((phrase_ids[1:] != phrase_ids[:-1], torch.tensor([True])))
    tokens = torch.randint(*WORDS, phrase_ids.shape).masked_fill(is_dot, DOT)
    ends = torch.tensor([-1])
    fields = (
        torch.cat((torch.tensor([CLS]), tokens, torch.tensor([SEP]))),
        torch.cat((ends, phrase_ids, ends)),
        torch.cat((ends, (~is_dot).long(), ends)) > 0,
    )
    return PromptTokens(*(field.expand(batch_size, -1).to(device) for field in fields))


def vitkit_grounding_dino(num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build vitkit's Grounding DINO Swin-T with its loss on the batch."""
    config = grounding_dino.config()
    model = build_model(config["model"] | dict(training_queries=[]))
    criterion = CRITERIA.build(config["criterion"])
    prompt = random_prompt(num_classes, len(batch.images), batch.images.device)
    padding_mask = torch.zeros_like(batch.images[:, 0], dtype=torch.bool)
    targets = [dict(labels=labels, boxes_cxcywh=boxes) for labels, boxes in zip(batch.labels, batch.boxes_cxcywh)]

    def predict() -> dict:
        return model(batch.images, padding_mask, prompt)

    def loss() -> Tensor:
        return sum(criterion(predict(), targets).values())

    return Contestant(model, loss, predict)


def vitkit_with_encoded_text(num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build the same, with the prompt encoded before the first image, as `vitkit.load(...).with_text` does."""
    contestant = vitkit_grounding_dino(num_classes, batch, case)
    model = contestant.model.eval()
    padding_mask = torch.zeros_like(batch.images[:, 0], dtype=torch.bool)
    prompt, kept = random_prompt(num_classes, len(batch.images), batch.images.device), {}

    def predict() -> dict:
        return model(batch.images, padding_mask, **model.encode_shared({"prompt": prompt}, kept))

    return contestant._replace(predict=predict)


def transformers_grounding_dino(num_classes: int, batch: RandomBatch, case: Case) -> Contestant:
    """Build transformers' Grounding DINO Swin-T with its loss on the batch."""
    transformers = import_transformers()
    swin = transformers.SwinConfig(
        depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24], out_indices=[2, 3, 4], drop_path_rate=DROP_PATH
    )
    bert = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = transformers.GroundingDinoConfig(
        backbone_config=swin, text_config=bert, dropout=0.0, auxiliary_loss=case.training
    )
    model = transformers.GroundingDinoForObjectDetection(config)
    freeze(model.model.text_backbone)
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0].endswith(("model.swin.layernorm", "model.layernorm")):  # a classifier's, never run
            parameter.requires_grad_(False)
    tokens = random_prompt(num_classes, len(batch.images), batch.images.device).tokens
    pixel_mask = torch.ones_like(batch.images[:, 0], dtype=torch.int64)
    inputs = dict(pixel_values=batch.images, pixel_mask=pixel_mask, input_ids=tokens)
    inputs["attention_mask"] = torch.ones_like(tokens)
    targets = [dict(class_labels=labels, boxes=boxes) for labels, boxes in zip(batch.labels, batch.boxes_cxcywh)]

    def loss() -> Tensor:
        return model(**inputs, labels=targets).loss

    return Contestant(model, loss, lambda: model(**inputs))


FAMILIES = {
    (f"{num_classes} phrases", case): Family(
        {
            "transformers Grounding DINO Swin-T": transformers_grounding_dino,
            "vitkit Grounding DINO Swin-T": vitkit_grounding_dino,
            **({} if case.training else {"vitkit, the prompt encoded before": vitkit_with_encoded_text}),
        },
        num_classes=num_classes,
        clip_grad_norm=0.1,
        cases=(case,),
    )
    for num_classes in (COCO_CLASSES, 3)
    for case in (Case(800, 1066), Case(800, 1066, training=True))
}


def measure(part: str, options: Options) -> list[Measurement]:
    """Measure both on each prompt and case."""
    return [
        row
        for (name, case), family in FAMILIES.items()
        for row in compare_family(family, case, options, what=f"{name}, {case}")
    ]
