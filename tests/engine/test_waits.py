"""A training step waits for the GPU twice, for the costs of matching and the guard's verdict, and nowhere else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers.backbones_and_heads import BACKBONES
from helpers.emulated_gpu import DEVICE, emulated_gpu, to_device
from helpers.every_model import text_model
from helpers.quickstart_runs import REALTIME, quickstart_run

from vitkit.data.transforms.mixing import BatchMixing
from vitkit.engine.trainer import next_step
from vitkit.kernels import deformable_attention
from vitkit.registry import BACKBONES as REGISTRY
from vitkit.structures import EOS, PAD, Batch

MATCHING = {
    "detr": "hungarian.py",
    "deformable_detr": "hungarian.py",
    "dino": "hungarian.py",
    "maskformer_semantic": "hungarian_masks.py",
    "mask2former_instance": "hungarian_masks.py",
    "eomt": "hungarian_masks.py",
    **dict.fromkeys(REALTIME, "hungarian.py"),
}
"""Quickstart config or `REALTIME` -> the file where its step waits for the matching."""


class WritesInBackward(torch.autograd.Function):
    """The identity, with a backward pass that waits."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[0] = 1.0
        return grad


WAITS = [
    lambda x: x[0].item(),
    lambda x: x.tolist(),
    lambda x: x.cpu(),
    lambda x: bool(x.sum() > 0),
    lambda x: x[x > 0],
    lambda x: x.nonzero(),
    lambda x: x[torch.tensor([0])],
    lambda x: torch.tensor([1.0, 2.0], device=x.device),
    lambda x: x.new_tensor([1.0]),
    lambda x: torch.ones(3).to(x.device),
    lambda x: x.copy_(torch.ones(3)),
    lambda x: x.__setitem__(0, 1.0),
    lambda x: x.__setitem__((x.long(),), 1.0),
    lambda x: x.repeat_interleave(x.long()),
    lambda x: WritesInBackward.apply(x.clone().requires_grad_()).sum().backward(),
]
"""Functions of a tensor of the GPU, which wait for it."""


TEXT_MODELS = ["CausalLanguageModel", "MaskedLanguageModel", "PrefixLanguageModel", "Transformer"]
TOKENS = torch.tensor([[EOS + 1, EOS + 2, EOS + 2, EOS + 1, EOS + 1], [EOS + 2, EOS + 1, EOS + 1, EOS + 2, EOS + 2]])
BACKBONE_NAMES = ["resnet", "vit_windows", "swin", "swinv2", "mvit", "lrnet"]


@pytest.fixture(autouse=True)
def without_triton(request, monkeypatch):
    if "cuda" not in request.fixturenames:
        monkeypatch.setattr(deformable_attention, "_has_triton", lambda: False)


@pytest.fixture
def cuda(gpu) -> torch.device:
    if gpu.type != "cuda":
        pytest.skip("only on CUDA")
    return gpu


@contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """Report what waits for the GPU in this context, as a "warn"ing or an "error"."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def raise_at_waits(call: Callable[[], object]) -> None:
    """Call twice; an error in the second call, which allocates nothing new, is where it waits for the GPU."""
    call()
    with sync_debug_mode("error"):
        call()


def text_loss(model: torch.nn.Module, name: str, tokens: torch.Tensor) -> torch.Tensor:
    inputs = (tokens, tokens == PAD)
    if name in ("PrefixLanguageModel", "Transformer"):
        inputs = (*inputs, tokens)
    return model(*inputs)["logits"].mean()


@pytest.mark.parametrize("name", MATCHING)
def test_step_synchronizes_once_for_matching_and_once_for_the_guard(name, tmp_path):
    with emulated_gpu() as gpu:
        run, batch = quickstart_run(name, DEVICE, tmp_path, move=to_device)
        gpu.waits.clear()
        step = next_step(run, iter([batch]))
    assert step.decision.take and run.progress.step == 1
    waits = {where.split(":")[0]: count for where, count in gpu.waits.items()}
    assert waits == {MATCHING[name]: 1, "step.py": 1}, gpu.waits


def test_moving_average_does_not_synchronize(tmp_path):
    with emulated_gpu() as gpu:
        run, batch = quickstart_run("detr", DEVICE, tmp_path, move=to_device, ema_decay=0.9)
        for _ in range(2):  # the first update copies
            gpu.waits.clear()
            next_step(run, iter([batch]))
            assert sum(gpu.waits.values()) == 2, gpu.waits


def test_mixing_of_batches_does_not_synchronize():
    images = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)
    batch = Batch.collate([{"image": images, "target": {"label": label}} for label in range(2)])
    with emulated_gpu() as gpu:
        mix, batch = BatchMixing(2, erasing=1.0, mixup=0.5, cutmix=0.5), batch.to(DEVICE)
        gpu.waits.clear()
        mixed = mix(batch)
        assert not gpu.waits and mixed.targets[0]["class_weights"].cpu().sum() == pytest.approx(1)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_no_text_model_synchronizes_in_either_pass(name):
    with emulated_gpu() as gpu:
        model = to_device(text_model(name)[0].train())
        tokens = TOKENS.to(DEVICE, non_blocking=True)
        gpu.waits.clear()
        text_loss(model, name, tokens).backward()
    assert not gpu.waits


@pytest.mark.parametrize("name", BACKBONE_NAMES)
def test_no_backbone_synchronizes_in_either_pass(name):
    with emulated_gpu() as gpu:
        backbone = to_device(REGISTRY.build(BACKBONES[name])).train()
        images = torch.rand(2, 3, 69, 91).to(DEVICE, non_blocking=True)
        gpu.waits.clear()
        sum(feature.mean() for feature in backbone(images).values()).backward()
        assert any(parameter.grad is not None for parameter in backbone.parameters())
    assert not gpu.waits


@pytest.mark.gpu
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_no_text_model_waits_for_a_real_gpu(name, cuda):
    model, tokens = text_model(name)[0].train().to(cuda), TOKENS.to(cuda)
    raise_at_waits(lambda: text_loss(model, name, tokens).backward())


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKBONE_NAMES)
def test_no_backbone_waits_for_a_real_gpu(name, cuda):
    backbone = REGISTRY.build(BACKBONES[name]).to(cuda).train()
    images = torch.rand(2, 3, 69, 91, device=cuda)
    raise_at_waits(lambda: sum(feature.mean() for feature in backbone(images).values()).backward())


@pytest.mark.gpu
def test_mixing_of_batches_does_not_wait_for_a_real_gpu(cuda):
    images = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)
    batch = Batch.collate([{"image": images, "target": {"label": label}} for label in range(2)]).pin_memory()
    mix = BatchMixing(2, erasing=1.0, mixup=0.5, cutmix=0.5)
    raise_at_waits(lambda: mix(batch.to(cuda)))


@pytest.mark.parametrize("wait", WAITS)
def test_emulated_gpu_counts_the_synchronizations_of_a_real_one(wait):
    with emulated_gpu() as gpu:
        x = torch.tensor([1.0, 2.0, 0.0]).to(DEVICE, non_blocking=True)
        y = (x + 1).where(x > 0, 0).roll(1).index_select(0, x.long()) + torch.zeros(3, device=x.device)
        assert not gpu.waits and y.cpu().tolist() == [2.0, 3.0, 0.0]
        gpu.waits.clear()
        wait(x)
        assert sum(gpu.waits.values()) == 1, gpu.waits


@pytest.mark.gpu
@pytest.mark.parametrize("wait", WAITS)
def test_real_gpu_waits_where_the_emulated_one_does(wait, cuda):
    x = torch.tensor([1.0, 2.0, 0.0], device=cuda)
    with sync_debug_mode("warn"), pytest.warns(UserWarning, match="synchronizing"):
        wait(x)


def test_the_emulated_gpu_refuses_tensors_of_two_devices():
    with emulated_gpu(), pytest.raises(AssertionError, match="tensors of two devices"):
        torch.ones(3).to(DEVICE, non_blocking=True) + torch.ones(3)
