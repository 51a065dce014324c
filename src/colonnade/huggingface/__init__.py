"""Folders of Hugging Face: models that others have published, read and written. Nothing is downloaded, no code run."""
