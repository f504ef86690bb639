"""Learning from images without labels, within a given time: `vitkit.pretrain`."""
