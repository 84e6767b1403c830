"""Records of runs -> a comparison, sentences and one HTML page. Reads records only."""
