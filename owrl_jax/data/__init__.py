"""Task sources, data sets of trajectories, and the pipelines over them."""
