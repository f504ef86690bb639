import copy
import logging

import pytest
import torch
from helpers.weights import assert_same_weights

from vitkit import load_weights
from vitkit.data.datasets.image_features import write_features
from vitkit.data.loading.settings import DataSettings
from vitkit.data.synthetic.shapes import ShapesCaptions
from vitkit.errors import CheckpointError, ConfigError, DataError
from vitkit.losses.captioning import CaptionLoss
from vitkit.losses.sequence import SequenceLoss
from vitkit.nn.attention import AttentionRecorder
from vitkit.registry import DATASETS, MODELS
from vitkit.seq2seq.captioner import FeatureMap
from vitkit.seq2seq.decoding import DecodingSettings, decode
from vitkit.structures import BOS, UNK
from vitkit.weights import load_pretrained

BACKBONE = dict(type="resnet18", pretrained=False, out_features=["res3"])
SIZE = 30
SAT = dict(type="ShowAttendTell", d_embedding=8, d_model=12, d_attention=10, dropout=0.0)
TRANSFORMER = dict(
    type="TransformerCaptioner",
    d_model=16,
    num_heads=2,
    d_ffn=32,
    num_encoder_layers=1,
    num_decoder_layers=2,
    dropout=0.0,
)
MODELS_OF_KIND = {
    "soft": SAT,
    "hard": SAT | dict(attention="hard"),
    "hard_expected": SAT | dict(attention="hard", hard_inference="expected"),
    "transformer": TRANSFORMER,
}


@pytest.fixture(params=MODELS_OF_KIND)
def model(request):
    return build(request.param)


def build(kind, **arguments):
    torch.manual_seed(0)
    return MODELS.build(MODELS_OF_KIND[kind] | dict(backbone=BACKBONE, target_size=SIZE) | arguments).eval()


def images(batch=2, height=32, width=40):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (batch, 3, height, width), dtype=torch.uint8, generator=generator)


def targets_in(batch=2, length=5):
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(4, SIZE, (batch, length), generator=generator)
    tokens[:, 0] = BOS
    return tokens


def model_map(features):
    """Return the features as a backbone's map, without padding."""
    return FeatureMap(features, None)


def criterion_of(kind):
    return SequenceLoss(label_smoothing=0.1) if kind == "transformer" else CaptionLoss()


def test_outputs_and_attention_have_the_promised_shapes(model):
    outputs = model(targets_in(), images())
    assert outputs["logits"].shape == (2, 5, SIZE)
    if "attention" in outputs:
        assert outputs["attention"].shape == (2, 5, 4 * 5)
        assert torch.allclose(outputs["attention"].sum(-1), torch.ones(2, 5))


def test_stepwise_decoding_equals_the_full_caption(model):
    photos, target_in = images(), targets_in()
    whole, state = model(target_in, photos), model.start(images=photos, padding_mask=None)
    for place in range(target_in.shape[1]):
        logits, state, attention = model.step(target_in[:, place], state, with_attention=True)
        known = [token for token in range(SIZE) if token != UNK]
        assert torch.allclose(logits[:, known], whole["logits"][:, place, known], atol=1e-5)
        assert logits[:, UNK].eq(float("-inf")).all()
        assert torch.allclose(attention.sum(-1), torch.ones(2), atol=1e-5)


@torch.no_grad()
def test_selected_rows_continue_unchanged(model):
    photos, target_in = images(3), targets_in(3)
    state = model.start(images=photos)
    _, state, _ = model.step(target_in[:, 0], state)
    rows = torch.tensor([2, 0])
    chosen = model.start(images=photos[rows])
    _, chosen, _ = model.step(target_in[rows, 0], chosen)
    expected, _, _ = model.step(target_in[rows, 1], chosen)
    found, _, _ = model.step(target_in[rows, 1], state.select(rows))
    assert torch.allclose(found, expected, atol=1e-5)


