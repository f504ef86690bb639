"""Loads weights from any checkpoint into any model, converting official key names, and reports what was loaded."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import CheckpointError, ConfigError
from vitkit.model_zoo import converters
from vitkit.model_zoo.converters.key_table import Format
from vitkit.protocols.backbone import Backbone, with_defaults
from vitkit.protocols.model import AdaptsState, Model, child
from vitkit.registry import Spec
from vitkit.text.vocabulary import vocabularies_from_json
from vitkit.text_format import pluralize
from vitkit.weights.class_rows import ClassRows, match_class_rows
from vitkit.weights.contents import classes_of, describe_run, state_dict_of
from vitkit.weights.hidden_settings import check_hidden_settings
from vitkit.weights.locate import Located, Weights, find_weights
from vitkit.weights.query_rows import match_queries
from vitkit.weights.reading import read_checkpoint

logger = logging.getLogger("vitkit")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class InitialWeights:
    """The weights that a run starts from."""

    weights: Located
    """Where they are, see `find_weights`."""
    partial: bool = False
    """Take what fits the model, see `load_weights`."""
    class_map: Mapping[str, str] = field(default_factory=dict)
    """The new names of classes that got others, see `load_weights`."""
    classes: Sequence[str] | None = None
    """The classes of weights that do not name them; None: unknown."""


@dataclass
class LoadReport:
    """The result of `load_weights`."""

    source: str
    converter: str | None = None
    """The official format that was recognized; None if the names were vitkit's own."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reinitialized: list[str] = field(default_factory=list)
    """Class-head entries of the model that were not loaded, because the classes differ."""
    class_rows: ClassRows | None = None
    """Where the classes differ: the classes whose rows of other class-head entries were loaded, by name."""
    unnamed_classes: bool = False
    """Whether class heads were loaded row by row, because the checkpoint does not name its classes."""
    assumed_classes: bool = False
    """Whether the checkpoint of a toolbox does not name its classes, and has as many as COCO."""
    new_parts: list[str] = field(default_factory=list)
    """Prefixes of the model's parts that were not loaded, because the checkpoint has no entries for them."""
    left_out: list[str] = field(default_factory=list)
    """Entries of a backbone that its feature maps do not depend on: a classifier's head and last norm, blocks after the
    last map."""
    not_finite: list[str] = field(default_factory=list)
    """Loaded entries that contain NaN, or infinity if they are parameters."""
    misshapen: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    """Entries of a partial load that were not loaded: their shapes in the checkpoint and in the model."""
    loaded: list[str] = field(default_factory=list)
    """The loaded entries."""

    def table(self, expected: Mapping[str, Tensor]) -> str:
        """Return a table of the model's entries, loaded or not, part by part and then by name."""
        parts: dict[str, list[str]] = {}
        for key in expected:
            parts.setdefault(".".join(key.split(".")[:2]), []).append(key)
        loaded, width = set(self.loaded), max(map(len, parts), default=0)
        share = sum(expected[key].numel() for key in loaded) / max(sum(v.numel() for v in expected.values()), 1)
        lines = [
            f"{self.source}{f' ({self.converter})' if self.converter else ''}: {len(loaded)} of the model's "
            f"{len(expected)} entries loaded, {share:.0%} of its values",
            f"  {'part':{width}}  loaded  of",
        ]
        lines += [
            f"  {part:{width}}  {sum(key in loaded for key in keys):6}  {len(keys)}" for part, keys in parts.items()
        ]
        lines += [
            f"  other shape: {k}: checkpoint {theirs}, model {ours}" for k, (theirs, ours) in self.misshapen.items()
        ]
        others = {
            "new, for other classes": self.reinitialized,
            "new, not in the checkpoint": self.missing,
            "in the checkpoint only": [*self.unexpected, *self.left_out],
        }
        for kind, keys in others.items():
            lines += [f"  {kind}: {key}" for key in keys]
        return "\n".join(lines) + self._class_table()

    def __str__(self) -> str:
        parts = [f"loaded {self.source}"]
        if self.converter:
            parts.append(f"recognized as {self.converter}")
        if self.reinitialized:
            parts.append(f"classes differ, so these are newly initialized: {', '.join(self.reinitialized)}")
        if self.unnamed_classes:
            parts.append("it does not name its classes, so rows of the class head are taken by their numbers")
        if self.assumed_classes:
            parts.append("it does not name its classes; as they are as many, they are taken for COCO's")
        if self.new_parts:
            parts.append(
                f"not in it, so these are newly initialized: {', '.join(part.rstrip('.') for part in self.new_parts)}"
            )
        if self.left_out:
            parts.append(f"left out, because feature maps do not need it: {_shorten(_modules(self.left_out))}")
        if self.not_finite:
            parts.append(f"NaN or infinite: {_shorten(self.not_finite)}")
        for kind, keys in (("missing", self.missing), ("unexpected", self.unexpected)):
            if keys:
                parts.append(f"{len(keys)} {kind}: {_shorten(keys)}")
        return "; ".join(parts) + self._class_table()

    def _class_table(self) -> str:
        return "" if self.class_rows is None else f"\n  rows of the class head, by name:\n{self.class_rows}"

    def compare(self, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Record the keys that only one of the two state dicts has, except for the batch counters of batch norms."""
        # Batch counters mean nothing to frozen norms, and hardly matter to others.
        counters, fresh = "num_batches_tracked", (*self.reinitialized, *self.new_parts)
        self.missing = [k for k in expected if k not in state and not k.startswith(fresh) and not k.endswith(counters)]
        self.unexpected = [k for k in state if k not in expected and not k.endswith(counters)]


def load_weights(
    model: nn.Module,
    source: Weights | Mapping[str, Any],
    *,
    classes: Sequence[str] | None = None,
    new_class_head: bool = False,
    class_map: Mapping[str, str] | None = None,
    trained_classes: Sequence[str] | None = None,
    strict: bool = True,
    partial: bool = False,
    spec: Spec | None = None,
) -> LoadReport:
    """Load weights into `model`, whatever names they were published under.

    Args:
        source: a checkpoint file, the folder of a run, a name in the model zoo's index ("detr_r50", downloaded once), a
            folder of the transformers library or a repository of its hub ("hf:OWNER/NAME"), or a state dict (wrapped as
            {"model": ...}). From vitkit's own checkpoints the moving average is loaded if there is one; low-rank
            updates are merged into the weights that they were trained on.
        classes: the model's class names. If the checkpoint names its classes and they differ, the rows of class heads
            are taken by name, in whatever order; a class that it does not have is an error.
        new_class_head: the weights are a start for training: classes that the checkpoint does not have keep the rows
            of the model's fresh class head, instead of raising; likewise its `new_parts`, if the checkpoint has no
            entries for them; and queries of which the model has more, see `match_queries`.
        class_map: with `classes`, the new name of each class of the checkpoint that got another, see
            `match_class_rows`.
        trained_classes: the classes of weights that do not name them, as official ones, in the order of their head.
        strict: raise an error for missing or unexpected keys instead of only reporting them. For a backbone of feature
            maps, a classifier's head and blocks after the last map do not count as unexpected, nor the norms of the
            maps as missing; the report lists them.
        partial: load what has the name and shape of an entry of the model, whatever else differs; the report lists the
            rest.
        spec: the `model` section of the model's config, to warn of settings that the weights were trained with and do
            not show.
    Raises:
        CheckpointError: the file cannot be read, does not fit the model, or has no entries of the model; or the model
            is fused.
        ConfigError: there are no weights of that name, see `find_weights`; or class names, or `class_map`, are unclear.
    """
    if isinstance(model, Model) and model.is_fused:
        raise CheckpointError(
            "load_weights: the model is fused (Model.fuse), so it has no norms to load weights into. Load them into "
            "the model before fusing it."
        )
    checkpoint, name, zoo_name = _read(source)
    stored = state_dict_of(checkpoint, name, parts=model.training_parts if isinstance(model, Model) else ())
    state, official = _rename(stored, model, classes, start=new_class_head)
    report, expected = LoadReport(name, official and official.name), model.state_dict()
    if new_class_head:
        _match_tokens(model, state, expected, checkpoint.get("vocabularies"))
    described = converters.describe(stored, official) if official else converters.describe_other(stored)
    origin = describe_run(checkpoint) or described
    if not partial and not _is_of_another_model(model, state, expected):
        _check_variant(name, model, state, expected)
    elif not partial and strict:
        report.compare(state, expected)
        raise CheckpointError(_mismatch(report, model, state, expected, [], origin))
    named = classes_of(checkpoint, name)
    if stated := named or (official and official.classes):
        trained_classes = stated
        report.assumed_classes = not named and official is not None and official.name in converters.TOOLBOX_MODELS
    elif trained_classes and not _have_rows_of(trained_classes, classes, model, state, expected):
        trained_classes = None
    fresh = _take_class_rows(report, model, state, expected, trained_classes, classes, class_map)
    if fresh and not new_class_head:
        raise CheckpointError(_other_classes(report, state, expected, trained_classes, classes, origin))
    _check_trainable(name, model, fresh)
    state = {key: value for key, value in state.items() if key not in report.reinitialized}
    new_parts = tuple(model.new_parts) if new_class_head and isinstance(model, Model) else ()
    if not any(key.startswith(new_parts) for key in state):
        report.new_parts = list(new_parts)
    unknown = (key.split(".") for key in expected if key.startswith("training_queries.") and key not in state)
    report.new_parts += dict.fromkeys(f"{start}.{name}." for start, name, *_ in unknown)
    state = _without_unused(model, state, expected, report)
    state = _keep_fitting(report, model, state, expected, origin, strict=strict, partial=partial)
    check_hidden_settings(model, checkpoint, name, spec=spec, zoo_name=zoo_name, only_start=new_class_head)
    model.load_state_dict(state, strict=False)
    report.loaded = list(state)
    _warn_of_not_finite(report, model, state)
    return report


def _read(source: Weights | Mapping[str, Any]) -> tuple[Mapping[str, Any], str, str | None]:
    """Return a checkpoint, its name, and its name in the model zoo if it is listed there."""
    if isinstance(source, Mapping):
        return source, "the given state dict", None
    located = find_weights(source)
    return read_checkpoint(located.path), str(located.path), located.zoo_name


def _rename(
    stored: Mapping[str, Tensor], model: nn.Module, classes: Sequence[str] | None, *, start: bool
) -> tuple[dict[str, Tensor], Format | None]:
    """Return a checkpoint's tensors by the model's names and in its shapes, and the official format that they had;
    `start`: see `match_queries`."""
    state, official = dict(stored), None
    if not _fits(model, state) and not with_defaults(model, Backbone).renames_itself:
        state, official = converters.convert_official(state, model, classes)
    if isinstance(model, Model):
        match_queries(model, state, model.state_dict(), start=start)
    for prefix, module in model.named_modules():
        if isinstance(module, AdaptsState):
            module.adapt_state(state, f"{prefix}." if prefix else "")
    return state, official


def _match_tokens(model: nn.Module, state: dict[str, Tensor], expected: Mapping[str, Tensor], saved: Any) -> None:
    """Order the vectors of words as the model's vocabulary does, by name; words that only the model has keep its."""
    theirs, ours = vocabularies_from_json(saved).get("target"), model.vocabulary if isinstance(model, Model) else None
    if theirs is None or ours is None or "tokenizer" in (theirs.kind, ours.kind) or theirs.tokens == ours.tokens:
        return
    row_of = {token: row for row, token in enumerate(theirs.tokens)}
    kept = [(row, row_of[token]) for row, token in enumerate(ours.tokens) if token in row_of]
    for key in [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)]:
        if key in state and (len(state[key]), len(expected[key])) == (len(theirs), len(ours)):
            rows, (to, of) = expected[key].clone(), zip(*kept)
            rows[[*to]] = state[key][[*of]].to(rows)
            state[key] = rows


