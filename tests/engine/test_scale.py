"""Loading and evaluation at COCO's size on 64 ranks: time and memory of each rank, printed with `pytest -s -m slow`."""

import json
import multiprocessing
import os
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.plain_dataset import PlainDataset
from PIL import Image

from vitkit.apps.training.process_group import close_distributed
from vitkit.data.datasets.coco import CocoDetection
from vitkit.data.loading.samplers import EvalBatches, TrainBatches
from vitkit.evaluation.coco import CocoEvaluator

NUM_IMAGES, RANKS, MIB = 118_000, 64, 2**20
PER_IMAGE = 100
"""The number of predictions per image."""


def test_epoch_over_64_ranks_has_every_image_once_in_little_memory():
    groups = np.arange(NUM_IMAGES) % 2
    seen, most, seconds = [], 0, 0.0
    for rank in range(0, RANKS, 9):
        began = time.process_time()
        tracemalloc.start()
        batches = TrainBatches(NUM_IMAGES, batch_size=2, seed=1, groups=groups, rank=rank, world_size=RANKS)
        indices = [index for batch, _ in zip(batches, range(10)) for index, _ in batch]
        most = max(most, tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        seconds = max(seconds, time.process_time() - began)
        assert len(indices) == 20 and len(batches) == -(-NUM_IMAGES // 2 // RANKS)
        seen += indices
    assert len(set(seen)) == len(seen)
    everything = [
        i for rank in range(RANKS) for i in EvalBatches(NUM_IMAGES, batch_size=8, rank=rank, world_size=RANKS).indices
    ]
    assert sorted(everything) == list(range(NUM_IMAGES))
    print(f"order of an epoch, a rank of {RANKS}: {seconds:.2f} s, {most / MIB:.0f} MiB")
    assert most < 40 * MIB


def read_annotations(folder: str, sender) -> None:
    """Read a dataset as each rank does, and send the time and memory that it took and the memory that it keeps."""
    before, began = peak_memory(), time.process_time()
    dataset = CocoDetection(folder, f"{folder}/instances.json")
    took = dict(cpu=time.process_time() - began, memory=peak_memory() - before)
    arrays = [value for value in vars(dataset.table).values() if isinstance(value, np.ndarray)]
    sender.send(dict(took, images=len(dataset), held=sum(array.nbytes for array in arrays)))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="memory is measured from a process that has imported all")
def test_a_million_annotations_are_held_as_arrays(tmp_path: Path):
    images = [dict(id=i, file_name=f"{i:012d}.jpg", height=480, width=640) for i in range(NUM_IMAGES)]
    annotations = [
        dict(
            id=i + 1,
            image_id=i % NUM_IMAGES,
            category_id=i % 80 + 1,
            bbox=[i % 300, i % 200, 20.5, 30.25],
            area=620.1,
            iscrowd=0,
        )
        for i in range(1_000_000)
    ]
    categories = [dict(id=i + 1, name=f"class {i}") for i in range(80)]
    content = dict(images=images, annotations=annotations, categories=categories)
    (tmp_path / "instances.json").write_text(json.dumps(content))
    Image.new("RGB", (640, 480)).save(tmp_path / images[0]["file_name"])
    del images, annotations, content
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=read_annotations, args=(str(tmp_path), sender))
    process.start()
    assert receiver.poll(600), "reading does not end"
    result = receiver.recv()
    process.join()
    print(f"annotations: {result}")
    assert result["images"] == NUM_IMAGES and result["held"] < 100 * MIB


def evaluate_rank(number: int, folder: str, sender) -> None:
    """Predict for a rank's share of the images, gather, and send the time and memory that it took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=number, world_size=RANKS)
    evaluator = CocoEvaluator(
        PlainDataset(annotations=["objects"], category_ids=np.arange(1, 91), image_ids=range(NUM_IMAGES))
    )
    for image_id in range(number, NUM_IMAGES, RANKS):
        prediction = dict(
            labels=torch.full((PER_IMAGE,), image_id % 90),
            boxes_xyxy=torch.full((PER_IMAGE, 4), float(image_id)),
            scores=torch.rand(PER_IMAGE),
        )
        evaluator.update([prediction], [dict(image_id=image_id)])
    dist.barrier()
    before, began, cpu = peak_memory(), time.monotonic(), time.process_time()
    evaluator.gather()
    took = dict(seconds=time.monotonic() - began, cpu=time.process_time() - cpu, memory=peak_memory() - before)
    dist.barrier()
    answers = evaluator.stored_predictions
    size = sum(array.nbytes for answer in answers.values() for array in answer[:3])
    right = all(answer.category_ids[0] == image_id % 90 + 1 for image_id, answer in answers.items())
    sender.send(dict(took, images=len(answers), ordered=list(answers) == sorted(answers), size=size, right=right))
    close_distributed()


def peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    import resource  # only available on Unix

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="64 processes that each import torch would take too long")
def test_the_main_rank_of_64_gathers_the_predictions_for_118000_images_in_bounded_memory(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    ranks = [
        context.Process(target=evaluate_rank, args=(number, str(tmp_path), sender), daemon=True)
        for number, (_, sender) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    results = []
    for receiver, _ in pipes:
        assert receiver.poll(600), "the ranks wait for each other"
        results.append(receiver.recv())
    main, others = results[0], results[1:]
    print(f"main: {main}")
    print(f"others: {max(r['memory'] for r in others) / MIB:.0f} MiB, {max(r['cpu'] for r in others):.1f} s")
    assert main["images"] == NUM_IMAGES and main["right"] and main["ordered"]
    # The bound includes the arrays, Python's overhead for each of them, and data in transfer.
    assert main["size"] == NUM_IMAGES * PER_IMAGE * (8 + 16 + 4) and main["memory"] < 2 * main["size"]
    assert all(result["memory"] < 64 * MIB for result in others)
