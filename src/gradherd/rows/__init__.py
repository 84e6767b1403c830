"""Per-example gradients, called rows, read off the user's own backward."""
