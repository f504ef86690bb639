"""Writes the report of a finished run."""

from pathlib import Path
from typing import Any

from vitkit.distributed import is_main
from vitkit.errors import ConfigError
from vitkit.report import write_report
from vitkit.runs.api import test

REPORT_NAME, RESULTS_NAME = "report.html", "results.json"


def report_run(
    run: str | Path, out: str | Path | None = None, *, device: str | None = None, trust: bool = False, **overrides: Any
) -> Path:
    """Evaluate a run's best checkpoint on its validation data, and write a report and the predictions.

    Args:
        run: the folder of a run.
        out: the HTML file; None: report.html in the run's folder. The predictions, results.json, are written beside it.
        device, trust, overrides: see `vitkit.train`.
    Returns:
        the path of the report.
    Raises:
        VitkitError: an error that a user can cause, see vitkit/errors.py.
    """
    folder = Path(run)
    if not folder.is_dir():
        raise ConfigError(f"report: '{folder}' is no folder. Give that of a run, which vitkit train has printed.")
    out = folder / REPORT_NAME if out is None else Path(out)
    result = test(folder, out=out.with_name(RESULTS_NAME), device=device, trust=trust, **overrides)
    if is_main():
        write_report(result.evaluator, out, title=folder.resolve().name, facts={"model": str(folder)})
    return out
