"""Files of images, video, JSON, text and annotations: reading them with errors that name the file."""
