"""The fleet of engines: their actors, their health and their restarts."""
