"""A trained model to text: one token after the other, on any tensor-parallel layout."""