def test_padding_changes_only_the_border(model):
    """Convolutions see padding near the border, so the test sets the map; attention must be zero on padding."""
    torch.manual_seed(3)
    features = torch.randn(1, model.feature_channels, 4, 6)
    mask = torch.zeros(1, 4, 6, dtype=torch.bool)
    mask[:, :, 4:] = True
    grown, alone = with_map(model, features, mask), with_map(model, features[..., :4], mask[..., :4])
    assert torch.allclose(grown["logits"], alone["logits"], atol=1e-5)
    if "attention" in grown:
        assert (grown["attention"].unflatten(-1, (4, 6))[..., 4:] == 0).all()


def with_map(model, features, mask):
    """Return the model's outputs as if its backbone returned this map."""
    model = copy.deepcopy(model)
    model.backbone = torch.nn.Identity()
    model.backbone.forward = lambda images: {model.feature: features}
    return model(targets_in(1), torch.zeros(1, 3, *mask.shape[1:]), mask)


@pytest.mark.parametrize("kind", MODELS_OF_KIND)
def test_every_parameter_trains_except_a_frozen_backbone(kind):
    targets = [{"tokens": torch.tensor([5, 6, 7, 8, 3])}, {"tokens": torch.tensor([5, 3])}]
    for freeze in (True, False):
        model = build(kind, freeze_backbone=freeze).train()
        before = copy.deepcopy(model.backbone.state_dict())
        losses = criterion_of(kind)(model(targets_in(), images()), targets)
        sum(losses.values()).backward()
        without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
        assert without == ({n for n, _ in model.named_parameters() if n.startswith("backbone.")} if freeze else set())
        moved = any(not torch.equal(before[name], value) for name, value in model.backbone.state_dict().items())
        assert moved is not freeze


def test_hard_attention_samples_locations_for_some_images_in_training():
    model = build("hard", expected_probability=0.5).train()
    torch.manual_seed(0)
    outputs = model(targets_in(64), images(64))
    drawn = outputs["sampled_log_weights"]
    rows = (drawn != 0).any(dim=1)
    assert 20 < rows.sum() < 44
    # Each drawn weight is one of the step's weights.
    nearest = (outputs["attention"].log() - drawn[..., None]).abs().amin(-1)
    assert nearest[rows].max() < 1e-5
    model.eval()
    assert (model(targets_in(), images())["sampled_log_weights"] == 0).all()


def test_hard_attention_selects_one_location_in_evaluation():
    model = build("hard", gated=False)
    annotations = torch.randn(2, model.feature_channels, 2, 3)
    state = model.start_from(model_map(annotations))
    _, context, weights, _ = model._advance(model.embedding(torch.tensor([BOS, BOS])), state)
    places = annotations.flatten(2)
    for row in range(2):
        assert torch.equal(context[row], places[row, :, weights[row].argmax()])


def test_hard_attention_weights_show_the_selected_location():
    inputs = {"images": images()}
    settings = DecodingSettings(max_length=3, min_length=2)
    shown = {kind: decode(build(kind), inputs, settings, return_attention=True) for kind in ("hard", "hard_expected")}
    for read, expected in zip(shown["hard"], shown["hard_expected"]):
        # The first word's state does not depend on earlier attention.
        assert (read[0].attention > 0).sum(-1).tolist() == [1] * len(read[0].tokens)
        assert (expected[0].attention > 0).all()
        assert read[0].attention[0].argmax() == expected[0].attention[0].argmax()


def test_reward_gradient_raises_the_probability_of_sampled_locations():
    """A caption that is more probable than usual makes the sampled locations more probable."""
    model = build("hard", expected_probability=0.0).train()
    targets = [{"tokens": torch.tensor([5, 6, 7, 8, 3])}]
    torch.manual_seed(4)
    outputs = model(targets_in(1), images(1))
    outputs["reward_baseline"] = torch.tensor([-1000.0, 10.0])
    losses = CaptionLoss(reinforce=1.0, entropy=0.0)(outputs, targets)
    (gradient,) = torch.autograd.grad(losses["reinforce"], outputs["sampled_log_weights"])
    assert (gradient < 0).all()


