"""Compares models on the same images: which differences are significant, and which images and classes improved."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitkit.apps.report.images import ImageBudget
from vitkit.apps.report.intervals import (
    Difference,
    Estimate,
    bootstrap_weights,
    difference_over_seeds,
    paired_difference,
)
from vitkit.apps.report.pages import extra_values, prediction_image
from vitkit.apps.report.report import describe_data, write_page
from vitkit.apps.report.sections import Alert, Cell, Change, Details, Gallery, Image, Section, Table, Text, number
from vitkit.config import cfg_diff
from vitkit.errors import ConfigError, DataError
from vitkit.evaluation.bootstrap import SampleStatistics, Scores
from vitkit.evaluation.combined import unused_name
from vitkit.protocols.dataset import Dataset
from vitkit.protocols.evaluator import Evaluator
from vitkit.text_format import pluralize

IMAGE_BYTES = 6_000_000
_RANKED, _CURVES_SIDE = 6, 1800
_DIFFERENCES = (
    "Difference to the first, with the 95 % interval of a paired bootstrap: all models are scored on the same "
    "resampled images. A difference whose interval leaves out zero is significant; one in twenty is "
    "so by chance."
)
_SEEDS = (
    "Difference of the means over runs that differ only in their seeds, with Welch's 95 % interval. It says what "
    "training again may change; the intervals above, what other images may."
)


class Compared(NamedTuple):
    """A model and its evaluation."""

    name: str
    evaluator: Evaluator
    """The evaluator, after `compute`."""
    config: Mapping[str, Any] | None = None


class Comparison(NamedTuple):
    """The metrics of several models on the same samples."""

    names: list[str]
    sample_ids: list[Any]
    differences: list[dict[str, Difference]]
    """For each model but the first: metric -> difference to the first model."""
    by_class: list[dict[str, dict[str, Difference]]]
    """For each model but the first: class -> metric -> difference to the first model."""
    sample_metric: str
    samples: np.ndarray
    """(models, N) value of each image or sentence."""
    lower_is_better: Collection[str]
    """The metrics of which a lower value is better."""
    recipes: list[list[int]]
    """The models by recipe: indices of those whose configs differ only in seeds."""
    over_seeds: list[dict[str, Difference]]
    """For each recipe but the first: metric -> difference of the means over seeds to the first recipe; without an
    interval where one of them has one seed. Empty for a single recipe."""

    def recipe_name(self, recipe: int) -> str:
        """Return the names of a recipe's models."""
        return ", ".join(self.names[k] for k in self.recipes[recipe])

    def seed_warning(self) -> str | None:
        """Return what the intervals over images leave out, if a recipe has one seed or all models are of one."""
        single = [self.recipe_name(k) for k, members in enumerate(self.recipes) if len(members) == 1]
        if len(self.recipes) == 1:
            return "All models differ only in their seeds: what differs is due to chance."
        if not single:
            return None
        return (
            f"One seed of {' and of '.join(single)}: the intervals are those of other images, not of other seeds, "
            "which may change a metric by more. Train each with several (train.seed=1, ...) and compare all runs."
        )


