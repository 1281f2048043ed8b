"""Read and write run directories: paths, specs, events, states and results."""
