"""What a run will take, before it is started: memory, time, and pictures of its schedule. Pure."""
