"""From gradients to signs to permutations: which unit comes next."""
