"""What touches a user's model: attach, hooks, feedback to the sampler, saved state."""
