"""Builds the parts that a config names, through the registries: data, model, criterion, optimizer and schedule."""

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from timm.layers.norm_act import convert_sync_batchnorm
from torch import nn

from vitkit.config.check import COMMAND_LINE
from vitkit.config.load import Config
from vitkit.data.loading.settings import DataSettings
from vitkit.data.loading.splits import follow_keypoints, match_classes, match_record
from vitkit.distributed import broadcast_object, failing_together, first_rank_first, is_main, world_size
from vitkit.engine.parallel import shard
from vitkit.engine.preparation import Preparation
from vitkit.engine.settings import TrainSettings
from vitkit.errors import ConfigError, DataError
from vitkit.nn.activation_checkpointing import enable_activation_checkpointing
from vitkit.ops.images import in_channels
from vitkit.protocols.criterion import Criterion
from vitkit.protocols.dataset import Dataset
from vitkit.protocols.model import Model, child
from vitkit.registry import CRITERIA, MODELS, Spec, nearest, parameters_of
from vitkit.structures import KeypointInfo
from vitkit.text.vocabulary import SPACE, Vocabulary, set_vocabularies, vocabularies_from_json, vocabularies_of
from vitkit.text_format import pluralize
from vitkit.weights import load_pretrained, load_weights
from vitkit.weights.loading import InitialWeights
from vitkit.weights.locate import BACKBONE_WEIGHTS, Located
from vitkit.weights.pretrained import load_backbone, pretraining_run
from vitkit.weights.tokenizer_files import find_tokenizer

logger = logging.getLogger("vitkit")


def build_datasets(
    data: DataSettings, resumed: Located | None = None, init: Located | None = None
) -> tuple[Dataset, Dataset]:
    """Build the training and the validation dataset, which gets the classes of the training data; these are numbered as
    in the checkpoint that is resumed, and keypoints as in the weights that the run starts from."""
    train_set = data.dataset("train")
    if resumed is not None:
        match_record(train_set, resumed.metadata, resumed=resumed)
    elif init is not None:
        follow_keypoints(train_set, init.metadata)
    val_set = data.dataset("val")
    match_classes(train_set, val_set)
    if train_set.num_objects == 0:
        crowds = ""
        if train_set.num_crowds:
            crowds = f": all {train_set.num_crowds} are crowd regions (iscrowd: 1). If they are single objects: "
            crowds += f"vitkit data convert {train_set.annotation_file} --fix crowds --out NEW.json"
        raise DataError(f"data.train: none of its images has a usable object, so there is nothing to learn{crowds}.")
    return train_set, val_set


def share_vocabularies(
    train_set: Dataset, val_set: Dataset, checkpoint: Located | None, spec: Spec, *, resumed: bool = False
) -> dict[str, Vocabulary]:
    """Set one vocabulary per side for text datasets, and return the vocabularies; {} for other datasets.

    They come from the checkpoint that provides the weights, with the words of new phrases, or are the tokenizer of a
    text-prompted detector, or else are built from the training text by the first rank.

    Args:
        spec: the config's `model` section, which may name the tokenizer.
        resumed: whether the checkpoint is that of the run itself, whose words cannot change.
    Raises:
        DataError: a resumed run has prompts with other words.
    """
    if not train_set.has_vocabularies:
        return {}
    saved = None
    with failing_together():
        if is_main() and checkpoint:
            saved = _with_new_words(checkpoint, train_set, resumed=resumed)
        if is_main() and not saved:
            use_tokenizer(train_set, spec)
            saved = vocabularies_of(train_set)
    texts = {side: vocabulary.to_json() for side, vocabulary in (saved or {}).items()}
    vocabularies = vocabularies_from_json(broadcast_object(texts))
    for dataset in (train_set, val_set):
        set_vocabularies(dataset, vocabularies)
    return vocabularies


