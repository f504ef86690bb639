"""Grounding DINO and MM-Grounding-DINO equal an independent implementation, transformers', with the same weights."""

import json

import pytest
import torch
from helpers.grounding_models import (
    OUTSIDE,
    SEPARATORS,
    bert_tokenizer,
    build_grounding,
    grounding_config,
    library_grounding,
    prompt_of,
)

import vitkit
from vitkit.apps.conversion.transformers_writing import write_folder
from vitkit.apps.inference import find_model
from vitkit.engine.build import build_model
from vitkit.text.prompt_tokens import prompt_layout
from vitkit.weights import load_weights, save_checkpoint
from vitkit.weights.tokenizer_files import find_tokenizer

transformers = pytest.importorskip("transformers", reason="the comparison needs pip install -e '.[benchmark]'")

VARIANTS = {
    "original": dict(),
    "mm_shared": dict(mm=True),
    "mm": dict(mm=True, shared=False),
    "mm_5_levels": dict(mm=True, shared=False, levels=5),
}
PROMPTS = [
    [101, 2000, 3000, 1012, 4000, 1012, 5000, 5001, 5002, 1012, 102],
    [101, 2500, 1012, 102],
    [101, 2500, 2600, 1029, 7000, 1012, 102],
]
SIZES = {"rectangle": [(96, 128)], "padded": [(96, 128), (120, 80), (64, 100)]}


def both(variant):
    torch.manual_seed(0)
    theirs = library_grounding(transformers, **VARIANTS[variant])
    ours = build_grounding(**VARIANTS[variant]).eval()
    report = load_weights(ours, theirs.state_dict())
    assert report.converter == "transformers Grounding DINO"
    return ours, theirs


def batch_of(sizes):
    """Return images, their padding and prompts of different lengths."""
    generator = torch.Generator().manual_seed(1)
    height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
    padding = torch.ones(len(sizes), height, width, dtype=torch.bool)
    for mask, (h, w) in zip(padding, sizes):
        mask[:h, :w] = False
    images = torch.randn(len(sizes), 3, height, width, generator=generator) * ~padding[:, None]
    rows = PROMPTS[: len(sizes)]
    tokens = torch.tensor([[*row, *[0] * (max(map(len, rows)) - len(row))] for row in rows])
    return images, padding, tokens


@pytest.fixture
def same_clamp(monkeypatch):
    """Make the library clamp boxes at 1e-3 before their logits, as the original does; it has 1e-5."""
    logit = torch.special.logit
    monkeypatch.setattr(torch.special, "logit", lambda x, eps=None: logit(x, eps=1e-3))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_all_outputs_equal_those_of_transformers(variant, sizes, same_clamp):
    ours, theirs = both(variant)
    images, padding, tokens = batch_of(sizes)
    prompt = prompt_of(tokens, SEPARATORS, OUTSIDE)
    valid = tokens != 0
    expected = theirs(pixel_values=images, input_ids=tokens, attention_mask=valid.long(), pixel_mask=(~padding).long())
    outputs = ours(images, padding if padding.any() else None, prompt)
    length, words = tokens.shape[1], expected.encoder_last_hidden_state_text
    close = dict(atol=2e-4, rtol=1e-4)

    layers = [*outputs["aux_outputs"], outputs]
    references = [expected.init_reference_points, *expected.intermediate_reference_points.unbind(1)]
    for i, (layer, states) in enumerate(zip(layers, expected.intermediate_hidden_states.unbind(1), strict=True)):
        logits = theirs.class_embed[i](states, words, valid)[..., :length]
        torch.testing.assert_close(layer["pred_logits"], logits, **close)
        torch.testing.assert_close(layer["reference_points"], references[i], **close)
    torch.testing.assert_close(outputs["pred_logits"], expected.logits[..., :length], **close)
    torch.testing.assert_close(outputs["pred_boxes"], expected.pred_boxes, **close)
    assert (expected.logits[..., length:] == -torch.inf).all()

    scores = expected.enc_outputs_class
    best = scores.amax(-1).topk(20, dim=1).indices
    (selection,) = outputs["training_outputs"]
    torch.testing.assert_close(
        selection["pred_logits"],
        scores.gather(1, best[..., None].expand(-1, -1, scores.shape[-1]))[..., :length],
        **close,
    )
    boxes = expected.enc_outputs_coord_logits.sigmoid().gather(1, best[..., None].expand(-1, -1, 4))
    torch.testing.assert_close(selection["pred_boxes"], boxes, **close)
    # Random weights that say nothing would be equal as well.
    assert expected.pred_boxes.std() > 0.1 and expected.logits[..., :3].std() > 0.1


