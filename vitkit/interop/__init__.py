"""Models of other libraries: their configs and weights, read and written."""
