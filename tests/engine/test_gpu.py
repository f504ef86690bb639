"""Training on a GPU. Without one, VITKIT_GPU_TESTS=cpu pytest -m gpu runs the tests that do not need it."""

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.quickstart_runs import REALTIME, quickstart_run
from timm.layers import BatchNormAct2d, convert_sync_batchnorm
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

import vitkit
from vitkit.apps.inference.predictor import Predictor
from vitkit.engine.parallel import shard
from vitkit.engine.step import training_inputs
from vitkit.engine.trainer import next_step
from vitkit.errors import TrainingError
from vitkit.models.detr import DETR

pytestmark = pytest.mark.gpu
MODELS = ["detr", "deformable_detr", "dino", "maskformer_semantic", "mask2former_instance", "eomt", *REALTIME]
TINY = dict(
    data=dict(train=dict(num_images=8), val=dict(num_images=2), images_per_gpu=4),
    model=dict(num_queries=5),
    train=dict(log_every=1),
)


def needs_cuda(gpu: torch.device) -> None:
    if gpu.type != "cuda":
        pytest.skip("only on CUDA")


@pytest.fixture
def process_group(gpu, tmp_path):
    """One rank."""
    backend = "nccl" if gpu.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_three_steps_lower_the_loss_in_every_precision(name, precision, gpu, tmp_path):
    if gpu.type == "cpu" and precision == "fp16":
        pytest.skip("some operators of the CPU have no fp16")
    run, batch = quickstart_run(name, gpu, tmp_path, precision=precision)
    for group in run.optimizer.param_groups:
        group["lr"] = 1e-3
    totals = []
    # With fp16 the first steps are skipped until the loss scale fits; each halves it.
    for _ in range(16 if precision == "fp16" else 6):
        step = next_step(run, iter([batch]))
        totals.append(float(sum(step.losses[0].values())))
    assert run.progress.step >= 2
    assert all(parameter.isfinite().all() for parameter in run.parameters)
    assert min(totals[3:]) < totals[0]


