"""The rollout engine. Importing the package, or `engine.client`, needs no accelerator stack."""
