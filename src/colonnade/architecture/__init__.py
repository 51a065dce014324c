"""What a model is made of, stated once and without torch: its units, their weights, their arithmetic."""
