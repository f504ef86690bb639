"""Grounding DINO: prompts, predictions, training and key names; test_grounding_dino_peers.py compares outputs."""

from types import SimpleNamespace

import pytest
import torch
from helpers.grounding_models import (
    BERT_TOKENS,
    OUTSIDE,
    SEPARATORS,
    build_grounding,
    build_small,
    grounding_config,
    prompt_of,
)

import vitkit
from vitkit.apps.analysis.reports.api import attention_memory, step_memory
from vitkit.config import load_config
from vitkit.engine.build import build_model
from vitkit.engine.evaluate import evaluate
from vitkit.errors import ConfigError, DataError
from vitkit.model_zoo.converters import write_names
from vitkit.models.grounding_dino import with_phrase_features
from vitkit.nn.attention import AttentionRecorder
from vitkit.registry import CRITERIA
from vitkit.structures import Batch
from vitkit.text.prompt_tokens import phrase_tokens, prompt_layout
from vitkit.text.prompts import encode_phrases, split_phrases
from vitkit.text.vocabulary import Vocabulary
from vitkit.weights import load_weights

WORDS = ["a red star .", "a blue cat ."]
CRITERION = dict(
    type="GroundingCriterion", weights=dict(labels=1.0, l1=5.0, giou=2.0),
    matcher=dict(type="TokenMatcher", label_cost="prompt", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0),
)  # fmt: skip
DENOISING = [dict(type="TextDenoising", num_queries=10)]


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train("word", WORDS)


@pytest.fixture
def images():
    return torch.randn(2, 3, 96, 128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("grounding_dino_swin_tiny", 172.25),
        ("grounding_dino_swin_base", 232.3),
        ("mm_grounding_dino_swin_tiny", 172.9),
        ("mm_grounding_dino_swin_base", 233.0),
        ("mm_grounding_dino_swin_large", 343.1),
    ],
)
def test_sizes_are_the_published_ones(name, millions):
    spec = dict(load_config(name)["model"], training_queries=[])
    with torch.device("meta"):
        model = build_model(spec)
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert count == pytest.approx(millions, abs=0.05 if millions != 172.25 else 0.005)


def test_phrase_by_phrase_equals_the_tokens_of_the_sentence(vocabulary):
    phrases = ["a red star", "cat", "blue"]
    prompt = encode_phrases(vocabulary, phrases)
    text = vocabulary.encode("a red star . cat . blue .")
    tokens = torch.tensor([prompt.tokens])
    assert prompt.tokens == [2, *text, 3]
    _, phrase_ids, is_word = prompt_of(tokens, torch.tensor(vocabulary.encode(".")), torch.tensor([0, 2, 3]))
    assert phrase_ids[0].tolist() == prompt.phrase_ids == [-1, 0, 0, 0, 0, 1, 1, 2, 2, -1]
    assert is_word[0].tolist() == prompt.is_word


def test_layout_of_a_prompt_by_hand():
    # [CLS] dog . cat man . [SEP] [PAD]
    tokens = torch.tensor([[101, 5, 1012, 6, 7, 1012, 102, 0]])
    _, phrase_ids, is_word = prompt_of(tokens, SEPARATORS, OUTSIDE)
    layout = prompt_layout(phrase_ids)
    assert layout.positions.tolist() == [[0, 0, 1, 0, 1, 2, 0, 0]]
    visible = [sorted(row.nonzero()[:, 0].tolist()) for row in ~layout.masked[0]]
    assert visible == [[0], [1, 2], [1, 2], [3, 4, 5], [3, 4, 5], [3, 4, 5], [6], [7]]
    assert phrase_tokens(phrase_ids, is_word, torch.tensor([[1, 0]]))[0].nonzero().tolist() == [[0, 3], [0, 4], [1, 1]]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "has no phrase"),
        (" . . ", "has no phrase"),
        ([], "has no phrase"),
        (["cat", " "], r"has an empty phrase \(number 2\)"),
        (["St. Bernard"], "the phrase 'St. Bernard' has a '.', where the model takes it to end"),
        ("what? . cat .", "the phrase 'what\\?' has a '\\?'"),
        ("cat . Cat .", "the phrase 'Cat' is given twice"),
        ([1], "expected a text such as 'cat . dog .'"),
    ],
)
def test_prompts_that_are_none_are_refused(prompt, message):
    with pytest.raises(DataError, match=message):
        split_phrases(prompt)


