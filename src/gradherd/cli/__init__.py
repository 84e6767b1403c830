"""One file per command: its options, checked when built, and what it prints."""
