"""The rollout manager process."""
