"""Criteria and matchers take the same words in a config and in Python."""

import pytest
from torch import nn

from vitkit.errors import ConfigError
from vitkit.protocols.criterion import Criterion
from vitkit.registry import CRITERIA, MATCHERS

BOX_MATCHER = dict(type="HungarianMatcher", cost_labels=2.0, cost_l1=5.0, cost_giou=3.0, activation="sigmoid")
MASK_MATCHER = dict(
    type="HungarianMaskMatcher", cost_labels=2.0, cost_mask=5.0, cost_dice=3.0, mask_cost="focal", num_points=7
)
BOX_MASK_MATCHER = dict(BOX_MATCHER, type="HungarianBoxMaskMatcher", cost_mask=4.0, cost_dice=6.0, pixels_per_point=13)
BOX_MASK_MATCHER |= dict(mask_cost="focal", point_padding="zeros")
POINT_MATCHER = dict(BOX_MATCHER, type="HungarianBoxKeypointMatcher", cost_keypoint_l1=0.3, cost_keypoint_findable=0.4)
POINT_MATCHER |= dict(cost_keypoint_visible=0.6, cost_keypoint_nll=0.7)
KEYPOINT_MATCHER = dict(type="HungarianKeypointMatcher", cost_labels=2.0, cost_keypoint_l1=9.0, cost_oks=3.0)
TOKEN_MATCHER = dict(type="TokenMatcher", cost_labels=1.0, cost_l1=5.0, cost_giou=3.0, label_cost="prompt")
MATCHER_SPECS = [
    BOX_MATCHER,
    BOX_MASK_MATCHER,
    POINT_MATCHER,
    KEYPOINT_MATCHER,
    MASK_MATCHER,
    TOKEN_MATCHER,
    dict(type="FixedMaskMatcher"),
]
CRITERION_SPECS = [
    dict(
        type="SetCriterion",
        matcher=BOX_MATCHER,
        weights=dict(labels=2.0, l1=5.0, giou=3.0, mask=1.0, dice=4.0),
        class_loss="varifocal",
        focal_alpha=0.6,
        focal_gamma=1.5,
    ),
    dict(
        type="MaskCriterion",
        matcher=MASK_MATCHER,
        weights=dict(labels=2.0, mask=5.0, dice=3.0),
        no_object_weight=0.2,
        mask_loss="points",
        num_points=9,
        oversample=2.0,
        importance=0.5,
    ),
    dict(
        type="BoxMaskCriterion",
        matcher=BOX_MASK_MATCHER,
        weights=dict(labels=2.0, l1=5.0, giou=3.0, mask=1.0, dice=4.0),
        class_loss="iou_aware",
        focal_alpha=0.6,
        focal_gamma=1.5,
        mask_loss="boxes",
        pixels_per_point=11,
        oversample=2.5,
        importance=0.65,
        point_padding="zeros",
    ),
    dict(
        type="BoxKeypointCriterion",
        matcher=POINT_MATCHER,
        weights=dict(labels=2.0, l1=5.0, giou=3.0)
        | dict(keypoint_l1=0.3, keypoint_findable=0.4, keypoint_visible=0.6, keypoint_nll=0.7),
        class_loss="iou_aware",
        focal_alpha=0.65,
        focal_gamma=1.5,
    ),
    dict(
        type="KeypointCriterion",
        matcher=KEYPOINT_MATCHER,
        weights=dict(labels=2.0, keypoint_l1=9.0, oks=3.0),
        class_loss="varifocal",
        focal_alpha=0.65,
        focal_gamma=1.5,
        keypoint_sigmas=[0.11, 0.12],
    ),
    dict(
        type="DFINECriterion",
        matcher=BOX_MATCHER,
        weights=dict(labels=2.0, l1=5.0, giou=3.0, fgl=0.15, ddf=1.5),
        class_loss="varifocal",
        focal_alpha=0.6,
        focal_gamma=1.7,
        temperature=4.0,
    ),
    dict(
        type="DFINEMaskCriterion",
        matcher=BOX_MASK_MATCHER,
        weights=dict(labels=2.0, l1=5.0, giou=3.0, fgl=0.15, ddf=1.5, mask=1.0, dice=4.0),
        class_loss="mal",
        focal_gamma=1.7,
        temperature=4.0,
        mask_loss="boxes",
        pixels_per_point=11,
        oversample=2.5,
        importance=0.65,
        point_padding="zeros",
    ),
    dict(
        type="GroundingCriterion",
        matcher=TOKEN_MATCHER,
        weights=dict(labels=2.0, l1=5.0, giou=3.0),
        focal_alpha=0.6,
        focal_gamma=1.7,
    ),
    dict(type="PerPixelCriterion", dice_weight=1.5, aux_weight=0.4),
    dict(type="ClassificationLoss", label_smoothing=0.2),
    dict(type="FeatureDistillationLoss", location_weight=0.9, image_weight=0.7),
    dict(type="ReconstructionLoss"),
    dict(type="SelfDistillationLoss", student_temperature=0.2, center_momentum=0.8),
    dict(type="SequenceLoss", label_smoothing=0.2),
    dict(type="CaptionLoss", label_smoothing=0.2, doubly_stochastic=0.5, reinforce=0.4, entropy=0.3),
]


