"""What models attend to: figures and pages, a file for each kind of model."""