def compare(models: Sequence[Compared]) -> Comparison:
    """Compare models on the same samples.

    Raises:
        ConfigError: an evaluator does not support resampling, or the evaluators are of different kinds.
        DataError: their images or classes differ; the error says how many match.
    """
    by_kind = [_statistics_of(model) for model in models]
    _check_same_samples([(model.name, next(iter(each.values()))) for model, each in zip(models, by_kind)])
    _check_same_objects(models)
    # If one model has no masks, only boxes are compared.
    shared = [kind for kind in by_kind[0] if all(kind in each for each in by_kind)]
    if not shared:
        kinds = " and ".join(", ".join(each) for each in by_kind)
        raise ConfigError(f"compare: the models are evaluated on different things, {kinds}. Evaluate them alike.")
    parts = [[each[kind] for kind in shared] for each in by_kind]
    weights = bootstrap_weights(len(parts[0][0].sample_ids))
    first, *others = [_scores_of(statistics, weights) for statistics in parts]
    # Some metrics, such as boundary IoU, may be computed for only some of the models.
    metrics = [m for m in first.overall if all(m in other.overall for other in others)]
    differences = [{m: paired_difference(first.overall[m], other.overall[m]) for m in metrics} for other in others]
    by_class = [
        {
            name: {m: paired_difference(of_class[m], v) for m, v in other.by_class[name].items() if m in of_class}
            for name, of_class in first.by_class.items()
            if name in other.by_class
        }
        for other in others
    ]
    ranks = [statistics[0].sample_scores() for statistics in parts]
    names = [model.name for model in models]
    values = np.stack([values for _, values in ranks])
    lower = {name for part in models[0].evaluator.parts for name in part.lower_is_better}
    overall = {m: [float(each.overall[m][0]) for each in (first, *others)] for m in metrics}
    for metric, of_all in _extra_metrics(models, overall).items():
        overall[metric] = of_all
        for of_model, value in zip(differences, of_all[1:]):
            change = Estimate(value - of_all[0], float("nan"), float("nan"))
            of_model[metric] = Difference(of_all[0], value, change)
    recipes = _recipes(models)
    over_seeds = [{m: _over_seeds(of_all, recipes[0], other) for m, of_all in overall.items()} for other in recipes[1:]]
    return Comparison(
        names, parts[0][0].sample_ids, differences, by_class, ranks[0][0], values, lower, recipes, over_seeds
    )


def _extra_metrics(models: Sequence[Compared], known: Collection[str]) -> dict[str, list[float]]:
    """Return the further metrics that all models have, which no statistics give intervals."""
    values = [
        {name: value for part in model.evaluator.parts for name, value in extra_values(part).items()}
        for model in models
    ]
    shared = [name for name in values[0] if name not in known and all(name in each for each in values)]
    return {name: [each[name] for each in values] for name in shared}


def _recipes(models: Sequence[Compared]) -> list[list[int]]:
    """Return the indices of the models, those of configs that differ only in seeds together."""
    recipes: list[list[int]] = []
    for k, model in enumerate(models):
        same = next((r for r in recipes if all(_differ_in_seeds(models[j].config, model.config) for j in r)), None)
        if same is None:
            recipes.append([k])
        else:
            same.append(k)
    return recipes


