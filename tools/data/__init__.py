"""The commands `vitkit data VERB`: they read, check and write annotated images."""
