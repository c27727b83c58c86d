"""What of a model can be addressed: params, states and parts. Only `mergekit_data` reads files."""
