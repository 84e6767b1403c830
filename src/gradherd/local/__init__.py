"""Local steps: settings, the mean in few bits, the outer optimizer, and an exchange of weights."""
