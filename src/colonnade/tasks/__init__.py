"""What is trained on what, with which losses: a file per task."""
