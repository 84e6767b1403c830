"""Studies: experiments described in TOML files, run once and stored as small result files."""