def test_phrases_that_the_tokenizer_does_not_know_and_long_prompts_are_refused(vocabulary):
    with pytest.raises(DataError, match="knows no piece of the phrase 'zebra'"):
        encode_phrases(vocabulary, ["cat", "zebra"])
    with pytest.raises(DataError, match="3 phrases have 9 tokens; the model takes 8"):
        encode_phrases(vocabulary, ["red", "cat", "a star"], max_tokens=8)
    with pytest.raises(ConfigError, match=r"the vocabulary has no '\.'"):
        encode_phrases(Vocabulary.train("word", ["red"]), ["red"])


@torch.no_grad()
def test_a_prompt_is_read_alike_alone_and_beside_a_longer_one(vocabulary, images):
    model = build_small(vocabulary).eval()
    both = model(images, text=["red star . a cat .", ["cat"]])
    alone = model(images[1:], text=["cat ."])
    torch.testing.assert_close(both["pred_logits"][1:, :, :4], alone["pred_logits"], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(both["pred_boxes"][1:], alone["pred_boxes"], atol=1e-4, rtol=1e-4)
    assert (both["pred_logits"][1, :, 4:] == -torch.inf).all() and both["pred_logits"][0].isfinite().all()


@torch.no_grad()
def test_labels_are_phrases_and_scores_the_mean_of_their_tokens(vocabulary, images):
    model = build_small(vocabulary, num_detections=40).eval()
    outputs = model(images, text=["red star . a cat .", "cat ."])
    first, second = model.postprocess(outputs, [(96, 128), (48, 64)])
    assert set(first["labels"].tolist()) == {0, 1} and set(second["labels"].tolist()) == {0}
    assert len(first["scores"]) == 40 and len(second["scores"]) == 20  # each query once
    p = outputs["pred_logits"].sigmoid()  # [CLS] red star . a cat . [SEP]
    pairs = torch.stack((p[0, :, 1:3].mean(-1), p[0, :, 4:6].mean(-1)), dim=-1)
    torch.testing.assert_close(first["scores"], pairs.flatten().sort(descending=True).values)
    assert second["boxes_xyxy"].amax() <= 64 * 1.5
    reading = model.read_text("red star . a cat .")
    assert reading.phrases == ["red star", "a cat"] and reading.phrase_of == [-1, 0, 0, -1, 1, 1, -1, -1]
    assert len(reading.words) == p.shape[-1]


@torch.no_grad()
def test_both_softmaxes_of_the_fusion_and_attention_to_words_are_recorded(vocabulary, images):
    model = build_small(vocabulary).eval()
    with AttentionRecorder(model) as maps:
        model(images, text=["cat .", "red star ."])
    to_text, to_image = maps["head.encoder.fusion_layers.1.attn"]
    assert to_text.shape[1:] == (2, to_image.shape[-1], 5) and to_image.shape[1:3] == (2, 5)
    for weights in (to_text, to_image):
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert not to_text[0, ..., 4].any()  # padding of the first prompt
    (of_queries,) = maps["head.decoder.layers.2.text_attn"]
    assert of_queries.shape == (2, 4, 20, 5)
    assert model.attention_layers().prompt[2] is model.head.decoder.layers[2].text_attn


def targets_of(*labels):
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "labels": torch.tensor(of_image, dtype=torch.int64),
            "boxes_cxcywh": 0.3 + 0.2 * torch.rand(len(of_image), 4, generator=generator),
        }
        for of_image in labels
    ]


@pytest.mark.parametrize("labels", [([0, 1, 1], [0]), ([1], []), ([], [])], ids=["both", "one_empty", "none"])
def test_every_parameter_is_trained_with_constant_loss_names(vocabulary, images, labels):
    model = build_small(vocabulary, training_queries=DENOISING)
    criterion, targets = CRITERIA.build(CRITERION), targets_of(*labels)
    assert model.uses_targets
    outputs = model(images, prompt=model.tokenize(["red star . a cat .", "blue star ."]), targets=targets)
    losses = criterion(outputs, targets)
    layers = ["", "aux0_", "aux1_", "enc_", "dn_", "dn_aux0_", "dn_aux1_"]
    assert set(losses) == {layer + term for layer in layers for term in ("labels", "l1", "giou")}
    sum(losses.values()).backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert not without
    if labels[0]:
        assert model.training_queries["denoising"].label_embed.weight.grad.any()
        assert model.head.proposals.bbox_embed.layers[0].weight.grad is not None
        assert model.text_encoder.embedding.weight.grad.any()


def test_denoising_reads_the_phrase_and_not_its_place(vocabulary, images):
    model = build_small(vocabulary, training_queries=[dict(DENOISING[0], label_noise=0.0, box_noise=0.0)])
    torch.manual_seed(0)
    contents = []
    for prompt, label in ((["cat", "red star"], 0), (["red star", "blue", "cat"], 2), (["red star", "cat"], 0)):
        targets = targets_of([label])
        text = model.encode_prompts(model.tokenize([prompt]))
        (queries,) = model.training_queries["denoising"](model.head, with_phrase_features(targets, text), None)
        contents.append(queries["queries"].content[0, 0])
    torch.testing.assert_close(contents[0], contents[1])
    assert not torch.allclose(contents[0], contents[2], atol=1e-3)


