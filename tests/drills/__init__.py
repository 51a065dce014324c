"""What a run must live through: kills, damage, full disks, signals, and files that nobody meant. See `full.py`."""
