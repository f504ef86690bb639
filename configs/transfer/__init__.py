"""Small runs on real images from ImageNet weights, and the same from random ones, to show the effect of pretraining."""