def _with_new_words(checkpoint: Located, dataset: Dataset, *, resumed: bool) -> dict[str, Vocabulary]:
    """Return a checkpoint's vocabularies; one of words also gets those that only the dataset's prompts have."""
    saved = vocabularies_from_json(checkpoint.metadata.get("vocabularies"), str(checkpoint))
    if dataset.prompts is None or "target" not in saved or saved["target"].kind != "word":
        return saved
    tokens, learned = saved["target"].tokens, dataset.prompts.learn_vocabulary(dataset)
    if new := [token for token in learned.tokens if token not in tokens]:
        message = f"{checkpoint} does not know these words of the prompts: {' '.join(new).replace(SPACE, '')[:200]}"
        if resumed:
            raise DataError(f"{message}. To learn them, start a new run from its weights: --init {checkpoint}.")
        logger.info("%s; they get vectors of their own", message)
        saved["target"] = Vocabulary("word", [*tokens, *new], lowercase=saved["target"].lowercase)
    return saved


def use_tokenizer(dataset: Dataset, spec: Spec) -> bool:
    """Make a dataset with prompts encode with the tokenizer that a config's `model` section names, if it names one;
    return whether it does.

    Raises:
        CheckpointError: the tokenizer's file is missing or damaged.
    """
    tokenizer = spec.get("tokenizer") if isinstance(spec, Mapping) else None
    if dataset.prompts is None or tokenizer is None:
        return False
    dataset.target_vocabulary = find_tokenizer(tokenizer)
    return True


def collect_dataset_metadata(dataset: Dataset, vocabularies: Mapping[str, Vocabulary]) -> dict[str, Any]:
    """Return the classes and vocabularies that a checkpoint needs for the model to be used without the dataset."""
    about = {"classes": dataset.classes, "category_ids": dataset.category_ids, "things": dataset.things}
    metadata: dict[str, Any] = {name: value for name, value in about.items() if value is not None}
    if dataset.keypoints is not None:
        metadata["keypoints"] = dataset.keypoints.to_json()
    if vocabularies:
        metadata["vocabularies"] = {side: vocabulary.to_json() for side, vocabulary in vocabularies.items()}
    return metadata


def build_model(
    spec: Spec,
    *,
    classes: Sequence[str] | None = None,
    things: Sequence[bool] | None = None,
    keypoints: KeypointInfo | None = None,
    vocabularies: Mapping[str, Vocabulary] | None = None,
) -> Model:
    """Build a config's `model` section.

    Args:
        spec: its `num_classes` and `things`, which official configs set to those of the published checkpoint, are used
            if `classes` is None.
        classes: the dataset's class names, whose number sets the size of the model's head; None leaves it to the spec.
        things: for each class, whether it has instances, for models with such an argument; None: those in the spec, or
            all.
        keypoints: the dataset's keypoints, for models with an argument `num_keypoints`, whose heads they size, or
            `keypoint_sigmas`; None leaves these to the spec.
        vocabularies: those of the text that the model reads ("source") and writes ("target"), for models with such
            arguments.
    Raises:
        ConfigError: the section is invalid.
    """
    if classes is None and not vocabularies:
        return _build(spec)
    parameters = parameters_of(MODELS.resolve(spec)[0])
    if vocabularies:
        if "tokenizer" in parameters and isinstance(spec, Mapping):  # by name in the config
            stated = {name: value for name, value in spec.items() if name != "tokenizer"}
            return _build(stated, tokenizer=vocabularies["target"])
        named = {f"{side}_vocabulary": vocabulary for side, vocabulary in vocabularies.items()}
        return _build(spec, **{name: vocabulary for name, vocabulary in named.items() if name in parameters})
    classes = classes or ()
    stated = dict(spec) if isinstance(spec, Mapping) else {"type": spec}
    num_classes = stated.pop("num_classes", len(classes))
    # A model that takes a prompt has no classes.
    arguments: dict[str, Any] = {"num_classes": len(classes)} if "num_classes" in parameters else {}
    if "things" in parameters:
        same_classes = num_classes == len(classes)
        stated_things = stated.pop("things", None)
        arguments["things"] = list(things) if things is not None else stated_things if same_classes else None
    if keypoints is not None:
        sizes = {"num_keypoints": len(keypoints.names), "keypoint_sigmas": list(keypoints.sigmas)}
        arguments |= {name: value for name, value in sizes.items() if name in parameters}
        stated = {name: value for name, value in stated.items() if name not in sizes}
    return _build(stated, **arguments)


def _build(spec: Spec, **arguments: Any) -> Model:
    model: Model = MODELS.build(spec, **arguments)
    return model


