"""Grounding DINO's loss: terms, matches and gradients of MM-Grounding-DINO's, and the original's matching cost."""

import re

import pytest
import torch
from golden.weights import Case, grad_projection, load_case

from vitkit.errors import ConfigError, DataError
from vitkit.losses.grounding import with_positive_maps
from vitkit.matchers.hungarian_tokens import TokenMatcher
from vitkit.registry import CRITERIA

VARIANTS = ["both", "one", "one_empty", "none"]
TERMS = {"labels": "loss_cls", "l1": "loss_bbox", "giou": "loss_iou"}
PREFIXES = {"": "", "aux0_": "d0.", "aux1_": "d1.", "enc_": "enc_"}
PREFIXES |= {"dn_": "dn_", "dn_aux0_": "d0.dn_", "dn_aux1_": "d1.dn_"}
"""Prefix of our keys -> prefix of the original's, for 3 decoder layers."""
MATCHER = dict(type="TokenMatcher", label_cost="prompt", cost_labels=2.0, cost_l1=5.0, cost_giou=2.0)
FIELDS = ("pred_logits", "pred_boxes")


def make_criterion(**changes):
    weights = dict(labels=1.0, l1=5.0, giou=2.0)
    return CRITERIA.build({**dict(type="GroundingCriterion", matcher=MATCHER, weights=weights), **changes})


@pytest.fixture(scope="module")
def case() -> Case:
    return load_case("grounding_dino_criterion")


