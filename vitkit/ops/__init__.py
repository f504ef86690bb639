"""Plain functions on boxes, masks, images and label maps; nothing here reads a file."""
