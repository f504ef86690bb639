"""CamVid (Brostow et al. 2009): small runs from random weights on real road scenes."""