def test_noised_labels_are_phrases_of_the_prompt(vocabulary):
    model = build_small(vocabulary, training_queries=[dict(DENOISING[0], num_queries=200, label_noise=2.0)])
    kind = model.training_queries["denoising"]
    features = [torch.eye(64)[:3], torch.eye(64)[3:5]]
    targets = [target | {"phrase_features": each} for target, each in zip(targets_of([0], [1]), features)]
    torch.nn.init.eye_(kind.label_embed.weight)
    torch.manual_seed(0)
    (queries,) = kind(model.head, targets, None)
    drawn = [set(rows.argmax(-1).tolist()) for rows in queries["queries"].content]
    assert drawn == [{0, 1, 2}, {3, 4}]


def test_denoising_needs_the_text():
    model = build_grounding(training_queries=DENOISING)
    with pytest.raises(
        DataError, match="the targets have no phrase_features. Use it with a model of type GroundingDINO"
    ):
        model.training_queries["denoising"](model.head, targets_of([0]), None)


def test_a_frozen_text_encoder_stays_as_it_is():
    model = build_grounding(text_encoder=dict(grounding_config()["text_encoder"], frozen=True, dropout=0.1))
    assert not any(p.requires_grad for p in model.text_encoder.parameters())
    assert model.train().text_projection.training and not model.text_encoder.encoder.layers[0].training


def test_errors_without_prompt_or_vocabulary(images):
    model = build_grounding()
    with pytest.raises(ConfigError, match="looks for what a text names, and has none: give text or tokens"):
        model(images)
    with pytest.raises(ConfigError, match="no vocabulary to read a text with. Set model.tokenizer to bert-base"):
        model(images, text=["cat ."] * 2)


@pytest.mark.parametrize("levels", [4, 5])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("mm", [True, False])
def test_official_names_both_ways(mm, shared, levels):
    options = dict(mm=mm, shared=shared, levels=levels)
    denoising = [dict(type="BoxDenoising", num_queries=10)] if mm else []
    ours = build_grounding(**options, training_queries=denoising)
    written = write_names(ours, "official")
    assert written.format == ("open-mmlab/mmdetection, Grounding DINO" if mm else "IDEA-Research/GroundingDINO")
    again = build_grounding(**options, training_queries=denoising)
    report = load_weights(again, {"model": {f"module.{key}": value for key, value in written.state.items()}})
    assert report.converter == written.format
    expected = ours.state_dict()
    for key, value in again.state_dict().items():
        if key == "training_queries.denoising.label_embed.weight":
            value, other = value[:-1], expected[key][:-1]  # the last row is never used, and mmdetection's has none
        else:
            other = expected[key]
        torch.testing.assert_close(value, other, msg=key)


def test_llmdets_language_model_is_left_out():
    state = write_names(build_grounding(mm=True, shared=False), "official").state
    more = ("lmm.model.layers.0.weight", "connector.0.bias", "region_connector.0.weight", "image_seperate.weight")
    state |= {name: torch.zeros(2) for name in (*more, "ref_point_head.layers.0.weight")}
    model = build_grounding(mm=True, shared=False)
    load_weights(model, {"state_dict": state})
    for name, value in write_names(model, "official").state.items():
        assert torch.equal(value, state[name]), name


