"""Complete models: backbone, neck and head. MODELS imports every file here."""