def test_mean_reward_gradient_equals_that_of_the_expected_log_probability():
    """The expectation can be summed over all locations here: a caption of one word, three locations."""
    model = build("hard", expected_probability=0.0).train()
    annotations = 2 * torch.randn(1, model.feature_channels, 1, 3)
    begin, word, copies = torch.tensor([BOS]), 5, 20000

    state = model.start_from(model_map(annotations))
    log_probs = []
    for place in range(3):
        looked_at = torch.eye(3)[place][None]
        model._locations = lambda weights, state, looked_at=looked_at: (looked_at, weights.new_zeros(1))
        hidden, context, weights, _ = model._advance(model.embedding(begin), copy.copy(state))
        logits = model._predict(model.embedding(begin), hidden, context)
        log_probs.append(logits.log_softmax(-1)[0, word].detach())
    del model._locations
    expectation = (weights[0] * torch.stack(log_probs)).sum()
    exact = torch.autograd.grad(-expectation, list(model.score.parameters()))

    torch.manual_seed(5)
    model.look = lambda *args, **kwargs: model_map(annotations.expand(copies, -1, -1, -1))
    outputs = model(begin.expand(copies, 1))
    outputs["reward_baseline"] = torch.tensor([expectation.item(), 10.0])
    criterion = CaptionLoss(doubly_stochastic=0.0, reinforce=1.0, entropy=0.0)
    losses = criterion(outputs, [{"tokens": torch.tensor([word])}] * copies)
    sampled = torch.autograd.grad(sum(losses.values()), list(model.score.parameters()))
    exact, sampled = (torch.cat([part.flatten() for part in parts]) for parts in (exact, sampled))
    assert (sampled - exact).norm() < 0.1 * exact.norm()


def test_recorder_collects_the_attention():
    model = build("soft")
    with AttentionRecorder(model) as maps:
        outputs = model(targets_in(), images())
    assert torch.equal(torch.cat(maps[""], dim=2)[:, 0], outputs["attention"])


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_captions_do_not_depend_on_the_batch(model, method):
    photos = images(4)
    settings = DecodingSettings(method=method, beams=3, max_length=8)
    together = decode(model, {"images": photos}, settings, return_attention=True)
    for image, (hypothesis,) in zip(photos, together):
        ((alone,),) = decode(model, {"images": image[None]}, settings, return_attention=True)
        assert alone.tokens == hypothesis.tokens
        assert alone.score == pytest.approx(hypothesis.score, abs=1e-4)
        assert hypothesis.attention.shape == (len(hypothesis.tokens), 20)
        assert UNK not in hypothesis.tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_another_precision_work(model, dtype):
    model.to(dtype)
    for method in ("greedy", "beam"):
        decoded = decode(model, {"images": torch.rand(2, 3, 32, 40, dtype=dtype)}, DecodingSettings(method=method))
        assert all(torch.tensor(hypotheses[0].score).isfinite() for hypotheses in decoded)


def test_generate_returns_text():
    data = ShapesCaptions(3)
    model = build("transformer", target_size=None, target_vocabulary=data.target_vocabulary)
    (batch,) = DataSettings(val_images_per_gpu=3, num_workers=0).val_loader(data)
    for written in model.generate(batch.inputs):
        assert written["text"] == data.target_vocabulary.decode(written["tokens"])


@pytest.mark.parametrize("kind", ["soft", "transformer"])
def test_cached_features_give_exactly_the_outputs_of_the_images(kind, tmp_path):
    world, path = dict(num_images=4, image_size=64), tmp_path / "maps.npy"
    data = DATASETS.build("ShapesCaptions", **world)
    model = build(kind, freeze_backbone=True, target_size=len(data.target_vocabulary))
    loader = DataSettings(val_images_per_gpu=4, num_workers=0).val_loader(data)
    write_features(path, model.feature_maps(loader, "cpu"), data, weights_key=model.weights_key())
    (on_the_fly,) = loader
    (cached,) = DataSettings(val_images_per_gpu=4, num_workers=0).val_loader(
        DATASETS.build("ShapesCaptions", **world, features=str(path))
    )
    assert torch.equal(model(**on_the_fly.inputs)["logits"], model(**cached.inputs)["logits"])
    assert model.generate(on_the_fly.inputs) == model.generate(cached.inputs)


