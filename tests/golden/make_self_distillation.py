"""Writes self_distillation.{json,npz}: what the official DINO computes in four steps of two epochs.

    git clone https://github.com/facebookresearch/dino && python make_self_distillation.py dino

Its own modules and functions run as they are; torch.distributed.all_reduce does nothing, as with one process.
"""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from weights import HERE, fill, grad_projection, make_input, rule_for

SETTINGS = dict(
    patch_size=8, image_size=32, small_size=24, d_model=32, depth=2, num_heads=2, hidden=48, bottleneck=16,
    prototypes=40, images=3, small_views=2, epochs=2, steps_per_epoch=2, lr=1e-3, weight_decay=0.04,
    weight_decay_end=0.4, momentum=0.9, warmup_teacher_temp=0.04, teacher_temp=0.07, warmup_teacher_temp_epochs=2,
    clip=0.5, freeze_last_layer=1,
)  # fmt: skip
S = SETTINGS


def official(folder: str):
    sys.path.insert(0, folder)
    import main_dino
    import utils
    from vision_transformer import DINOHead, VisionTransformer

    torch.distributed.all_reduce = lambda tensor: None
    torch.distributed.get_world_size = lambda: 1

    def network(**head):
        norm = partial(nn.LayerNorm, eps=1e-6)
        sizes = dict(embed_dim=S["d_model"], depth=S["depth"], num_heads=S["num_heads"])
        vit = VisionTransformer([S["image_size"]], S["patch_size"], qkv_bias=True, norm_layer=norm, **sizes)
        sizes = dict(hidden_dim=S["hidden"], bottleneck_dim=S["bottleneck"])
        return utils.MultiCropWrapper(vit, DINOHead(S["d_model"], S["prototypes"], **sizes, **head))

    return main_dino.DINOLoss, utils, network


def filled(module: nn.Module, prefix: str, rows: list) -> nn.Module:
    state = module.state_dict()
    for key, value in state.items():
        dtype = str(value.dtype).removeprefix("torch.")
        rule = "zero" if not value.is_floating_point() else rule_for(prefix + key, value.shape)
        if key.endswith("weight_g"):
            rule = "affine:1,0.1"
        rows.append([prefix + key, list(value.shape), dtype, rule])
        state[key] = torch.from_numpy(np.array(fill(prefix + key, value.shape, dtype, rule)))
    module.load_state_dict(state)
    return module


def main(folder: str) -> None:
    loss_class, utils, network = official(folder)
    rows: list = []
    student = filled(network(norm_last_layer=False), "student.", rows)
    teacher = filled(network(), "teacher.", rows).requires_grad_(False)
    criterion = loss_class(
        S["prototypes"], 2 + S["small_views"], S["warmup_teacher_temp"], S["teacher_temp"],
        S["warmup_teacher_temp_epochs"], S["epochs"],
    )  # fmt: skip
    rows.append(["dino_loss.center", [1, S["prototypes"]], "float32", "affine:0,0.1"])
    criterion.center = torch.from_numpy(np.array(fill(*rows[-1])))

    inputs, outputs, grads = {}, {}, {}

    def random_input(name: str, *shape: int) -> torch.Tensor:
        inputs[name] = dict(seed=f"self_distillation:{name}", kind="image", shape=list(shape))
        return torch.from_numpy(make_input(inputs[name]))

    optimizer = torch.optim.AdamW(utils.get_params_groups(student), lr=S["lr"])
    decay = utils.cosine_scheduler(S["weight_decay"], S["weight_decay_end"], S["epochs"], S["steps_per_epoch"])
    momentum = utils.cosine_scheduler(S["momentum"], 1, S["epochs"], S["steps_per_epoch"])
    count = S["images"]
    for step in range(S["epochs"] * S["steps_per_epoch"]):
        epoch = step // S["steps_per_epoch"]
        optimizer.param_groups[0]["weight_decay"] = decay[step]
        large = random_input(f"{step}/images", 2 * count, 3, S["image_size"], S["image_size"])
        small = random_input(f"{step}/small_images", S["small_views"] * count, 3, S["small_size"], S["small_size"])
        teacher_out, student_out = (
            teacher(list(large.split(count))),
            student([*large.split(count), *small.split(count)]),
        )
        loss = criterion(student_out, teacher_out, epoch)
        optimizer.zero_grad()
        loss.backward()
        grads[f"{step}"] = {k: grad_projection(k, p.grad) for k, p in student.named_parameters()}
        utils.clip_gradients(student, S["clip"])
        grads[f"{step}/clipped"] = {k: grad_projection(k, p.grad) for k, p in student.named_parameters()}
        utils.cancel_gradients_last_layer(epoch, student, S["freeze_last_layer"])
        optimizer.step()
        with torch.no_grad():
            for q, k in zip(student.parameters(), teacher.parameters()):
                k.data.mul_(momentum[step]).add_((1 - momentum[step]) * q.detach().data)
        outputs |= {f"{step}/loss": loss, f"{step}/center": criterion.center.clone()}
        outputs |= {f"{step}/student_logits": student_out, f"{step}/teacher_logits": teacher_out}
    outputs |= {f"last/student.{k}": v for k, v in student.state_dict().items()}
    outputs |= {f"last/teacher.{k}": v for k, v in teacher.state_dict().items()}

    with_norms = filled(network(use_bn=True), "norms.", norms := []).head.train()
    outputs["norms/logits"] = with_norms(random_input("norms/features", 5, 1, S["d_model"])[:, 0])

    arrays, described = {}, {}
    for name, value in outputs.items():
        value = value.detach().numpy()
        stride = 1 if value.size <= 1000 else 7
        arrays[f"out/{name}"] = value if stride == 1 else value.reshape(-1)[::stride]
        described[name] = dict(shape=list(value.shape), stride=stride, stats={}, atol=1e-5, level="main")
    for name, values in grads.items():
        arrays[f"grad/{name}/norm"], arrays[f"grad/{name}/dot"] = np.array(list(values.values())).T
    at = [0, 1, 13, 35, 69]
    meta = dict(
        name="self_distillation",
        format=1,
        description="Four steps of DINO's training in two epochs, with a small ViT, given weights and views.",
        official=dict(
            repository="facebookresearch/dino",
            commit="7c446df",
            license="Apache-2.0",
            note=f"main_dino.py, utils.py, vision_transformer.py; torch {torch.__version__}, CPU, float32; "
            "written by make_self_distillation.py",
        ),
        settings=SETTINGS,
        schedules=dict(
            steps=at,
            momentum=[float(utils.cosine_scheduler(0.996, 1, 10, 7)[i]) for i in at],
            weight_decay=[float(utils.cosine_scheduler(0.04, 0.4, 10, 7)[i]) for i in at],
            teacher_temperature=loss_class(4, 4, 0.04, 0.07, 3, 5).teacher_temp_schedule.tolist(),
        ),
        state_dict=rows,
        norms_state_dict=[row for row in norms if row[0].startswith("norms.head.")],
        inputs=inputs,
        outputs=described,
        grads={name: list(values) for name, values in grads.items()},
    )
    np.savez_compressed(HERE / "self_distillation.npz", **arrays)
    (HERE / "self_distillation.json").write_text(json.dumps(meta, indent=1) + "\n")
    print({k: float(v) for k, v in outputs.items() if k.endswith("loss")})
    print({k: max(n for n, _ in v.values()) for k, v in grads.items()})


if __name__ == "__main__":
    main(*map(str, map(Path, sys.argv[1:])))