def test_names_are_those_of_the_official_files():
    """Some names of each part, as in the official code (GroundingDINO 856dde2, mmdet 3.3.0)."""
    names = write_names(build_grounding(), "official").state
    for name in (
        "backbone.0.layers.0.blocks.1.attn.relative_position_bias_table", "backbone.0.norm1.weight",
        "input_proj.3.0.weight", "bert.encoder.layer.0.attention.self.query.weight", "feat_map.weight",
        "bert.embeddings.token_type_embeddings.weight", "transformer.tgt_embed.weight", "transformer.level_embed",
        "transformer.encoder.fusion_layers.0.attn.values_l_proj.weight", "transformer.enc_output.weight",
        "transformer.encoder.fusion_layers.0.gamma_v", "transformer.encoder.text_layers.0.self_attn.in_proj_weight",
        "transformer.encoder.text_layers.0.linear1.weight", "transformer.encoder.layers.0.self_attn.value_proj.weight",
        "transformer.encoder.layers.0.linear1.weight", "transformer.decoder.layers.0.ca_text.in_proj_weight",
        "transformer.decoder.layers.0.catext_norm.weight", "transformer.decoder.layers.0.norm3.weight",
        "transformer.decoder.ref_point_head.layers.0.weight", "transformer.decoder.bbox_embed.2.layers.2.weight",
        "bbox_embed.0.layers.0.weight", "transformer.enc_out_bbox_embed.layers.0.weight",
    ):  # fmt: skip
        assert name in names, name
    names = write_names(build_grounding(mm=True, shared=False), "official").state
    for name in (
        "backbone.stages.0.blocks.1.attn.w_msa.qkv.weight", "backbone.stages.0.blocks.0.ffn.layers.0.0.weight",
        "backbone.stages.0.downsample.reduction.weight", "backbone.patch_embed.projection.weight",
        "neck.convs.2.conv.weight", "neck.extra_convs.0.gn.bias", "text_feat_map.bias", "query_embedding.weight",
        "language_model.language_backbone.body.model.encoder.layer.1.output.dense.weight", "memory_trans_norm.weight",
        "encoder.layers.0.ffn.layers.1.bias", "encoder.text_layers.1.self_attn.attn.in_proj_weight",
        "encoder.fusion_layers.1.gamma_l", "decoder.layers.2.norms.3.weight", "decoder.ref_point_head.layers.1.weight",
        "decoder.layers.0.cross_attn_text.attn.out_proj.weight", "bbox_head.cls_branches.3.bias",
        "bbox_head.reg_branches.3.4.weight", "bbox_head.reg_branches.0.0.bias", "level_embed",
    ):  # fmt: skip
        assert name in names, name


def test_mmdetection_orders_the_pixels_of_a_patch_merging_otherwise():
    torch.manual_seed(0)
    ours = build_grounding(mm=True, shared=False)
    written = write_names(ours, "official").state
    norm = ours.backbone.layers[0].downsample.norm.weight.data.copy_(torch.arange(64.0))
    written = write_names(ours, "official").state["backbone.stages.0.downsample.norm.weight"]
    # mmdetection's converter of the official weights (`swin_converter`), for the norm.
    expected = norm.reshape(4, 16)[[0, 2, 1, 3], :].transpose(0, 1).reshape(64)
    assert torch.equal(written, expected)


def test_tokens_of_the_tests_have_berts_numbers():
    assert BERT_TOKENS["."] in SEPARATORS and BERT_TOKENS["[SEP]"] in OUTSIDE


def test_costs_are_counted_with_a_prompt_of_cocos_length():
    model = dict(model=grounding_config())
    costs = vitkit.analyze(model, size=(96, 128))
    prompt = build_grounding().example_prompts(2)["prompt"]
    assert prompt.shape == (2, 195) and int(prompt.phrase_ids.max()) == 79
    assert int(prompt.is_word.sum()) == 2 * 113
    # Two layers of BERT: four projections, two of the feed-forward network, scores and sums, norms; and its own norm.
    layer = 195 * (4 * 32 * 32 + 2 * 32 * 64) + 2 * 195 * 195 * 32 + 2 * 195 * 32 * 5
    assert costs.parts["text_encoder"]["macs"] == 2 * layer + 195 * 32 * 5
    matrices = attention_memory(model, size=(96, 128)).layers
    assert matrices["head.decoder.layers.0.text_attn"]["shapes"] == [(1, 4, 20, 195)]
    with pytest.raises(ConfigError, match="--training: not for models that take a prompt"):
        step_memory(model, gpus=1, size=(96, 128))
    assert len(build_grounding(max_tokens=20).example_prompts(1)["prompt"].tokens[0]) <= 20


def test_an_evaluation_encodes_the_same_prompt_once(vocabulary, images, monkeypatch):
    model = build_small(vocabulary)
    prompts = [model.tokenize(texts) for texts in (["red . cat ."] * 2, ["red . cat ."] * 2, ["star ."] * 2)]
    batches = [Batch({"images": images, "prompt": prompt}, [{"original_size": (96, 128)}] * 2) for prompt in prompts]
    with torch.no_grad():
        expected = [model.eval()(**batch.inputs) for batch in batches]
    encoded, encode = [], model.text_encoder.forward
    monkeypatch.setattr(model.text_encoder, "forward", lambda *args: encoded.append(args) or encode(*args))
    found = []
    monkeypatch.setattr(model, "postprocess", lambda outputs, sizes: found.append(outputs) or [])
    evaluator = SimpleNamespace(takes_outputs=False, update=lambda *_: None)
    evaluate(model, batches, evaluator, device=torch.device("cpu"), compute=False)
    assert len(encoded) == 2
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours["pred_logits"], theirs["pred_logits"], rtol=0, atol=0)
        assert ours["phrase_ids"].equal(theirs["phrase_ids"])
