"""Run configurations, one file per family."""
