"""CamVid (Brostow et al. 2009): small runs on real road scenes."""
