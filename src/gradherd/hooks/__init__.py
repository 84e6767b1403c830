"""What touches a user's model: hooks, exchanges, feedback to the sampler, saved state."""
