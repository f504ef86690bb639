"""Weights with other numbers of learned queries: the first are kept, others start anew."""

import pytest
import torch
from helpers.weights import assert_same_weights

from vitkit import CheckpointError, build_model, load_config, load_weights

NAMES = {
    "quickstart/detr": ["head.query_embed.weight"],
    "quickstart/mask2former_instance": ["head.query_feat.weight", "head.query_embed.weight"],
    "quickstart/keypoints": ["head.query_embed.weight", "training_queries.groups.embed.weight"],
    "quickstart/eomt": ["head.query_embed.weight"],
}


def model_of(name, num_queries):
    spec = load_config(name)["model"]
    detections = {"num_detections": min(spec["num_detections"], num_queries)} if "num_detections" in spec else {}
    if name == "quickstart/keypoints":
        spec["training_queries"] = [dict(type="QueryGroups", groups=4)]
    return build_model(spec | {"num_queries": num_queries} | detections, classes=["a", "b"])


@pytest.mark.parametrize("name", NAMES)
def test_the_first_queries_are_taken_and_others_start_anew(name, caplog):
    torch.manual_seed(0)
    small, large = model_of(name, 12), model_of(name, 20)
    fresh = {key: value.clone() for key, value in large.state_dict().items()}
    with caplog.at_level("INFO", "vitkit"):
        load_weights(large, {"model": small.state_dict(), "classes": ["a", "b"]}, new_class_head=True)
    assert "learned queries: 12 in the weights, 20 in the model: the first 12 are taken" in caplog.text
    old, new = small.state_dict(), large.state_dict()
    for key in NAMES[name]:
        theirs, ours = old[key].unflatten(0, (-1, 12)), new[key].unflatten(0, (-1, 20))
        assert len(theirs) == len(ours) and torch.equal(ours[:, :12], theirs)
        assert torch.equal(ours[:, 12:], fresh[key].unflatten(0, (-1, 20))[:, 12:])
    assert all(torch.equal(old[key], new[key]) for key in old if key not in NAMES[name])
    again = model_of(name, 12)
    load_weights(again, {"model": large.state_dict(), "classes": ["a", "b"]}, new_class_head=True)
    assert_same_weights(again, old)


def test_first_queries_predict_as_before_when_the_others_are_masked():
    """To the last bit: in the decoder's self-attention, a query that is masked is as one that is not there."""
    torch.manual_seed(0)
    small, large = model_of("quickstart/detr", 12).eval(), model_of("quickstart/detr", 20).eval()
    load_weights(large, {"model": small.state_dict()}, new_class_head=True)
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        before = small(images, None)
        large.head.query_embed.weight = torch.nn.Parameter(large.head.query_embed.weight[:12])
        after = large(images, None)
    assert torch.equal(before["pred_logits"], after["pred_logits"])
    assert torch.equal(before["pred_boxes"], after["pred_boxes"])


def test_without_training_no_query_is_made_up_or_left_out():
    small, large = model_of("quickstart/detr", 12), model_of("quickstart/detr", 20)
    for model, state in ((large, small.state_dict()), (small, large.state_dict())):
        with pytest.raises(CheckpointError, match=r"head\.query_embed\.weight: checkpoint"):
            load_weights(model, {"model": state})
    # RF-DETR's are ranked: the first ones are those of the best locations.
    small, large = model_of("quickstart/keypoints", 12), model_of("quickstart/keypoints", 20)
    load_weights(small, {"model": large.state_dict()})
    key = "head.query_embed.weight"
    assert torch.equal(small.state_dict()[key], large.state_dict()[key][:12])
    with pytest.raises(CheckpointError, match=r"head\.query_embed\.weight: checkpoint"):
        load_weights(large, {"model": small.state_dict()})
