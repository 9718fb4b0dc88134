"""Models: configuration, initialisation, layers, forward pass and chunked log-probabilities."""
