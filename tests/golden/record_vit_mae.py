"""Record vit_mae.json and vit_mae.npz: MAE of the transformers library with weights made by rules, in float64.

Run:  python tests/golden/record_vit_mae.py    (needs transformers)
"""

import json

import numpy as np
import torch
import transformers
from transformers import ViTMAEConfig, ViTMAEForPreTraining
from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding
from weights import HERE, fill, grad_projection, make_input, rule_for

SETTINGS = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    image_size=48,
    patch_size=8,
    layer_norm_eps=1e-6,
    mask_ratio=0.75,
    decoder_hidden_size=16,
    decoder_num_hidden_layers=2,
    decoder_num_attention_heads=2,
    decoder_intermediate_size=64,
)
POSITIONS = {"vit.embeddings.position_embeddings": "encoder", "decoder.decoder_pos_embed": "decoder"}
"""Tables that the original computes, and their names in the .npz."""
INPUTS = {
    "images": dict(seed="input:vit_mae", kind="image", shape=[2, 3, 48, 48]),
    "noise": dict(seed="noise:vit_mae", kind="normal", shape=[2, 36]),
}


def fixed_positions(shape: torch.Size) -> torch.Tensor:
    """Return the table that the library makes for a random model: version 5.24 leaves it at zero, since the patch
    embedding is marked as initialized before."""
    side = round((shape[1] - 1) ** 0.5)
    table = build_2d_sinusoidal_position_embedding(side, side, shape[2], cls_token=True)
    return table.roll(shape[2] // 2, dims=1)[None]


def main() -> None:
    model = ViTMAEForPreTraining(ViTMAEConfig(**SETTINGS))
    stored, entries, state = {}, [], {}
    for key, value in model.state_dict().items():
        rule = f"computed:{POSITIONS[key]}" if key in POSITIONS else rule_for(key, value.shape)
        entries.append([key, list(value.shape), "float32", rule])
        if key in POSITIONS:
            state[key] = fixed_positions(value.shape)
            stored[f"buf/{POSITIONS[key]}"] = state[key].numpy()
        else:
            state[key] = torch.from_numpy(fill(key, value.shape, "float32", rule))
    model.load_state_dict(state)
    model.double().train()
    inputs = {name: torch.from_numpy(make_input(spec)).double() for name, spec in INPUTS.items()}
    outputs, losses, grads = {}, {}, {}
    for variant, norm_pix in (("norm_pix", True), ("pixels", False)):
        model.config.norm_pix_loss = norm_pix
        model.zero_grad()
        result = model(inputs["images"], noise=inputs["noise"])
        result.loss.backward()
        losses[variant] = {"terms": {"loss": result.loss.item()}, "total": result.loss.item()}
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        projections = [grad_projection(name, model.get_parameter(name).grad.numpy()) for name in names]
        grads[variant] = names
        stored[f"grad/{variant}/norm"], stored[f"grad/{variant}/dot"] = map(np.array, zip(*projections, strict=True))
    latent = model.vit(inputs["images"], noise=inputs["noise"]).last_hidden_state
    for name, value in (("logits", result.logits), ("latent", latent), ("mask", result.mask)):
        array = value.detach().float().numpy()
        stored[f"out/{name}"] = array
        stats = {"mean": float(array.mean()), "std": float(array.std()), "l2": float(np.linalg.norm(array))}
        outputs[name] = dict(shape=list(array.shape), dtype="float32", stride=1, level="main", atol=1e-5, stats=stats)
    meta = dict(
        name="vit_mae",
        format=1,
        description="MAE on two images in float64: outputs, and losses and gradients with both kinds of targets.",
        official=dict(package=f"transformers=={transformers.__version__}", cls="ViTMAEForPreTraining"),
        settings=SETTINGS,
        torch_version=torch.__version__,
        inputs=INPUTS,
        outputs=outputs,
        losses=losses,
        grads=grads,
        state_dict=entries,
    )
    (HERE / "vit_mae.json").write_text(json.dumps(meta, separators=(",", ":")) + "\n", encoding="utf-8")
    np.savez_compressed(HERE / "vit_mae.npz", **stored)


if __name__ == "__main__":
    main()
