"""Loss terms in a user's own file: as the guide shows it, with settings, and of masks."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import vitkit
from vitkit.config.check import check_config
from vitkit.errors import ConfigError
from vitkit.losses.mask_criterion import MaskCriterion
from vitkit.losses.set_criterion import SetCriterion
from vitkit.ops.masks import pad_masks
from vitkit.registry import CRITERIA, parameters_of

GUIDE = Path(__file__).resolve().parents[2] / "configs" / "README.md"
BOX_SPEC = dict(
    type="CenterCriterion",
    matcher=dict(type="HungarianMatcher", cost_labels=1.0, cost_l1=5.0, cost_giou=2.0),
    weights=dict(labels=1.0, l1=5.0, giou=2.0, center=3.0),
    no_object_weight=0.1,
)
MASK_SPEC = dict(
    type="EdgeCriterion",
    matcher=dict(type="HungarianMaskMatcher", cost_labels=2.0, cost_mask=5.0, cost_dice=5.0, num_points=16),
    weights=dict(labels=2.0, mask=5.0, dice=5.0, edge=4.0),
    num_points=16,
)
CONFIG = """
from vitkit.configs.quickstart.detr import config as quickstart


def config():
    cfg = quickstart()
    cfg["imports"] = ["my_loss.py"]
    cfg["criterion"] |= dict(type="CenterCriterion", weights=dict(labels=1.0, l1=5.0, giou=2.0, center=1.0))
    cfg["data"]["train"]["num_images"], cfg["data"]["val"]["num_images"] = 32, 2
    cfg["train"] |= dict(epochs=1)
    return cfg
"""


class EdgeCriterion(MaskCriterion):
    """Adds the L1 distance of the masks' horizontal slopes, and sets an argument of its base itself."""

    terms = (*MaskCriterion.terms, "edge")

    def __init__(self, *, scale: float = 1.0, **kwargs):
        super().__init__(no_object_weight=0.1, **kwargs)
        self.scale = scale

    def mask_losses(self, layer, logits, targets, input_size):
        target_masks = torch.cat([pad_masks(masks[j], input_size) for masks, j in targets]).float()
        probabilities = F.interpolate(logits[:, None], input_size, mode="bilinear")[:, 0].sigmoid()
        edge = self.scale * (probabilities - target_masks).diff(dim=2).abs().mean((1, 2))
        return super().mask_losses(layer, logits, targets, input_size) | {"edge": edge}


@pytest.fixture(autouse=True)
def own_criteria(monkeypatch):
    CRITERIA.load_packages()  # otherwise they would fill the copy, which is dropped after the test
    monkeypatch.setattr(CRITERIA, "_constructors", dict(CRITERIA._constructors))
    CRITERIA.register(EdgeCriterion)


