"""The learner: from groups of finished episodes to one updated policy."""
