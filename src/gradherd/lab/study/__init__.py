"""Studies: which runs answer a question, as data, and their results in small files."""
