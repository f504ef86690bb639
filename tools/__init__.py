"""The command line tools; each also runs as `vitkit NAME`."""
