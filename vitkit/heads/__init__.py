"""From features to predictions."""