def build_model_for(config: Mapping[str, Any], dataset: Dataset, vocabularies: Mapping[str, Vocabulary]) -> Model:
    """Build a config's model for the classes, or the vocabularies, of a dataset.

    Raises:
        ConfigError: the `model` section is invalid, its backbone takes images of other channels than the data's, or the
            command line requests another number of classes.
    """
    classes = dataset.classes
    origins = config.origins if isinstance(config, Config) else {}
    if classes is not None and origins.get("model.num_classes") == COMMAND_LINE:
        num_classes = config["model"]["num_classes"]
        if num_classes != len(classes):
            raise ConfigError(
                f"model.num_classes={num_classes}, but the dataset has {pluralize(len(classes), 'classes')} "
                f"({', '.join(list(classes)[:5])}{', …' if len(classes) > 5 else ''}). Leave model.num_classes out: "
                "the dataset's classes size the model."
            )
    check_prompts(config["model"], dataset)
    model = build_model(
        config["model"], classes=classes, things=dataset.things, keypoints=dataset.keypoints, vocabularies=vocabularies
    )
    backbone, channels = child(model, "backbone"), config["data"].get("channels")
    if backbone is not None and in_channels(backbone) != (channels or 3):
        raise ConfigError(
            f"model.backbone.in_channels={in_channels(backbone)}, but data.channels={channels} gives images with "
            f"{channels or '3'} channels. Set both to the number of channels of the images."
        )
    return model


def check_prompts(spec: Spec, dataset: Dataset) -> None:
    """Check that a dataset has prompts if a config's model reads them, and only then.

    Raises:
        ConfigError: `data.prompts` is missing, or should be.
    """
    constructor = MODELS.resolve(spec, "model")[0]
    reads_prompts = "prompt" in parameters_of(getattr(constructor, "forward", constructor))
    if reads_prompts and dataset.prompts is None and dataset.collate is None:
        raise ConfigError(
            f"data.prompts: not set, and {constructor.__name__} looks for what prompts name. Set "
            "data.prompts=dict(negatives=85) to make them of each image's classes and some others, or negatives=None "
            "for all classes in every prompt (see vitkit/data/datasets/README.md)."
        )
    if dataset.prompts is not None and not reads_prompts:
        raise ConfigError(f"data.prompts: {constructor.__name__} reads no prompts. Leave it out.")


def build_criterion(spec: Spec, classes: Sequence[str] | None, dataset: Dataset | None = None) -> Criterion:
    """Build a config's `criterion` section; its `class_weights` may be by name.

    Args:
        classes: names of the dataset's classes; None if it has none.
        dataset: the training dataset, whose images are counted by class for `federated_classes`, and whose keypoints
            give a criterion its `keypoint_sigmas`, if it has this argument.
    Raises:
        ConfigError: the section is invalid, or `class_weights` are not for these classes.
    """
    criterion: Criterion
    if not isinstance(spec, Mapping):
        criterion = CRITERIA.build(spec)
        return criterion
    if spec.get("class_weights") is not None:
        spec = {**spec, "class_weights": _in_class_order(spec["class_weights"], classes or ())}
    if dataset is not None and spec.get("federated_classes") is not None and spec.get("image_counts") is None:
        spec = {**spec, "image_counts": _count_images(dataset)}
    keypoints, parameters = None if dataset is None else dataset.keypoints, parameters_of(CRITERIA.resolve(spec)[0])
    if keypoints is not None and "keypoint_sigmas" in parameters and spec.get("keypoint_sigmas") is None:
        spec = {**spec, "keypoint_sigmas": list(keypoints.sigmas)}
    criterion = CRITERIA.build(spec)
    return criterion


def _count_images(dataset: Dataset) -> list[int]:
    """Return the number of training images that show each class."""
    if (pairs := dataset.image_classes()) is None:
        raise ConfigError(
            f"criterion.federated_classes: {type(dataset).__name__} does not list the classes in its images. Give "
            "criterion.image_counts, the number of images of each class."
        )
    images, labels = pairs
    counted = labels[np.isin(images, dataset.training_indices())]
    return [int(count) for count in np.bincount(counted, minlength=len(dataset.classes or ()))]