def golden_inputs(case: Case, variant: str) -> tuple[dict, list[dict], dict[str, torch.Tensor]]:
    """Return the outputs and targets of a variant, and its inputs with gradients by their name."""
    inputs, denoising = case.torch_inputs(), case.meta["denoising"][variant]
    count = len(case.targets[variant])
    prompts = {name: inputs.pop(name)[:count] for name in ("blocks", "is_word", "text_padding")}
    prompts["phrase_ids"] = prompts.pop("blocks")  # as the stored case calls them
    leaves = {name: x if name.startswith("dn.") else x[:count] for name, x in inputs.items()}
    leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
    padding = {"text_padding": prompts["text_padding"]}

    def layer(name: str) -> dict:
        fields = {field: leaves[f"{name}.{field}"] for field in FIELDS}
        return (
            fields
            | padding
            | {"pred_logits": fields["pred_logits"].masked_fill(padding["text_padding"][:, None], -torch.inf)}
        )

    def layers(name: str) -> dict:
        *earlier, last = (layer(f"{name}.layer{i}") for i in range(3))
        return {**last, "aux_outputs": earlier}

    matches = [
        (torch.tensor(rows, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64))
        for rows, targets in zip(denoising["positive_rows"], denoising["targets"], strict=True)
    ]
    dn = layers(f"dn.{variant}") | dict(name="dn", matches=matches, repeats=denoising["groups"])
    outputs = {**layers("main"), **prompts, "training_outputs": [layer("enc") | {"name": "enc"}, dn]}
    targets = [
        {"labels": torch.from_numpy(t["labels"]), "boxes_cxcywh": torch.from_numpy(t["boxes"])}
        for t in case.targets[variant]
    ]
    return outputs, targets, leaves


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_term_of_every_layer_equals_the_original(case, variant):
    outputs, targets, _ = golden_inputs(case, variant)
    losses = make_criterion()(outputs, targets)
    expected = case.losses[variant]["terms"]
    names = {ours + term: theirs + TERMS[term] for ours, theirs in PREFIXES.items() for term in TERMS}
    assert losses.keys() == names.keys() and {names[name] for name in losses} == expected.keys()
    for name, value in losses.items():
        assert value.item() == pytest.approx(expected[names[name]], rel=1e-5, abs=1e-6), name
    assert sum(losses.values()).item() == pytest.approx(case.losses[variant]["total"], rel=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_all_inputs_equal_the_original(case, variant):
    outputs, targets, leaves = golden_inputs(case, variant)
    sum(make_criterion()(outputs, targets).values()).backward()
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert grads.keys() == case.grads[variant].keys()
    for name, grad in grads.items():
        norm, projection = case.grads[variant][name]
        got_norm, got_projection = grad_projection(name, grad.numpy())
        assert got_norm == pytest.approx(norm, rel=1e-5, abs=1e-6), name
        assert got_projection == pytest.approx(projection, abs=1e-4 * norm + 1e-6), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_of_every_layer_equal_the_original(case, variant):
    outputs, targets, _ = golden_inputs(case, variant)
    main, enc, _ = make_criterion().match(
        outputs, with_positive_maps(targets, outputs["phrase_ids"], outputs["is_word"])
    )
    expected = case.losses[variant]["indices"]
    layers = {"layer2": main.matches[0], "layer0": main.matches[1], "layer1": main.matches[2], "enc": enc.matches[0]}
    for name, matches in layers.items():
        for (query, target), (their_query, their_target) in zip(matches, expected[name], strict=True):
            assert query.tolist() == their_query.tolist() and target.tolist() == their_target.tolist()


def test_the_cost_of_a_phrase_is_the_mean_of_its_tokens(case):
    outputs, targets, _ = golden_inputs(case, "both")
    targets = with_positive_maps(targets, outputs["phrase_ids"], outputs["is_word"])
    matcher = TokenMatcher(1.0, 5.0, 2.0)
    image = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    costs, is_label = matcher.label_costs([outputs], targets, image)
    assert is_label.all() and costs.shape == (1, 8, 12)
    row = 0
    for index, target in enumerate(targets):
        for tokens in target["positive_map"]:
            p = outputs["pred_logits"][index].sigmoid()  # (Q, T)
            positive = 0.25 * (1 - p) ** 2 * -(p + 1e-8).log()
            negative = 0.75 * p**2 * -(1 - p + 1e-8).log()
            expected = torch.stack([(positive - negative)[:, t] for t in tokens.nonzero()[:, 0]]).mean(0)
            torch.testing.assert_close(costs[0, row], expected, rtol=1e-5, atol=1e-6)
            row += 1


def test_tokens_of_a_caption_whose_phrases_overlap_are_given_by_object(case):
    outputs, targets, _ = golden_inputs(case, "both")
    expected = make_criterion()(outputs, targets)
    maps = with_positive_maps(targets, outputs["phrase_ids"], outputs["is_word"])
    given = [{**target, "positive_map": maps[i]["positive_map"][:, :14]} for i, target in enumerate(targets[:1])]
    given.append({**targets[1], "positive_map": maps[1]["positive_map"]})
    # Labels then mean nothing.
    given = [{**target, "labels": torch.zeros_like(target["labels"])} for target in given]
    for name, value in make_criterion()(outputs, given).items():
        assert value.item() == pytest.approx(expected[name].item(), rel=1e-6), name


def test_padding_of_the_text_has_no_loss_and_no_gradient(case):
    outputs, targets, leaves = golden_inputs(case, "both")
    sum(make_criterion()(outputs, targets).values()).backward()
    padding = outputs["text_padding"][0]
    grad = leaves["main.layer0.pred_logits"].grad[0]
    assert padding.any() and not grad[:, padding].any() and grad[:, ~padding].all()


def test_labels_that_the_prompt_lacks_are_named(case):
    outputs, targets, _ = golden_inputs(case, "both")
    targets[1]["labels"][2] = 4
    message = "image 1 of the batch, target 2 has label 4; expected 0..3. Labels are numbers of the phrases"
    with pytest.raises(DataError, match=re.escape(message)):
        make_criterion()(outputs, targets)


def test_positive_maps_of_another_size_are_named(case):
    outputs, targets, _ = golden_inputs(case, "both")
    targets[0]["positive_map"] = torch.zeros(3, 19, dtype=torch.bool)
    with pytest.raises(
        DataError, match=r"image 0 of the batch: positive_map is \(3, 19\); expected a row for each of 3"
    ):
        make_criterion()(outputs, targets)


def test_unknown_costs_are_refused():
    with pytest.raises(ConfigError, match="label_cost='word': expected 'phrase' or 'prompt'"):
        make_criterion(matcher=dict(MATCHER, label_cost="word"))


def test_accuracy_counts_queries_whose_best_token_is_in_the_phrase(case):
    outputs, targets, _ = golden_inputs(case, "one")
    criterion = make_criterion()
    second = (outputs["phrase_ids"] == 2) & outputs["is_word"]  # the phrase of one of the four objects
    outputs["pred_logits"] = second[:, None].float().expand(-1, 12, -1)
    criterion(outputs, targets)
    assert criterion.meters["matched_accuracy"].compute() == (0.25, 4)
