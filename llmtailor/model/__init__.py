"""What can be addressed in a model: params, states and parts. Only `mergekit_data` reads files."""