def test_fused_model_reads_features_that_were_stored_before():
    model = build("soft", freeze_backbone=True).eval()
    key = torch.tensor(model.weights_key())
    model.load_state_dict(model.state_dict())  # as in a later evaluation: the fingerprint is not computed yet
    fused, features = model.fused_copy(), torch.zeros(2, 128, 4, 4)
    fused(targets_in(), features=features, features_key=key)
    with pytest.raises(DataError, match="from a backbone with other weights"):
        fused(targets_in(), features=features, features_key=key + 1)


def test_features_of_other_weights_or_for_a_trained_backbone_are_refused():
    features = torch.zeros(2, 128, 4, 4)
    model = build("soft", freeze_backbone=True)
    key = torch.tensor(model.weights_key())
    model(targets_in(), features=features, features_key=key)
    other = copy.deepcopy(model.state_dict())
    other["backbone.conv1.weight"] += 1
    model.load_state_dict(other)
    with pytest.raises(DataError, match=r"from a backbone with other weights.*data\.cache_features"):
        model(targets_in(), features=features, features_key=key)
    darker = build("soft", freeze_backbone=True)
    darker.load_state_dict(model.state_dict())
    assert darker.weights_key() == model.weights_key()
    darker = build("soft", freeze_backbone=True)
    darker.load_state_dict(model.state_dict())
    darker.backbone.pixel_mean = (0.4, 0.4, 0.4)
    assert darker.weights_key() != model.weights_key()
    trained = build("soft", freeze_backbone=False)
    with pytest.raises(DataError, match=r"need a frozen backbone.*the model's freeze_backbone=True"):
        trained(targets_in(), features=features, features_key=key)


def test_frozen_backbone_without_weights_causes_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "vitkit"):
        load_pretrained(build("soft", freeze_backbone=False))
        assert not caplog.text
        load_pretrained(build("soft", freeze_backbone=True))
    assert "random and frozen" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(attention="firm"), r"attention='firm': expected 'soft' or 'hard'"),
        (dict(hard_inference="drawn"), r"hard_inference='drawn'"),
        (dict(expected_probability=1.5), r"expected_probability=1.5: expected 0 to 1"),
        (dict(target_size=None), r"target_size: not set"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build("soft", **arguments)


def test_position_encoding_needs_a_multiple_of_four_channels():
    with pytest.raises(ConfigError, match=r"d_model=10: expected a multiple of 4"):
        build("transformer", d_model=10)


def test_hard_attention_loads_the_weights_of_soft_attention():
    soft, hard = build("soft"), build("hard")
    report = load_weights(hard, soft.state_dict(), new_class_head=True)
    assert report.new_parts == ["reward_baseline"]
    state = hard.state_dict()
    assert state.pop("reward_baseline").tolist() == [0, 0]
    assert_same_weights(soft, state)
    with pytest.raises(CheckpointError, match=r"missing \(1\): reward_baseline"):  # evaluation needs all weights
        load_weights(hard, soft.state_dict())


def test_scheduled_sampling_feeds_words_or_predicted_ones():
    model, target_in = build("soft"), targets_in()
    forced = model(target_in, images())["logits"]
    model.set_sampling(1e-12)
    assert torch.allclose(model.train()(target_in, images())["logits"], forced, atol=1e-6)
    model.set_sampling(1.0)
    own = model(target_in, images())["logits"]
    assert torch.equal(own, model(target_in.roll(1, 0), images())["logits"])
    known = torch.arange(SIZE) != UNK  # the word that `step` masks
    tokens, state = target_in[:, 0], model.start(images=images())
    for i in range(target_in.shape[1]):
        logits, state, _ = model.step(tokens, state)
        assert torch.allclose(own[:, i, known], logits[:, known], atol=1e-5)
        tokens = own[:, i].argmax(-1)
