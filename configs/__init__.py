"""Run configurations, one file per run."""
