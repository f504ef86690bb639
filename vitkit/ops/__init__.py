"""Plain functions on boxes and masks."""
