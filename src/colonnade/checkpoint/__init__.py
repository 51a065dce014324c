"""State ↔ disk: logical tensors that any layout can write and any other read."""
