"""The calibration of scores: a reliability diagram and the expected calibration error (Guo et al. 2017,
https://arxiv.org/abs/1706.04599)."""

import numpy as np

from vitkit.evaluation.bootstrap import estimate
from vitkit.evaluation.report.charts import reliability_chart
from vitkit.evaluation.report.elements import Cell, details, section, table, warning
from vitkit.words import counted


def expected_calibration_error(counts: np.ndarray) -> np.ndarray:
    """Return the (R,) mean differences of score and accuracy, each bin weighted by its number of predictions.

    Args:
        counts: (R, 3, bins): number of predictions, sum of their scores, number of correct ones.
    """
    total = counts[:, 0].sum(axis=1)
    error = np.abs(counts[:, 1] - counts[:, 2]).sum(axis=1)
    return np.divide(error, total, out=np.full(len(counts), np.nan), where=total > 0)


def calibration_section(counts: np.ndarray, weights: np.ndarray, y_title: str, note: str) -> str:
    """Return the calibration section of a report.

    Args:
        counts: (3, bins, N) for each image: predictions in each bin of the scores, sum of their scores, correct ones.
        weights: (R, N) weights of the resamples.
    """
    resampled = np.einsum("kbn,rn->rkb", counts, weights)
    number, total, right = resampled.transpose(1, 0, 2)
    if not number[0].sum():
        return section("Calibration", warning("There is no prediction."), note=note)
    accuracy = np.divide(right, number, out=np.full(right.shape, np.nan), where=number > 0)
    confidence = np.divide(total, number, out=np.full(right.shape, np.nan), where=number > 0)[0]
    bins = [estimate(column) for column in accuracy.T]
    low, high = (np.array([getattr(each, end) for each in bins]) for end in ("low", "high"))
    ece = estimate(expected_calibration_error(resampled))
    rows: list[list[Cell]] = [
        [f"{k / len(bins):g} to {(k + 1) / len(bins):g}", int(number[0, k]), float(confidence[k]), each]
        for k, each in enumerate(bins)
    ]
    title = f"reliability of {counted(int(number[0].sum()), 'predictions')}"
    chart = reliability_chart(confidence, accuracy[0], low, high, title, y_title)
    every = table(("score", "predictions", "mean score", "right"), rows)
    return section(
        "Calibration", table(("", "ECE"), [["all predictions", ece]]), chart, details("bins", every), note=note
    )
