"""Who says whether an episode fulfilled its task: programs, models, and how far they agree. Needs no jax."""
