"""Small runs on real images from ImageNet weights, and the same from random ones: what pretraining is worth."""
