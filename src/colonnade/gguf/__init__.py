"""GGUF, the file format of llama.cpp, read: models that are built as LLaMA, plain or quantized."""