def settings_of(module: nn.Module) -> dict:
    """Return a module's type and its values, with those of its submodules."""
    values = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "meters"}
    children = {name: settings_of(child) for name, child in module.named_children()}
    return dict(type=type(module), **values, **children)


@pytest.mark.parametrize(
    ("registry", "spec"),
    [(CRITERIA, spec) for spec in CRITERION_SPECS] + [(MATCHERS, spec) for spec in MATCHER_SPECS],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_a_spec_and_the_constructor_take_the_same_words(registry, spec):
    name, arguments = spec["type"], {key: value for key, value in spec.items() if key != "type"}
    constructor, _ = registry.resolve(name)
    built, constructed = registry.build(spec), constructor(**arguments)
    assert settings_of(built) == settings_of(constructed)
    texts = str(settings_of(built))
    values = [value for value in arguments.values() if isinstance(value, float | int | str)]
    assert all(str(value) in texts for value in values), "an argument is not used"


@pytest.mark.parametrize(("registry", "specs"), [(CRITERIA, CRITERION_SPECS), (MATCHERS, MATCHER_SPECS)])
def test_every_registered_one_is_built_above(registry, specs):
    # Other tests may register their own.
    names = [name for name in registry.names() if registry.resolve(name)[0].__module__.startswith("vitkit.")]
    assert [spec["type"] for spec in sorted(specs, key=lambda spec: spec["type"])] == names


def test_every_criterion_has_meters_and_says_which_logits_it_expects():
    for spec in CRITERION_SPECS:
        criterion = CRITERIA.build(spec)
        # One whose loss is all that there is to say has none.
        assert isinstance(criterion, Criterion) and (criterion.meters or spec["type"] == "ReconstructionLoss")
        is_sigmoid = spec["type"] in ("SetCriterion", "BoxMaskCriterion", "DFINECriterion", "DFINEMaskCriterion")
        is_sigmoid |= spec["type"] in ("GroundingCriterion", "BoxKeypointCriterion", "KeypointCriterion")
        assert criterion.class_activation == ("sigmoid" if is_sigmoid else None)
    assert dict(Criterion().meters) == {}


def test_a_registered_matcher_derives_from_the_base():
    class Own(nn.Module):
        """Lacks what criteria read of matchers, such as `activation`."""

    with pytest.raises(ConfigError, match=r"matcher Own does not derive from vitkit\.Matcher.* Write: class Own\(vitk"):
        MATCHERS.register(Own)


def test_an_unknown_activation_is_named():
    with pytest.raises(ConfigError, match=r"activation='focal': expected 'softmax' or 'sigmoid'"):
        MATCHERS.build(dict(BOX_MATCHER, activation="focal"))
