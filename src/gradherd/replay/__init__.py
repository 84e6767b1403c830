"""Run a policy or a sparsifier on recorded gradients, without training."""
