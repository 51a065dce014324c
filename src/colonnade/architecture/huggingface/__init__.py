"""Families as Hugging Face publishes them: how their config.json and their tensors' names are ours. Torch-free."""
