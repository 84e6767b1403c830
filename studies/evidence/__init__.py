"""The pages of evidence: every claim of the studies next to our own results."""
