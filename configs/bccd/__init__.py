"""Blood cells (BCCD, https://github.com/Shenggan/BCCD_Dataset): small runs from random weights on real images."""