def _differ_in_seeds(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> bool:
    """Whether two configs are known and differ, but only in seeds; those of two checkpoints of a run are equal."""
    if first is None or second is None:
        return False
    keys = cfg_diff(first, second)
    return bool(keys) and all(key.rpartition(".")[2] == "seed" for key in keys)


def _over_seeds(values: Sequence[float], first: Sequence[int], second: Sequence[int]) -> Difference:
    groups = [[values[k] for k in members] for members in (first, second)]
    return Difference(*(float(np.mean(group)) for group in groups), difference_over_seeds(*groups))


def _scores_of(statistics: Sequence[SampleStatistics], weights: np.ndarray) -> Scores:
    """Return the metrics from several statistics of a model; class metrics are from the last one that has them."""
    overall, by_class = {}, {}
    for part in statistics:
        of_part = part.scores(weights)
        overall |= {unused_name(name, overall): values for name, values in of_part.overall.items()}
        for name, values in of_part.by_class.items():
            by_class.setdefault(name, {}).update(values)
    return Scores(overall, by_class)


def _statistics_of(model: Compared) -> dict[str, SampleStatistics]:
    """Return the statistics of a model's evaluators by name."""
    found: dict[str, SampleStatistics] = {}
    for part in model.evaluator.parts:
        found |= {unused_name(name, found): each for name, each in part.named_statistics().items()}
    return found


def _check_same_samples(models: Sequence[tuple[str, SampleStatistics]]) -> None:
    """Check that all models were evaluated on the same images and classes, by the same kind of evaluator.

    Raises:
        ConfigError: the evaluators are of different kinds.
        DataError: the images or classes differ.
    """
    (first_name, first), *others = models
    for name, other in others:
        if type(other) is not type(first):
            kinds = " and ".join(type(each).__name__.removesuffix("Statistics").lower() for each in (first, other))
            raise ConfigError(f"compare: {first_name} and {name} are of different tasks, {kinds}.")
        if other.sample_ids != first.sample_ids:
            raise DataError(
                f"compare: {first_name} was scored on {pluralize(len(first.sample_ids), 'images')} and {name} on "
                f"{len(other.sample_ids)}, of which {len({*first.sample_ids} & {*other.sample_ids})} match. Score them "
                "on the same data, such as by --data."
            )
        classes = [list(each.class_names) for each in (first, other)]
        if classes[0] != classes[1]:
            raise DataError(f"compare: {first_name} has the classes {classes[0][:5]} and {name} {classes[1][:5]}.")


def _check_same_objects(models: Sequence[Compared]) -> None:
    """Raise a DataError if the images of two models have other objects, although their ids are the same."""
    (first_name, first), *others = [(model.name, _objects_of(model.evaluator.dataset)) for model in models]
    for name, objects in others:
        different = [image_id for image_id in first if first[image_id] != objects.get(image_id, first[image_id])]
        if different:
            raise DataError(
                f"compare: {first_name} and {name} were scored on other objects: those of {len(different)} of "
                f"{pluralize(len(first), 'images')} differ, such as those of image {different[0]}. Score them on the "
                "same data, such as by data.val.annotations=FILE data.val.images=DIR, which change every config."
            )


def _objects_of(dataset: Dataset) -> dict[Any, Counter[tuple[Any, ...]]]:
    """Return image id -> its objects, by class, box and whether they are a crowd; {} for data without objects."""
    if "objects" not in dataset.annotations:
        return {}
    truth = dataset.ground_truth()
    names = {category["id"]: category["name"] for category in truth["categories"]}
    objects: dict[Any, Counter[tuple[Any, ...]]] = {image["id"]: Counter() for image in truth["images"]}
    for annotation in truth["annotations"]:
        box = (round(float(value), 1) for value in annotation["bbox"])
        what = names[annotation["category_id"]], bool(annotation.get("iscrowd")), *box
        objects[annotation["image_id"]][what] += 1
    return objects


def is_better(metric: str, difference: Difference, lower_is_better: Collection[str] = ()) -> bool | None:
    """Return whether the second model is better, or None if the difference is not significant.

    Args:
        lower_is_better: the metrics of which a lower value is better.
    """
    if not difference.significant:
        return None
    return (difference.difference.value > 0) != (metric in lower_is_better)


def write_comparison(
    models: Sequence[Compared],
    path: str | Path,
    *,
    config_differences: Sequence[tuple[str, Sequence[str]]] = (),
    curves: np.ndarray | None = None,
) -> Comparison:
    """Write a comparison as an HTML page.

    Args:
        models: at least two models.
        path: path of the HTML file.
        config_differences: key and its value in each model's config.
        curves: a figure of the training curves, (H, W, 3) uint8 RGB.
    Returns:
        the comparison.
    """
    comparison = compare(models)
    names = comparison.names
    sections = []
    if any(model.config is not None for model in models):
        rows = [[key, *values] for key, values in config_differences]
        same = Text("The configs do not differ.")
        sections.append(Section("Configs", [Table(("value", *names), rows) if rows else same]))
    sections.append(Section("Metrics", [_metrics(comparison)], _DIFFERENCES))
    sections.append(Section("Seeds", _seeds(comparison), _SEEDS))
    if comparison.by_class[0]:
        sections.append(Section("Classes", _classes(comparison)))
    if curves is not None:
        text = f"training curves of {', '.join(names)}"
        sections.append(Section("Curves", [Gallery("", [[Image(None, text, pixels=curves)]], long_side=_CURVES_SIDE)]))
    sections.append(Section("Images", _images(models, comparison), _IMAGES.format(comparison.sample_metric)))
    facts = {"models": ", ".join(names), "data": describe_data(models[0].evaluator)}
    images = ImageBudget(models[0].evaluator.dataset, IMAGE_BYTES)
    write_page(path, " against ".join(names), [(sections, images)], facts)
    return comparison


_IMAGES = "By the difference in {} of each image between the last model and the first."


def _columns(first: str, others: Sequence[str]) -> list[str]:
    return ["", first, *(text for name in others for text in (name, "difference"))]


def _row(name: str, metric: str, differences: Sequence[Difference], lower_is_better: Collection[str]) -> list[Cell]:
    """Return a table row: the first model's value of a metric, and for each other model its value and the change."""
    row: list[Cell] = [name, differences[0].first]
    for each in differences:
        row += [each.second, Change(each.difference, is_better(metric, each, lower_is_better))]
    return row


def _metrics(comparison: Comparison) -> Table:
    first, *others = comparison.names
    metrics, lower = comparison.differences[0], comparison.lower_is_better
    rows = [_row(metric, metric, [each[metric] for each in comparison.differences], lower) for metric in metrics]
    return Table(_columns(first, others), rows)


def _seeds(comparison: Comparison) -> list[Table | Alert]:
    """Return the differences of recipes over their seeds, and a warning where there is only one."""
    warning = comparison.seed_warning()
    parts: list[Table | Alert] = [Alert(warning)] if warning else []
    if any(len(members) > 1 for members in comparison.recipes) and comparison.over_seeds:
        first, *others = (comparison.recipe_name(k) for k in range(len(comparison.recipes)))
        lower, of_first = comparison.lower_is_better, comparison.over_seeds[0]
        rows = [_row(m, m, [each[m] for each in comparison.over_seeds], lower) for m in of_first]
        parts.append(Table(_columns(first, others), rows, caption="means over seeds"))
    return parts


def _classes(comparison: Comparison) -> list[Table]:
    """Return a table for each model but the first, with its main metric by class, the largest loss first."""
    first, *others = comparison.names
    parts = []
    for name, of_model in zip(others, comparison.by_class):
        metric = next(iter(next(iter(of_model.values()))))
        ordered = sorted(of_model.items(), key=lambda item: np.nan_to_num(item[1][metric].difference.value))
        rows = [_row(label, metric, [values[metric]], comparison.lower_is_better) for label, values in ordered]
        parts.append(Table(_columns(first, [name]), rows, caption=metric))
    return parts


def _images(models: Sequence[Compared], comparison: Comparison) -> list[Any]:
    """Return the images with the largest losses and gains between the first and the last model, side by side."""
    change = comparison.samples[-1] - comparison.samples[0]
    order = [k for k in np.argsort(change, kind="stable").tolist() if change[k] == change[k]]
    worse, better = ([k for k in ranked if sign * change[k] > 0] for sign, ranked in ((-1, order), (1, order[::-1])))
    same = len(change) - len(better) - len(worse)
    parts: list[Any] = [
        Text(f"{pluralize(len(better), 'images')} improved, {len(worse)} got worse, {same} stayed the same.")
    ]
    for title, indices in (("worse", worse[:_RANKED]), ("improved", better[:_RANKED])):
        if indices:
            rows: list[list[Cell]] = [
                [str(comparison.sample_ids[k]), *comparison.samples[:, k].tolist(), float(change[k])] for k in indices
            ]
            columns = ("image", *comparison.names, "change")
            parts.append(Gallery(f"most {title}", _side_by_side(models, comparison, indices)))
            parts.append(Details(f"most {title}: values", [Table(columns, rows)]))
    return parts


def _side_by_side(models: Sequence[Compared], comparison: Comparison, indices: Sequence[int]) -> Iterator[list[Image]]:
    """Yield images, each once for each model with its predictions."""
    ids = comparison.sample_ids
    # Statistics may be in another order than the dataset.
    position_of = {image_id: position for position, image_id in enumerate(_plain_ids(models[0].evaluator))}
    for k in indices:
        position, images = position_of[ids[k]], []
        for model, value in zip(models, comparison.samples[:, k]):
            image = prediction_image(model.evaluator.parts[0], position)
            text = f"{ids[k]}, {model.name}: {comparison.sample_metric} {number(value)}"
            images.append(image._replace(text=text, caption=()))
        yield images


def _plain_ids(evaluator: Evaluator) -> list[Any]:
    """Return the ids of the dataset's samples as plain Python values."""
    return [each.item() if isinstance(each, np.generic) else each for each in evaluator.dataset.sample_ids()]