@pytest.mark.parametrize("name", MODELS)
def test_step_synchronizes_twice_and_the_forward_pass_never(name, gpu, tmp_path):
    needs_cuda(gpu)
    run, batch = quickstart_run(name, gpu, tmp_path, ema_decay=0.9)
    next_step(run, iter([batch]))  # allocates what later steps reuse
    batch = batch.pin_memory()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = batch.to(gpu)
        with torch.autocast("cuda", torch.bfloat16):
            run.wrapped_model(**training_inputs(run.model, moved))
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            next_step(run, iter([batch]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in caught if "synchronizing" in str(warning.message)]
    assert len(waits) == 2, [(w.filename, w.lineno) for w in caught]


@pytest.mark.parametrize("name", ["detr", "deformable_detr", "mask2former_instance"])
def test_compiled_model_trains_like_the_eager_one(name, gpu, tmp_path):
    needs_cuda(gpu)  # it takes minutes on a CPU
    losses = []
    for compiled in (False, True):
        run, batch = quickstart_run(name, gpu, tmp_path, compile=compiled)
        for module in run.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        torch.manual_seed(0)
        step = next_step(run, iter([batch]))
        losses.append(float(sum(step.losses[0].values())))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize("name", REALTIME)
def test_model_compiled_as_cuda_graphs_predicts_the_same(name, gpu, tmp_path, monkeypatch):
    # Convolutions rounded to TF32 let queries of nearly equal scores be selected in place of each other.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    run, _ = quickstart_run(name, gpu, tmp_path)
    predictor = Predictor(run.model, list("abc"))
    images = list(np.random.default_rng(0).integers(256, size=(2, 320, 320, 3), dtype=np.uint8))
    expected = [predictor(image, threshold=0.0) for image in images]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    predictor.model.compile(**dict(mode="reduce-overhead") if gpu.type == "cuda" else dict(backend="eager"))
    compiled = [predictor(image, threshold=0.0) for image in [*images, images[0]]]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    for image, prediction in zip((0, 1, 0), compiled):
        # Detections whose scores are equal up to rounding may be in another order.
        torch.testing.assert_close(prediction.scores, expected[image].scores, rtol=0.02, atol=0)
    torch.testing.assert_close(compiled[2].boxes, compiled[0].boxes, rtol=0, atol=0.5)
    assert (compiled[1].boxes - compiled[0].boxes).abs().max() > 1


def test_losses_follow_those_of_the_cpu(gpu, tmp_path):
    needs_cuda(gpu)
    curves = []
    for device in (gpu, torch.device("cpu")):
        run, batch = quickstart_run("detr", device, tmp_path)
        for module in run.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        curves.append([])
        for _ in range(10):
            step = next_step(run, iter([batch]))
            curves[-1].append(float(sum(step.losses[0].values())))
    assert curves[0] == pytest.approx(curves[1], rel=1e-2) and curves[0][-1] < curves[0][0]


def test_ddp_with_one_rank_has_the_gradients_of_the_plain_model(gpu, tmp_path, process_group):
    gradients = []
    for parallel in (False, True):
        run, batch = quickstart_run("detr", gpu, tmp_path)
        batch = batch.to(gpu)
        model = DistributedDataParallel(run.model.eval()) if parallel else run.model.eval()
        losses = run.criterion(model(**training_inputs(run.model, batch)), batch.targets)
        sum(losses.values()).backward()
        gradients.append([p.grad for p in run.parameters if p.grad is not None])
    for alone, shared in zip(*gradients, strict=True):
        torch.testing.assert_close(shared, alone, rtol=1e-3, atol=1e-5)


def test_fsdp_with_one_rank_takes_the_steps_of_the_plain_model(gpu, tmp_path, process_group):
    def move(module):
        module.to(gpu)
        return shard(module, gpu) if isinstance(module, DETR) else module

    states = []
    for sharded in (False, True):
        settings = dict(move=move, strategy="fsdp") if sharded else {}
        run, batch = quickstart_run("detr", gpu, tmp_path, **settings)
        run.model.eval()
        next_step(run, iter([batch]))
        states.append(get_model_state_dict(run.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-3, atol=2e-4, msg=name)


def test_synchronized_batch_norm_of_one_rank_is_a_batch_norm(gpu, process_group):
    needs_cuda(gpu)
    torch.manual_seed(0)
    plain = torch.nn.BatchNorm2d(8).to(gpu)
    synchronized = convert_sync_batchnorm(torch.nn.Sequential(BatchNormAct2d(8, apply_act=False)))[0].to(gpu)
    images = torch.randn(4, 8, 16, 16, device=gpu)
    results = []
    for norm in (plain, synchronized):
        inputs = images.clone().requires_grad_()
        # The function with which several ranks gather their statistics; of one rank, the module leaves it out.
        output = (
            norm(inputs)
            if norm is plain
            else SyncBatchNorm.apply(
                inputs, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps, 0.1, dist.group.WORLD, 1
            )
        )
        output.square().mean().backward()
        results.append((output, inputs.grad, norm.running_mean, norm.running_var))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def test_channels_last_predicts_the_same(gpu, tmp_path):
    run, batch = quickstart_run("mask2former_instance", gpu, tmp_path)
    inputs = batch.to(gpu).inputs
    with torch.no_grad():
        expected = run.model.eval()(**inputs)
        got = run.model.to(memory_format=torch.channels_last)(**inputs)
    torch.testing.assert_close(got["pred_masks"], expected["pred_masks"], rtol=1e-2, atol=1e-3)


def test_images_are_transferred_as_bytes_from_pinned_memory(gpu, tmp_path):
    needs_cuda(gpu)
    _, batch = quickstart_run("detr", gpu, tmp_path)
    pinned = batch.pin_memory()
    assert pinned.inputs["images"].is_pinned() and pinned.inputs["images"].dtype == torch.uint8
    assert torch.equal(pinned.to(gpu).inputs["images"].cpu(), batch.inputs["images"])


@pytest.mark.parametrize("first", ["here", "elsewhere"])
def test_run_can_be_resumed_on_another_device(first, gpu, tmp_path):
    devices = [gpu.type, "cpu"] if first == "here" else ["cpu", gpu.type]
    begun = vitkit.train("quickstart/detr", run_dir=tmp_path / "run", device=devices[0], **TINY, **{"train.epochs": 1})
    saved = tmp_path / "run" / "config.json"
    saved.write_text(saved.read_text().replace('"epochs": 1', '"epochs": 2'))
    resumed = vitkit.train(resume=begun.path, device=devices[1])
    assert len(resumed.history) == 2 and "bbox/AP" in resumed.metrics


def test_out_of_memory_names_the_batch_and_memory_savings(gpu, tmp_path):
    needs_cuda(gpu)
    run, batch = quickstart_run("detr", gpu, tmp_path)
    batch.inputs = {name: x.repeat_interleave(64, -1).repeat_interleave(64, -2) for name, x in batch.inputs.items()}
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        with pytest.raises(TrainingError, match=r"images_per_gpu") as error:
            next_step(run, iter([batch]))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "4096x4096" in str(error.value)