def _fits(model: nn.Module, state: Mapping[str, Tensor]) -> bool:
    # Batch counters and class heads may be absent; any other missing entry may have a different name.
    optional = _class_head_of(model)
    required = (k for k in model.state_dict() if not k.endswith("num_batches_tracked") and not k.startswith(optional))
    return all(key in state for key in required)


def _class_head_of(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes in `class_head`, see `Model`; a submodule of that name is something else."""
    return tuple(inspect.getattr_static(model, "class_head", ()))


def _is_of_another_model(model: nn.Module, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Whether most of the model's entries are missing outside its backbone, and the parts that may be."""
    optional = ("backbone.", *(model.new_parts if isinstance(model, Model) else ()))
    keys = [key for key in expected if not key.startswith(optional)]
    return sum(key in state for key in keys) < 0.5 * len(keys)


def _check_variant(name: str, model: nn.Module, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Reject weights of another variant of a model that can tell its variants apart, such as Deformable DETR."""
    if not isinstance(model, Model):
        return
    theirs, ours = model.variant_of(state), model.variant_of(expected)
    if theirs and ours and theirs != ours:  # empty for the weights of another kind of model, whose entries differ
        raise CheckpointError(
            f"{name}: a checkpoint of a {type(model).__name__} {theirs} does not fit a model {ours}. Use the "
            "config of its variant."
        )


def _class_entries(model: nn.Module, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the class heads' entries that both have."""
    return [key for key in state if key in expected and key.startswith(_class_head_of(model))]


def _have_rows_of(
    theirs: Sequence[str],
    ours: Sequence[str] | None,
    model: nn.Module,
    state: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
) -> bool:
    """Whether a checkpoint's class heads have as many rows for its classes as the model's have for the model's."""
    difference = len(theirs) - len(ours or ())
    return all(len(state[k]) - len(expected[k]) == difference for k in _class_entries(model, state, expected))


def _take_class_rows(
    report: LoadReport,
    model: nn.Module,
    state: dict[str, Tensor],
    expected: Mapping[str, Tensor],
    trained_classes: Sequence[str] | None,
    classes: Sequence[str] | None,
    class_map: Mapping[str, str] | None,
) -> list[str]:
    """If the checkpoint's classes differ from the model's, take the rows of its class heads by name, in place; return
    and record the entries that are new, wholly or for some classes.

    Raises:
        ConfigError: class names, or `class_map`, are unclear.
    """
    keys = _class_entries(model, state, expected)
    if class_map and not (trained_classes and classes and keys):
        lacks = f"{type(model).__name__} has no class head" if trained_classes and classes else "no names of classes"
        raise ConfigError(f"{report.source}: {lacks}, so there is nothing to map by class_map {dict(class_map)}.")
    # Sizes beyond the first depend on the model, not on its classes: `_mismatch` reports those.
    differ = any(state[key].shape[:1] != expected[key].shape[:1] for key in keys)
    if keys and trained_classes and classes and (list(trained_classes) != list(classes) or class_map):
        rows = match_class_rows(trained_classes, classes, class_map)
        taken = {key: rows.take(key, state[key], expected[key], expected) for key in keys}
        report.reinitialized = [key for key, value in taken.items() if value is None]
        state |= {key: value for key, value in taken.items() if value is not None}
        if len(report.reinitialized) < len(keys):
            report.class_rows = rows
        return keys if rows.new else [key for key in report.reinitialized if state[key].is_floating_point()]
    report.unnamed_classes = bool(keys and classes and not differ and not trained_classes)
    report.reinitialized = keys if differ else []
    return report.reinitialized


def _check_trainable(name: str, model: nn.Module, keys: Sequence[str]) -> None:
    """Check that parameters that start from random values, wholly or in some rows, will be trained; raise a
    CheckpointError if parameters would be initialized randomly and stay frozen."""
    trained = {key: parameter.requires_grad for key, parameter in model.named_parameters()}
    frozen = [key for key in keys if not trained.get(key, True)]
    if frozen:
        raise CheckpointError(
            f"{name}: its classes differ from the model's, so {_shorten(frozen)} would be newly initialized, but "
            "are not trained. Start from a checkpoint of the model's classes, or train everything "
            "(model.freeze_detr=false)."
        )


def _without_unused(
    model: nn.Module, state: dict[str, Tensor], expected: Mapping[str, Tensor], report: LoadReport
) -> dict[str, Tensor]:
    """Return the entries without those that a backbone's feature maps do not depend on; record these, and what a
    backbone by itself then lacks."""
    part = None if isinstance(model, Backbone) else child(model, "backbone")
    backbone, prefix = with_defaults(model if part is None else part, Backbone), "" if part is None else "backbone."
    unknown = [key.removeprefix(prefix) for key in state if key.startswith(prefix) and key not in expected]
    report.left_out = [f"{prefix}{name}" for name in backbone.entries_to_leave_out(unknown)]
    if report.left_out and part is None:
        lacking = [k for k in expected if k not in state and any(fnmatch(k, p) for p in backbone.optional_weights)]
        report.new_parts += [f"{module}." for module in _modules(lacking)]
    return {key: value for key, value in state.items() if key not in report.left_out}


def _keep_fitting(
    report: LoadReport,
    model: nn.Module,
    state: dict[str, Tensor],
    expected: Mapping[str, Tensor],
    origin: str | None,
    *,
    strict: bool,
    partial: bool,
) -> dict[str, Tensor]:
    """Return the entries that the model has; record the others. Raise a CheckpointError if there are none; or, unless
    loading is partial, one has another shape, or, if it is strict, one is missing or unexpected."""
    if partial:
        for key in [key for key in state if key in expected and state[key].shape != expected[key].shape]:
            report.misshapen[key] = tuple(state.pop(key).shape), tuple(expected[key].shape)
    report.compare(state, expected)
    report.missing = [key for key in report.missing if key not in report.misshapen]
    misshapen = [key for key in state if key in expected and state[key].shape != expected[key].shape]
    if misshapen or (strict and not partial and (report.missing or report.unexpected)):
        raise CheckpointError(_mismatch(report, model, state, expected, misshapen, origin))
    state = {key: value for key, value in state.items() if key in expected}
    if expected and not state:
        raise CheckpointError(_mismatch(report, model, state, expected, [], origin))
    _check_dtypes(report.source, state, expected)
    return state


def _check_dtypes(name: str, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that each tensor has the same kind as the model's: layout, floating point, complex; raise a CheckpointError
    if a tensor has another kind, or no data."""

    # Copying would silently turn integers or complex numbers into floats, or the reverse.
    def kind(tensor: Tensor) -> tuple:
        return tensor.layout, tensor.is_floating_point(), tensor.is_complex()

    for key, value in state.items():
        if value.is_meta and not expected[key].is_meta:
            raise CheckpointError(
                f"{name}: {key} has a shape but no values (device meta). Save the model's own weights."
            )
        if kind(value) != kind(expected[key]):
            raise CheckpointError(
                f"{name}: {key} contains {value.dtype} ({value.layout}), the model's {expected[key].dtype} "
                f"({expected[key].layout}). Get the file again, or convert it."
            )


def _warn_of_not_finite(report: LoadReport, model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Record the entries that contain NaN, and the parameters with infinity (buffers may use it for masking)."""
    parameters = {name for name, _ in model.named_parameters()}
    floats = {key: value for key, value in state.items() if value.is_floating_point() and value.layout == torch.strided}
    report.not_finite = [
        key for key, v in floats.items() if not v.isfinite().all() and (key in parameters or v.isnan().any())
    ]
    if report.not_finite:
        logger.warning(
            f"{report.source}: {len(report.not_finite)} of {len(state)} loaded entries contain NaN or infinity: "
            f"{_shorten(report.not_finite)}. The model's outputs will also be NaN. Get the file again, or use an "
            "earlier checkpoint."
        )


def _mismatch(
    report: LoadReport,
    model: nn.Module,
    state: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    misshapen: list[str],
    origin: str | None,
) -> str:
    """Return an error message about the entries that do not fit, and about what the checkpoint seems to be."""
    common = len(state.keys() & expected.keys())
    lines = [
        f"{report.source} does not fit {type(model).__name__}: {common} of the model's {len(expected)} entries are in "
        "it."
    ]
    if origin:
        lines.append(f"It seems to be {origin}.")
    if common < 0.5 * len(expected) or _is_of_another_model(model, state, expected):
        lines.append(
            "That is another model's checkpoint: use the config that it belongs to (model_zoo/models.md names those of "
            "official ones), or a checkpoint of this one."
        )
    shapes = {key: (tuple(state[key].shape), tuple(expected[key].shape)) for key in misshapen[:5]}
    lines += [f"{key}: checkpoint {theirs}, model {ours}" for key, (theirs, ours) in shapes.items()]
    if report.missing:
        lines.append(f"missing ({len(report.missing)}): {_shorten(report.missing)}")
    if report.unexpected:
        lines.append(f"unexpected ({len(report.unexpected)}): {_shorten(report.unexpected)}")
    if common > len(misshapen):
        lines.append("To load what fits, use --init-partial of `vitkit train`, or partial=True of vitkit.load_weights.")
    return "\n  ".join(lines)


def _other_classes(
    report: LoadReport,
    state: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    trained_classes: Sequence[str] | None,
    classes: Sequence[str] | None,
    origin: str | None,
) -> str:
    """Return an error message that says that the checkpoint's class head is for other classes than the model's."""
    # A damaged file may name the model's classes and have a head of other sizes.
    differ, keys = list(trained_classes or ()) != list(classes or ()), report.reinitialized
    if report.class_rows is not None:
        return (
            f"{report.source}: its class head is for other classes: it was not trained on "
            f"{pluralize(len(report.class_rows.new), 'classes')} of the model, {_shorten(report.class_rows.new)} "
            f"(checkpoint: {_class_names(report.class_rows.theirs)}).{f' It seems to be {origin}.' if origin else ''} "
            "To train them, start from it by vitkit train --init, or load it with new_class_head=True."
        )
    theirs = _class_names(trained_classes) if trained_classes and differ else _shapes(state, keys)
    ours = _class_names(classes) if classes and differ else _shapes(expected, keys)
    return (
        f"{report.source}: its class head is for other classes (checkpoint: {theirs}; model: {ours})."
        f"{f' It seems to be {origin}.' if origin else ''} Use the config of its classes and task; or, to "
        "fine-tune it, load it with new_class_head=True (vitkit train --init does), which initializes only the "
        "class head newly."
    )


def _class_names(names: Sequence[str]) -> str:
    return f"{len(names)} classes {_shorten(names)}"


def _shapes(state: Mapping[str, Tensor], keys: Sequence[str]) -> str:
    return _shorten([f"{key} {tuple(state[key].shape)}" for key in keys])


def _shorten(items: Sequence) -> str:
    return ", ".join(str(item) for item in items[:5]) + (", …" if len(items) > 5 else "")


def _modules(keys: Sequence[str]) -> list[str]:
    """Return the modules that contain the entries, each once."""
    return list(dict.fromkeys(key.rpartition(".")[0] or key for key in keys))