def _in_class_order(weights: Any, classes: Sequence[str]) -> list[float]:
    """Return the weights in the order of the classes."""
    if isinstance(weights, Mapping):
        for name in weights:
            if name not in classes:
                raise ConfigError(
                    f"criterion.class_weights: the data has no class {name!r}. {nearest(str(name), classes)}"
                )
        return [weights.get(name, 1.0) for name in classes]
    if not isinstance(weights, list | tuple):
        raise ConfigError(f"criterion.class_weights: got {weights!r}; expected {{'NAME': 2.0}}, or a list.")
    if len(weights) != len(classes):
        raise ConfigError(
            f"criterion.class_weights: got {pluralize(len(weights), 'weights')}; the data has "
            f"{pluralize(len(classes), 'classes')}. Give one for each, or name the classes: {{'NAME': 2.0}}."
        )
    return list(weights)


def build_criterion_for(config: Mapping[str, Any], model: Model, dataset: Dataset | None = None) -> Criterion:
    """Build a config's criterion, for a model and the training dataset.

    Raises:
        ConfigError: the `criterion` section is invalid, or its class loss is for other logits than the model's.
    """
    criterion = build_criterion(config["criterion"], dataset.classes if dataset else None, dataset)
    if model.class_activation is None or criterion.class_activation is None:
        return criterion
    if criterion.class_activation != model.class_activation:
        logits, losses = {
            "softmax": ('a softmax with "no object"', "'cross_entropy'"),
            "sigmoid": ("a sigmoid per class", "'focal', 'varifocal', 'mal' or 'iou_aware'"),
        }[model.class_activation]
        raise ConfigError(
            f"criterion.class_loss={criterion.class_loss!r}: {type(model).__name__} predicts classes by {logits}. "
            f"Expected {losses}, or another model.type."
        )
    return criterion


def load_initial_weights(model: Model, spec: Spec, init: InitialWeights | None, classes: Sequence[str] | None) -> None:
    """Load the initial weights of a new run: those of `--init` or `--init-partial`, or of a pretrained backbone; `spec`
    is the config's `model` section. Of a run without labels only its backbone is of use to others."""
    backbone: Any = child(model, "backbone")
    with first_rank_first():
        takes_backbone = backbone is not None and model.trained_backbone is None
        run = pretraining_run(init.weights) if init and takes_backbone else None
        if run is not None:
            load_backbone(backbone, str(run))
            logger.info("init: only the newest backbone (%s), as %s was trained without labels", BACKBONE_WEIGHTS, run)
        elif init:
            how: dict[str, Any] = dict(class_map=init.class_map, trained_classes=init.classes, partial=init.partial)
            report = load_weights(model, init.weights, classes=classes, new_class_head=True, spec=spec, **how)
            logger.info("%s", report.table(model.state_dict()) if init.partial else report)
        else:
            source = load_pretrained(model)
            logger.info("pretrained: %s", f"weights from {source}" if source else "none, all weights are random")


def place_model(
    model: nn.Module, settings: TrainSettings, device: torch.device, preparations: Sequence[Preparation] = ()
) -> tuple[nn.Module, nn.Module | None]:
    """Move the model to the device, with the memory format, batch norms and sharding that the settings specify, and
    finish its preparations.

    Returns:
        the model; and if it is sharded and has a moving average, a copy for that, sharded alike.
    Raises:
        ConfigError: the model cannot be sharded.
    """
    if settings.activation_checkpointing:
        enable_activation_checkpointing(model)
    if settings.sync_batch_norm and world_size() > 1:
        if device.type == "cpu":
            logger.warning(
                "train.sync_batch_norm: torch synchronizes batch norms on GPUs only; here each process computes the "
                "statistics of its own batches."
            )
        else:
            model = convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    for preparation in preparations:  # after batch norms were replaced
        preparation.finish(model)
    if device.type == "cpu" and settings.precision != "fp32":
        from vitkit.kernels.convolution.narrow import compute_narrow_maps_in_float32  # only half precision needs it

        compute_narrow_maps_in_float32(model)
    if settings.strategy != "fsdp":
        model = model.to(device)
        return model.to(memory_format=torch.channels_last) if settings.channels_last else model, None
    if isinstance(model, Model) and model.student_backbone is not None:
        raise ConfigError(
            "train.strategy=fsdp: self-distillation keeps both student and teacher in full on every GPU. Set "
            "train.strategy=ddp."
        )
    average = shard(deepcopy(model).to(device), device) if settings.ema_decay is not None else None
    return shard(model.to(device), device), average