def test_mask_and_positions_equal_those_of_transformers_on_300_captions():
    from transformers.models.grounding_dino import modeling_grounding_dino as library

    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(300):
        length = int(torch.randint(1, 40, (1,), generator=generator))
        words = torch.randint(1996, 20000, (length,), generator=generator)
        is_end = torch.rand(length, generator=generator) < 0.3  # also dots at the beginning, and two in a row
        ends = SEPARATORS[torch.randint(2, (length,), generator=generator)]
        rows.append([101, *torch.where(is_end, ends, words).tolist(), 1012, 102])
    for start in range(0, 300, 20):
        some = rows[start : start + 20]
        tokens = torch.tensor([[*row, *[0] * (max(map(len, some)) - len(row))] for row in some])
        mask, positions = library.generate_masks_with_special_tokens_and_transfer_map(
            tokens, torch.tensor(library.SPECIAL_TOKENS)
        )
        layout = prompt_layout(prompt_of(tokens, SEPARATORS, OUTSIDE).phrase_ids)
        # Of [SEP] and padding the library says other things in another batch, and nothing reads them.
        inside = (tokens != 0) & (tokens != 102)
        assert torch.equal(~layout.masked[inside], mask[inside])
        assert torch.equal(layout.positions[inside], positions[inside])


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_folder_is_read_with_its_tokens_and_written(variant, tmp_path, same_clamp):
    pytest.importorskip("tokenizers")
    _, theirs = both(variant)
    folder, copy = tmp_path / "library", tmp_path / "copy"
    theirs.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(bert_tokenizer())
    predictor = vitkit.load(folder)
    assert predictor.with_text("cat . red dog .").classes == ["cat", "red dog"]
    image = torch.randint(256, (96, 128, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()
    prediction = predictor(image, text=["cat", "red dog"], threshold=0.0)
    assert set(prediction.names) == {"cat", "red dog"}

    config = find_model(folder).config
    write_folder(copy, predictor, config["model"])
    again, info = type(theirs).from_pretrained(copy, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    assert {key.rpartition(".")[0] for key in info["missing_keys"]} <= {
        "model.backbone.conv_encoder.model.swin.layernorm"  # of a classifier; the library builds it and never runs it
    }
    images, padding, tokens = batch_of(SIZES["padded"])
    inputs = dict(
        pixel_values=images, input_ids=tokens, attention_mask=(tokens != 0).long(), pixel_mask=(~padding).long()
    )
    expected, result = theirs(**inputs), again.eval()(**inputs)
    torch.testing.assert_close(result.logits, expected.logits, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(result.pred_boxes, expected.pred_boxes, atol=2e-4, rtol=1e-4)
    assert vitkit.load(copy).model.vocabulary == predictor.model.vocabulary


@pytest.mark.parametrize("mm", [False, True])
@torch.no_grad()
def test_a_converted_checkpoint_is_prepared_and_run_by_the_library(mm, tmp_path):
    """Its vocabulary is not BERT's, so the text encoder has another size than the default."""
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text(bert_tokenizer())
    vocabulary = find_tokenizer(tmp_path / "tokenizer.json")
    transforms = dict(type="EvalResize", short_side=96, max_size=160)
    config = dict(model=grounding_config(mm=mm), data=dict(val=dict(type="ShapesDetection", transforms=transforms)))
    torch.manual_seed(0)
    state = build_model(config["model"], vocabularies={"target": vocabulary}).state_dict()
    texts = {"config": json.dumps(config), "vocabularies": {"target": vocabulary.to_json()}}
    save_checkpoint(tmp_path / "a.pth", {"model": state, **texts})
    vitkit.convert(tmp_path / "a.pth", tmp_path / "copy", to="transformers")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "copy")
    theirs = transformers.AutoModelForZeroShotObjectDetection.from_pretrained(tmp_path / "copy").eval()
    image = torch.randint(256, (96, 128, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    inputs = processor(images=image.numpy(), text="cat. hot dog.", return_tensors="pt")
    ours = vitkit.load(tmp_path / "a.pth").model(image.permute(2, 0, 1)[None], text=["cat. hot dog."])
    assert inputs["pixel_values"].shape == (1, 3, 96, 128)
    torch.testing.assert_close(theirs(**inputs).pred_boxes, ours["pred_boxes"], atol=1e-3, rtol=1e-3)
