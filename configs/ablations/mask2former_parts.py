"""What Mask2Former's parts are worth, on the synthetic world (Cheng et al. 2022, https://arxiv.org/abs/2112.01527).

Masked or full cross-attention, learnable queries, one level or several in turn (table 4), and the loss at points or
over full masks (table 5), the latter with MaskFormer's focal loss and weights.

Run:  vitkit ablate mask2former_parts
Here: see model_zoo/ablations/mask2former_parts.md.
"""


def ablation():
    return dict(
        base="quickstart/mask2former_instance",
        metrics=["segm/AP", "segm/AP50"],
        settings={"train.epochs": 2},
        arms={
            "Mask2Former": {},
            "full cross-attention": {"model.head.masked_attention": False},
            "zero queries": {"model.head.learned_queries": False},
            "one level": {"model.head.num_levels": 1},
            "whole-mask losses": {
                "criterion.mask_loss": "focal",
                "criterion.weights": dict(labels=2.0, mask=20.0, dice=1.0),
                "criterion.matcher": dict(
                    type="HungarianMaskMatcher", mask_cost="focal", cost_labels=2.0, cost_mask=20.0, cost_dice=1.0
                ),
            },
        },
    )
