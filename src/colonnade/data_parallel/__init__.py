"""Who owns parameters, gradients and optimizer state between uses, and how gradients are summed over dp."""
