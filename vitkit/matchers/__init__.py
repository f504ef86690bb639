"""Assignment of predictions to targets."""