def guide_block(first_line: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return next(block for block in blocks if block.startswith(first_line))


def test_the_guides_term_is_short_and_adds_to_every_layer():
    block = guide_block("# my_loss.py")
    assert len([line for line in block.splitlines() if line and not line.startswith("#")]) < 10
    exec(compile(block, "guide, my_loss.py", "exec"), {})
    layer = {
        "pred_logits": torch.zeros(1, 2, 4),
        "pred_boxes": torch.tensor([[[0.5, 0.6, 0.2, 0.2], [0.9, 0.9, 0.1, 0.1]]], requires_grad=True),
    }
    targets = [{"labels": torch.tensor([1]), "boxes_cxcywh": torch.tensor([[0.2, 0.2, 0.2, 0.2]])}]
    outputs = {**layer, "aux_outputs": [layer]}
    losses = CRITERIA.build(BOX_SPEC)(outputs, targets)
    assert losses["center"].item() == pytest.approx(3 * 0.5)  # weight times the hypotenuse of 0.3 and 0.4
    assert losses["aux0_center"].item() == pytest.approx(3 * 0.5)
    plain = dict(BOX_SPEC, type="SetCriterion", weights=dict(labels=1.0, l1=5.0, giou=2.0))
    unchanged = CRITERIA.build(plain)(outputs, targets)
    assert {name: loss.item() for name, loss in losses.items() if "center" not in name} == {
        name: loss.item() for name, loss in unchanged.items()
    }


def test_the_guides_term_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_loss.py").write_text(guide_block("# my_loss.py"))
    Path("my_config.py").write_text(CONFIG)
    vitkit.train("my_config.py", run_dir="run", device="cpu")
    assert '"center"' in Path("run/log.jsonl").read_text()


def mask_losses_of(spec, *, num_targets: int) -> dict[str, torch.Tensor]:
    masks = torch.zeros(num_targets, 6, 8, dtype=torch.bool)
    masks[:, :, 4:] = True
    logits = torch.full((1, 2, 8, 8), -50.0)
    logits[..., 4:] = 50.0
    outputs = {"pred_logits": torch.zeros(1, 2, 4), "pred_masks": logits.requires_grad_(), "input_size": (8, 8)}
    return CRITERIA.build(spec)(outputs, [{"labels": torch.zeros(num_targets, dtype=torch.long), "masks": masks}])


def test_a_mask_term_is_computed_for_the_matched_masks():
    losses = mask_losses_of(MASK_SPEC, num_targets=1)
    # Below row 6 the image ends, and the target has no edge: 2 of 8 rows differ at 1 of 7 columns' steps.
    assert losses["edge"].item() == pytest.approx(4 * 2 / 8 / 7)
    doubled = mask_losses_of(dict(MASK_SPEC, scale=2.0), num_targets=1)
    assert doubled["edge"].item() == pytest.approx(2 * losses["edge"].item())


def test_a_mask_term_without_targets_is_zero():
    losses = mask_losses_of(MASK_SPEC, num_targets=0)
    assert losses["edge"].item() == 0 and losses["edge"].requires_grad


def test_arguments_of_the_base_need_not_be_repeated():
    assert list(parameters_of(EdgeCriterion)) == ["scale", *parameters_of(MaskCriterion)]
    check_config(dict(criterion=dict(MASK_SPEC, scale=0.5, mask_loss="focal")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(oversampel=2.0), "criterion.oversampel: EdgeCriterion has no argument 'oversampel'. Did you mean"),
        (dict(num_points="all"), "criterion.num_points: got 'all'; expected int"),
        (dict(scale="big"), "criterion.scale: got 'big'; expected float"),
        (dict(weights=dict(labels=1.0, mask=1.0, dice=1.0)), "criterion: weights: no weight for edge"),
        (dict(weights=dict(labels=1.0, mask=1.0, dice=1.0, edges=1.0)), "unknown term 'edges'. Did you mean 'edge'"),
        (dict(matcher=dict(type="HungarianMaskMacher")), "criterion.matcher: unknown matcher"),
    ],
)
def test_a_config_of_an_own_criterion_is_checked(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_config(dict(criterion=MASK_SPEC | changes))


def test_a_missing_argument_of_the_base_is_an_error():
    spec = {name: value for name, value in MASK_SPEC.items() if name != "matcher"}
    with pytest.raises(ConfigError, match="EdgeCriterion: .*missing.*'matcher'"):
        CRITERIA.build(spec)


def test_a_loss_that_is_not_among_the_terms_is_named():
    class Forgetful(SetCriterion):
        def box_losses(self, pred_cxcywh, target_cxcywh):
            return {"width": (pred_cxcywh - target_cxcywh)[..., 2].abs()}

    spec = {name: value for name, value in BOX_SPEC.items() if name not in ("type", "weights")}
    criterion = Forgetful(**spec, weights=dict(labels=1.0, l1=1.0, giou=1.0))
    outputs = {"pred_logits": torch.zeros(1, 2, 4), "pred_boxes": torch.full((1, 2, 4), 0.5)}
    targets = [{"labels": torch.tensor([1]), "boxes_cxcywh": torch.full((1, 4), 0.3)}]
    with pytest.raises(ConfigError, match="no weight for the loss 'width'. Add 'width' to the `terms`"):
        criterion(outputs, targets)
